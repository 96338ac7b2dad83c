"""Any algorithm with the stages of a run around it."""

from pfljax.run.experiment import Experiment
from pfljax.stages.pipeline import pipelined


def staged(problem, algorithm, federation, **settings):
    """The algorithm with the stages that a run with these settings has."""
    experiment = Experiment(None, problem, federation, **settings)
    return pipelined(problem, algorithm, experiment.stages)


def server_state(state):
    """The server's state, as the method knows it."""
    return state.server.state.state


def server_note(state, stage):
    """What a stage keeps on the server."""
    return state.server.state.notes[stage]


def rows(state):
    """The clients' rows, as the method knows them, leaves (K, ...)."""
    return state.rows.state


def client_notes(state, stage):
    """What a stage keeps on the clients, leaves (K, ...)."""
    return state.rows.notes[stage]


def bare(state):
    """The state as the method knows it."""
    return state.with_server(server_state(state)).with_rows(rows(state))
