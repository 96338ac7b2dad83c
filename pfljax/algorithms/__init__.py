"""The methods, and the one registry of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from pfljax.algorithms import fedavg, fedem, federico, local
from pfljax.solvers import Problem
from pfljax.types import Algorithm, UsageError


class Method(NamedTuple):
    """A registered method.

    Attributes:
        make: (problem, config) -> Algorithm.
        config: Its hyper-parameters, a frozen dataclass with defaults.
        title: Name and paper.
        keeps: What each client keeps.
        travels: What travels in a round.
    """

    make: Callable[[Problem, object], Algorithm]
    config: type
    title: str
    keeps: str
    travels: str


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
