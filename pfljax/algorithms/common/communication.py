"""The hyperparameters of methods without a server: who is whose neighbor, and with which weights (`common.graphs`)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pfljax.settings.method import hyperparameter


@dataclasses.dataclass(frozen=True)
class CommunicationGraph:
    """Hyperparameters of a decentralized method: its communication graph and mixing weights."""

    graph: Literal["erdos_renyi", "ring", "torus", "random_regular", "complete", "file"] = (
        hyperparameter("erdos_renyi", help="communication graph")
    )
    edge_probability: float = hyperparameter(
        0.5,
        at_least=1e-6,
        at_most=1,
        static=True,
        read_with=("graph", "erdos_renyi"),
        help="edge probability of erdos_renyi",
    )
    degree: int = hyperparameter(
        4,
        at_least=1,
        read_with=("graph", "random_regular"),
        help="number of neighbors per client in random_regular",
    )
    edge_file: str = hyperparameter(
        "",
        read_with=("graph", "file"),
        help='file for graph=file: one line "i j" per edge, clients numbered from 0',
    )
    graphs: int = hyperparameter(
        1,
        at_least=1,
        at_most=10_000,
        help="T, number of random graphs, used in turn from round to round",
    )
    mixing: Literal["metropolis", "fastest", "file"] = hyperparameter(
        "metropolis", help="mixing matrix W on the graph; fastest maximizes the spectral gap"
    )
    mixing_file: str = hyperparameter(
        "",
        read_with=("mixing", "file"),
        help="file for mixing=file: K x K numbers (.npy or text), which also define the graph",
    )
    graph_seed: int = hyperparameter(0, at_least=0, help="seed of the random graphs")
