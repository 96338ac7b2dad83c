"""Methods of a few lines, for the tests of the engine."""

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.types import (
    Algorithm,
    ClientData,
    ClientOutput,
    ClientReport,
    First,
    Ledger,
    Split,
    Start,
    Topology,
    Upload,
)

PARAMETERS = 3  # of a model


def data_of(sizes, seed=0):
    """ClientData of K clients with random examples, zeros beyond each client's size."""
    sizes = np.asarray(sizes, np.int32)
    n_max = int(sizes.max())
    rng = np.random.default_rng(seed)
    real = np.arange(n_max) < sizes[:, None]
    x = rng.normal(size=(len(sizes), n_max, PARAMETERS)).astype(np.float32) * real[..., None]
    none = np.zeros((len(sizes), 0, PARAMETERS), np.float32)
    return ClientData(
        Split(x, real.astype(np.int32), sizes),
        Split(none, none[..., 0].astype(np.int32), 0 * sizes),
    )


def idle(context, models, row, data):
    """A client that does nothing."""
    return ClientOutput(row, Upload(), ClientReport(jnp.zeros(())))


def step_to_mean(context, models, row, data):
    """A client that moves each received model to the mean of its examples, and counts its rounds."""
    x = data.train.x[...].sum(axis=0) / jnp.maximum(data.train.size, 1)
    moved = jax.tree.map(lambda leaf: leaf + 0.5 * (x - leaf), models)
    return ClientOutput(row + 1, Upload(moved), ClientReport(jnp.square(models["w"] - x).sum()))


def make(client_update=idle, *, topology="shared", num_models=1, server=(), **fields):
    """A method whose clients keep a count, and whose server replaces models by the means of what came back."""

    topology = Topology(topology)

    def start(key, clients):
        models = (
            {"w": jax.random.normal(key, (num_models, PARAMETERS))} if topology.on_server else ()
        )
        return Start(server, models)

    def first_row(key, client, start):
        own = {"w": jax.random.normal(jax.random.fold_in(key, client), (PARAMETERS,))}
        return First(jnp.zeros((), jnp.int32), () if topology.on_server else own)

    def server_update(key, state, aggregate):
        if not jax.tree.leaves(aggregate.upload):
            return state, {}
        if topology in (Topology.OWN, Topology.PUSH):
            return state.with_models(aggregate.upload.update), {}
        count = jnp.maximum(aggregate.num_sent, 1)[:, None]
        return state.with_models(
            jax.tree.map(lambda leaf: leaf / count, aggregate.upload.update)
        ), {}

    required = {
        "start": start,
        "first_row": first_row,
        "client_update": client_update,
        "server_update": server_update,
    }
    return Algorithm(**required | {"topology": topology, "ledger": Ledger(1)} | fields)


def neighbors(held):
    """A download of the client itself and the `held` next ones of the cohort."""

    def download(context, row, cohort):
        places = (cohort.position(context.client) + jnp.arange(held + 1)) % cohort.ids.shape[0]
        return cohort.ids[places]

    return download
