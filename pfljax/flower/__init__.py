"""Runs on Flower: clients on nodes with their own data, and the same numbers as the simulation."""

from pfljax.flower.apps import client_app, server_app
from pfljax.flower.messages import NodeConfig
from pfljax.flower.node import Read, client_of_run, one_client
from pfljax.flower.rehearsal import LocalGrid, rehearse
from pfljax.flower.server import Outcome, Patience

__all__ = [
    "LocalGrid",
    "NodeConfig",
    "Outcome",
    "Patience",
    "Read",
    "client_app",
    "client_of_run",
    "one_client",
    "rehearse",
    "server_app",
]


def __dir__() -> list[str]:
    return sorted(__all__)
