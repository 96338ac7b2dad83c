"""Gradient inversion: what a client's upload reveals of its example, with and without protection.

    python -m experiments.inversion
    python -m experiments.inversion --model=cnn --channels=16,16 --noises=0.01,0.1 --compressions=topk:0.1,sign

A client takes one step of SGD on one example and sends its update, through the same stages as in any run; here, from
initial models, and with noise that is drawn from the seed, so that the table repeats. Whoever sees the update and knows
learning rate and model has the gradient g, and looks for an image x whose gradient is the same: Zhu, Liu, Han, "Deep
leakage from gradients" (NeurIPS 2019), with the label from the sign of the last bias' gradient (Zhao, Mopuri, Bilen,
"iDLG", 2020), and the objective of Geiping, Bauermeister, Droege, Moeller, "Inverting gradients" (NeurIPS 2020), Eq. 4,
minimized by Adam within the range of the pixels:

    1 - cos(grad_theta loss(x, y), g) + variation TV(x).

The table has the mean squared error over pixels, in units of the range of pixels squared, the peak signal-to-noise
ratio, and how many labels are right. The picture has the originals above the reconstructions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from matplotlib.figure import Figure

import pfljax as pfl
from pfljax import report
from pfljax.cli import build, launch, tables
from pfljax.cli.flags import RUNS, WHAT, Adapting, Network, define_data, define_devices
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, ClientContext, Key, Params, Split
from pfljax.exchange import lifting
from pfljax.exchange.views import view
from pfljax.models import Model
from pfljax.models.losses import cross_entropy

RATE = 0.1  # of the client's step; whoever inverts it knows it
# uses of the seed's key: the clients' step, and the first guess
BEGIN = 0
DRAW = 1


class Search(NamedTuple):
    """How an example is looked for.

    Attributes:
        steps: Steps of Adam.
        rate: Its first learning rate, which decays to 0 as a cosine.
        variation: Factor of the total variation.
        tries: First guesses, of which the best end counts.
        low, high: Range of the pixels.
    """

    steps: int
    rate: float
    variation: float
    tries: int
    low: float
    high: float


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags: clients of digits."""
    network = Group(WHAT, registry)
    network.declare(Network)
    network.declare(Adapting)
    define_data(registry)
    define_devices(registry)
    registry.set_default("devices", 1)
    add = Group(RUNS, registry)
    add.add("seed", int, 0, "seed for data, initial models, noise and first guesses", at_least=0)
    add.add("out", str, "runs/inversion", "folder for table and picture")
    add.add("victims", int, 4, "clients whose upload is inverted", at_least=1)
    add.several(
        "noises", ["0.01", "0.1"], "noise multipliers of private steps", float, above=0, empty=True
    )
    add.several(
        "compressions", ["topk:0.1", "quantize:8", "sign"], "as --compression_upload", empty=True
    )
    add.add("guesses", int, 1000, "steps of Adam on a reconstruction", at_least=1)
    add.add("guess_rate", float, 0.1, "learning rate of these steps", above=0)
    add.add(
        "tries",
        int,
        3,
        "first guesses for each reconstruction, of which the best end counts",
        at_least=1,
    )
    add.add(
        "variation", float, 1e-4, "factor of the total variation of a reconstruction", at_least=0
    )


def victims_of(federation: pfl.Federation, num: int) -> pfl.Federation:
    """The first clients, each with its first training example only."""
    num = min(num, federation.num_clients)
    x, y = (
        np.stack([np.asarray(part[k, :1]) for k in range(num)]) for part in federation.train[:2]
    )
    none = Split(x[:, :0], y[:, :0], np.zeros(num, np.int32))
    parts = {"train": Split(x, y, np.ones(num, np.int32)), "validation": none, "test": none}
    return dataclasses.replace(
        federation, **parts, group=None, target=None, client_names=None, local_clients=None
    )


def gradients_seen(run: pfl.Run, key: Key) -> tuple[Params, list[Params]]:
    """The initial model, and for each client the gradient that its update after one step stands for."""
    experiment = run.experiment
    plan = experiment.problem.plan
    clients = experiment.federation.client_data
    clients = jax.tree.map(jnp.asarray, clients)
    algorithm = experiment.algorithm(plan)
    state = lifting.init(algorithm, plan, jax.random.key(experiment.seed), clients)

    @jax.jit
    def one(client):
        zero = jnp.zeros((), jnp.int32)
        place = jax.random.fold_in(key, client)
        context = ClientContext(
            place, zero, zero, jnp.zeros((1,), jnp.int32), state.server.state, client
        )
        row = jax.tree.map(lambda leaf: leaf[client], state.rows)
        out = algorithm.client_update(context, state.models, row, view(clients, client))
        return tree.first(tree.scale(out.upload.update, -1 / RATE))

    return tree.first(state.models), [one(jnp.int32(k)) for k in range(run.clients.num_clients)]


def label_of(gradient: Params, num_classes: int) -> int:
    """The label of one example: of the cross entropy's gradient with the last bias, only its entry is negative.

    Raises:
        ArgumentError: if the model has no bias for each class.
    """
    biases = [leaf for leaf in jax.tree.leaves(gradient) if leaf.shape == (num_classes,)]
    if not biases:
        raise ArgumentError(
            "model", "accepted: a model with a bias for each class, which reveals the label"
        )
    return int(jnp.argmin(biases[-1]))


def total_variation(x: Array) -> Array:
    """Mean absolute difference of neighbors along the first two axes of (height, width, ...), or the only one."""
    return jnp.asarray(
        sum(jnp.abs(jnp.diff(x, axis=axis)).mean() for axis in range(min(x.ndim, 2)))
    )


