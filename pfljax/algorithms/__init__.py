"""The methods, and the one registry of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from pfljax.algorithms import (
    afl,
    apfl,
    clustered,
    ditto,
    fedamp,
    fedavg,
    fedavg_data,
    fedem,
    federico,
    fedfomo,
    fedopt,
    fedper,
    fedprox,
    ifca,
    l2sgd,
    lg_fedavg,
    local,
    mocha,
    per_fedavg,
    pfedmb,
    pfedme,
    q_ffl,
    scaffold,
)
from pfljax.core.types import Algorithm, UsageError
from pfljax.local.problem import Problem


class Method(NamedTuple):
    """A registered method.

    Attributes:
        make: (problem, config) -> Algorithm.
        config: Its hyper-parameters, a frozen dataclass with defaults.
        title: Name and paper.
        keeps: What each client keeps.
        travels: What travels in a round.
        validates: Whether it needs validation examples.
    """

    make: Callable[[Problem, object], Algorithm]
    config: type
    title: str
    keeps: str
    travels: str
    validates: bool = False


METHODS: dict[str, Method] = {
    "local": Method(local.local, local.LocalConfig, "Local training", "its model", "nothing"),
    "fedavg": Method(
        fedavg.fedavg, fedavg.FedAvgConfig, "FedAvg (McMahan et al., 2017)", "nothing", "the global model, both ways"
    ),
    "fedavg_plus": Method(
        fedavg.fedavg_plus,
        fedavg.FedAvgPlusConfig,
        "FedAvg with local tuning (Jiang et al., 2019)",
        "its tuned copy",
        "the global model, both ways",
    ),
    "fedavg_data": Method(
        fedavg_data.fedavg_data,
        fedavg_data.FedAvgDataConfig,
        "FedAvg with data sharing (Zhao et al., 2018)",
        "5 % of everyone's examples",
        "the global model, both ways",
    ),
    "fedprox": Method(
        fedprox.fedprox, fedprox.FedProxConfig, "FedProx (Li et al., 2020)", "nothing", "the global model, both ways"
    ),
    "lg_fedavg": Method(
        lg_fedavg.lg_fedavg,
        lg_fedavg.LGFedAvgConfig,
        "LG-FedAvg (Liang et al., 2020)",
        "its lower layers",
        "the upper layers, both ways",
    ),
    "per_fedavg": Method(
        per_fedavg.per_fedavg,
        per_fedavg.PerFedAvgConfig,
        "Per-FedAvg (Fallah et al., 2020)",
        "a gradient step from the global model",
        "the global model, both ways",
    ),
    "pfedme": Method(
        pfedme.pfedme, pfedme.PFedMeConfig, "pFedMe (Dinh et al., 2020)", "its model", "the global model, both ways"
    ),
    "fedavgm": Method(
        fedopt.fedavgm,
        fedopt.FedAvgMConfig,
        "FedAvg with server momentum (Hsu et al., 2019)",
        "nothing",
        "the global model, both ways",
    ),
    "fedadam": Method(
        fedopt.fedadam,
        fedopt.FedAdamConfig,
        "FedAdam, FedYogi, FedAdagrad (Reddi et al., 2021)",
        "nothing",
        "the global model, both ways",
    ),
    "scaffold": Method(
        scaffold.scaffold,
        scaffold.ScaffoldConfig,
        "SCAFFOLD (Karimireddy et al., 2020)",
        "its control variate",
        "the global model and control variate, both ways",
    ),
    "q_ffl": Method(q_ffl.q_ffl, q_ffl.QFFLConfig, "q-FFL (Li et al., 2020)", "nothing", "the global model, both ways"),
    "afl": Method(afl.afl, afl.AFLConfig, "Agnostic FL (Mohri et al., 2019)", "nothing", "the global model, both ways"),
    "fedper": Method(
        fedper.fedper,
        fedper.FedPerConfig,
        "FedPer (Arivazhagan et al., 2019)",
        "its last layers",
        "the base layers, both ways",
    ),
    "ditto": Method(
        ditto.ditto, ditto.DittoConfig, "Ditto (Li et al., 2021)", "its model", "the global model, both ways"
    ),
    "apfl": Method(
        apfl.apfl,
        apfl.APFLConfig,
        "APFL (Deng et al., 2020)",
        "its model, its mixing weight",
        "the global model, both ways",
    ),
    "l2sgd": Method(
        l2sgd.l2sgd,
        l2sgd.L2SGDConfig,
        "L2SGD (Hanzely and Richtárik, 2020)",
        "its model",
        "the mean down, its model up",
    ),
    "fedamp": Method(
        fedamp.fedamp,
        fedamp.FedAMPConfig,
        "FedAMP (Huang et al., 2021)",
        "its model",
        "a mixture of all models down, its own up",
    ),
    "ifca": Method(
        ifca.ifca, ifca.IFCAConfig, "IFCA (Ghosh et al., 2020)", "nothing", "C models down, the chosen one up"
    ),
    "hypcluster": Method(
        ifca.hypcluster,
        ifca.HypClusterConfig,
        "HypCluster (Mansour et al., 2020)",
        "nothing",
        "C models down, the chosen one up",
    ),
    "pfedmb": Method(
        pfedmb.pfedmb,
        pfedmb.PFedMBConfig,
        "pFedMB (Mori et al., 2022)",
        "its weights of the branches",
        "B branches of every layer, both ways; its weights up",
    ),
    "mocha": Method(
        mocha.mocha,
        mocha.MochaConfig,
        "MOCHA (Smith et al., 2017)",
        "its model",
        "its last layer up, a combination of the others' down",
    ),
    "clustered": Method(
        clustered.clustered,
        clustered.ClusteredConfig,
        "Clustered FL (Sattler et al., 2020)",
        "nothing",
        "its cluster's model, both ways",
    ),
    "fedfomo": Method(
        fedfomo.fedfomo,
        fedfomo.FedFomoConfig,
        "FedFomo (Zhang et al., 2021)",
        "the model it trains from, its affinities",
        "M others' models down, its own up",
        validates=True,
    ),
    "fedfomo_average": Method(
        fedfomo.fedfomo_average,
        fedfomo.FedFomoAverageConfig,
        "FedFomo on averages of models (Eq. 14)",
        "the model it trains from, its affinities",
        "the mean and M + 1 leave-one-out means down, its model up",
        validates=True,
    ),
    "fedem": Method(
        fedem.fedem, fedem.FedEMConfig, "FedEM (Marfoq et al., 2021)", "its mixture weights", "M components, both ways"
    ),
    "dfedem": Method(
        fedem.dfedem,
        fedem.DFedEMConfig,
        "D-FedEM (Marfoq et al., 2021)",
        "M components, its mixture weights",
        "M components, to and from every neighbor in the graph",
    ),
    "federico": Method(
        federico.federico,
        federico.FedericoConfig,
        "FedeRiCo, decentralized (Algorithm 1)",
        "its model and tracked losses of others",
        "M neighbors' models down, as many gradients up",
    ),
    "federico_centralized": Method(
        federico.federico_centralized,
        federico.FedericoCentralizedConfig,
        "FedeRiCo with a server (Eq. 3-6)",
        "its weights over all models",
        "all K models down, K gradients up",
    ),
}


def get(name: str, flag: str = "--algorithm") -> Method:
    """The method registered under `name`, which the user gave with `flag`.

    Raises:
        UsageError: if there is none, with the nearest names.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"accepted: {', '.join(METHODS)}"
        raise UsageError(f"{flag}={name}: unknown algorithm; {hint}")
    return METHODS[name]