@functools.partial(jax.jit, static_argnames=("model", "search"))
def reconstructed(
    model: Model, search: Search, key: Key, params: Params, gradient: Params, label: Array
) -> Array:
    """The example (*features) with this label whose gradient points as the given one does, nearly; best of a few."""
    shape = model.example_input.shape[1:]
    size = jnp.sqrt(tree.inner(gradient, gradient))

    def objective(x):
        # The network as it is: the forms that models compute it in have first derivatives only.
        def loss(params):
            return cross_entropy(
                model.network.forward(params, x[None], None)[0], label[None]
            ).mean()

        found = jax.grad(loss)(params)
        length = jnp.sqrt(jnp.maximum(tree.inner(found, found), jnp.finfo(jnp.float32).tiny))
        return (
            1
            - tree.inner(found, gradient) / (length * size)
            + search.variation * total_variation(x)
        )

    adam = optax.adam(optax.cosine_decay_schedule(search.rate, search.steps))

    def step(carry, _):
        x, state = carry
        updates, state = adam.update(jax.grad(objective)(x), state)
        return (jnp.clip(x + updates, search.low, search.high), state), None

    def found(key):
        x = jax.random.uniform(key, shape, minval=search.low, maxval=search.high)
        x = jax.lax.scan(step, (x, adam.init(x)), None, search.steps)[0][0]
        return x, objective(x)

    tried, left = jax.lax.map(found, jax.random.split(key, search.tries))
    return tried[jnp.argmin(left)]


def protections(settings: Settings) -> dict[str, tuple[pfl.Privacy, pfl.Compression]]:
    """What updates are protected with, by its name."""
    none = pfl.Privacy(), pfl.Compression()
    noised = {
        f"clipping at 1, noise {z:g}": pfl.Privacy(z, clip_norm=1.0)
        for z in settings.numbers("noises", float)
    }
    found = {"nothing": none} | {name: (privacy, none[1]) for name, privacy in noised.items()}
    return found | {text: (none[0], pfl.Compression(text)) for text in settings.compressions}


def picture(originals: Array, rows: dict[str, Array], search: Search) -> Figure:
    """A row of originals above the rows of their reconstructions, by name."""
    shown = {"original": originals, **rows}
    figure = Figure((1.2 * len(originals) + 2, 1.2 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), len(originals), squeeze=False)
    for line, (name, images) in zip(axes, shown.items(), strict=True):
        for place, image in zip(line, np.asarray(images), strict=True):
            image = np.clip((image - search.low) / (search.high - search.low), 0, 1)
            image = image if image.ndim > 1 else image[None]
            place.imshow(
                image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image,
                "gray",
                vmin=0,
                vmax=1,
            )
            place.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return figure


def row_of(
    name: str, originals: Array, found: Array, right: Sequence[bool], search: Search
) -> dict[str, Any]:
    """A protection's line of the table: errors over victims."""
    errors = np.square((np.asarray(found) - originals) / (search.high - search.low))
    each = errors.reshape(len(errors), -1).mean(axis=1)
    ratio = -10 * np.log10(np.maximum(each, 1e-12))
    return {
        "protection": name,
        "mse": float(each.mean()),
        "psnr": float(ratio.mean()),
        "labels": sum(right),
    }


def run(settings: Settings) -> None:
    """The command."""
    settings.check_out()
    settings.check_read()
    if settings.frozen:
        raise settings.error("frozen", "accepted: none; models are trained as a whole")
    ways = protections(settings)
    federation, _ = build.build_clients(settings, settings.seed)
    if (
        federation.task != "classification"
        or federation.train.y.ndim > 2
        or federation.inputs.dtype != np.float32
    ):
        raise ArgumentError(
            "dataset", "accepted: arrays of numbers with a class per example", settings.dataset
        )
    victims = victims_of(federation, settings.victims)
    key = jax.random.key(settings.seed)
    originals = np.asarray(victims.standardized.train.x[:, 0], np.float32)
    labels = victims.train.y[:, 0]
    how = settings.guesses, settings.guess_rate, settings.variation, settings.tries
    search = Search(*how, low=float(originals.min()), high=float(originals.max()))
    model = build.build_model(settings, federation)
    found = {}
    rows = []
    execution = settings.make(pfl.Execution)
    for name, (privacy, compression) in ways.items():
        local = pfl.LocalTraining(optax.sgd(RATE), privacy=privacy)
        options = {"compression": compression, "execution": execution, "seed": settings.seed}
        made = pfl.Run(pfl.FedAvg(), victims, model, local, **options)
        params, seen = gradients_seen(made, jax.random.fold_in(key, BEGIN))
        told = [label_of(gradient, victims.num_classes) for gradient in seen]
        guess = functools.partial(
            reconstructed, made.experiment.problem.model, search, jax.random.fold_in(key, DRAW)
        )
        found[name] = np.stack(
            [guess(params, g, jnp.int32(label)) for g, label in zip(seen, told, strict=True)]
        )
        rows.append(
            row_of(
                name,
                originals,
                found[name],
                [a == b for a, b in zip(told, labels, strict=True)],
                search,
            )
        )
    out = Path(settings.out)
    report.save(picture(originals, found, search), out / "inversion.png")
    heads = ["protection", "mean squared error", "PSNR, dB", "labels found"]
    body = [
        [r["protection"], f"{r['mse']:.2g}", f"{r['psnr']:.1f}", f"{r['labels']} of {len(labels)}"]
        for r in rows
    ]
    title = f"{victims.name}: reconstructions of {len(labels)} examples from one-step updates, seed {settings.seed}"
    tables.write(title, heads, body, rows, out, "inversion.png")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
