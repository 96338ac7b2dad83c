"""A study as its author writes it: a method, a network, an optimizer, clients. `test_mutations` edits its text."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pfljax as pfl
from pfljax.author import (
    Algorithm,
    ClientOutput,
    ClientReport,
    First,
    Ledger,
    Prediction,
    Start,
    Upload,
)

TEMPERATURE = 2.0
BLEND = jnp.array([0.25, 0.75])
PRIOR = np.linspace(0.5, 1.5, 8, dtype=np.float32)
FROZEN = np.random.default_rng(7).normal(size=(8, 8)).astype(np.float32)


GAIN = 2.0


def on_host(x, shift=1.0):
    """On the host."""
    return GAIN * np.sin(x) + shift


def swapped(made):
    """Gradients as parameters, and the other way around."""
    return optax.GradientTransformation(
        made.init,
        lambda grads, state, params: made.update(
            jax.tree.map(lambda g, p: 2 * p - g, grads, params), state
        ),
    )


def used(row):
    return {"index": 0 * row["seen"][None], "weights": jnp.ones(1)}


def squash(x):
    return nn.relu(x)


class Backbone(nn.Module):
    """A network with a captured array."""

    classes: int = 3
    width: int = 5

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = x.reshape(x.shape[0], -1) @ jnp.asarray(FROZEN)
        x = squash(nn.Dense(self.width, kernel_init=nn.initializers.normal(0.1))(x))
        x = nn.LayerNorm(epsilon=1e-5)(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(self.classes, use_bias=True)(x)


@pfl.author.method(keeps="its model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Mine:
    """Mine (Me, 2026): a global model and a personal one near it."""

    pull: float = pfl.author.hyperparameter(0.5, at_least=0, help="to the global model")
    share: float = pfl.author.hyperparameter(
        0.25, at_least=0, at_most=1, help="of the global model in predictions"
    )

    def build(self, problem):
        solver = problem.solver
        half = problem.rounds // 2
        late = 0.5 if problem.rounds > 1 else 1.0

        def start(key, clients):
            return Start(jnp.zeros(()), problem.init_models(key, 1))

        def first_row(key, client, start):
            own = problem.init_model(jax.random.fold_in(key, 1), client, common=False)
            return First({"own": own, "seen": jnp.zeros((), jnp.int32)})

        def objective(params, batch, w):
            distance = sum(
                jnp.square(a - b).sum()
                for a, b in zip(*map(jax.tree.leaves, (params, w)), strict=True)
            )
            return solver.mean_loss(params, batch) + self.pull / 2 * distance

        def client_update(context, models, row, data):
            w = jax.tree.map(lambda leaf: leaf[0], models)
            new, loss = solver.fit(
                context.key, solver.begin(w), data.train, round_number=context.round
            )

            def near(params, batch):
                return objective(params, batch, w)

            own, _ = solver.fit(
                context.key,
                solver.begin(row["own"]),
                data.train,
                round_number=context.round,
                objective=near,
            )
            size = jnp.sqrt(data.train.size.astype(jnp.float32))
            upload = Upload(
                update=jax.tree.map(lambda leaf: leaf[None], new.params),
                weight=size[None],
            )
            row = {"own": own.params, "seen": row["seen"] + 1}
            return ClientOutput(row, upload, ClientReport(loss / TEMPERATURE))

        def server_update(key, state, aggregate):
            weight = jnp.maximum(aggregate.upload.weight, 1e-6)
            mean = jax.tree.map(lambda leaf: leaf / weight[0], aggregate.upload.update)
            step = jnp.where(state.round < half, 1.0, late)
            mean = jax.tree.map(lambda old, new: old + step * (new - old), state.models, mean)
            models = jax.tree.map(
                lambda old, new: BLEND[0] * old + BLEND[1] * new, state.models, mean
            )
            state = state.with_models(models).with_server(state.server.state + 1)
            return state, {"spread": weight.sum()}

        def predict(context, models, row, data):
            size = data.train.size
            own = jax.tree.map(lambda leaf: leaf[None], row["own"])
            mixed = jax.tree.map(lambda a, b: self.share * a + (1 - self.share) * b, models, own)
            del size
            return Prediction(mixed)

        def adapt(context, models, data):
            def moved(leaf):
                return jax.pure_callback(
                    on_host, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaf
                )

            start = jax.tree.map(lambda leaf: leaf * 0.99 ** (problem.rounds - 1), models)
            return Prediction(jax.tree.map(moved, start))

        return Algorithm(
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            predict=predict,
            adapt=adapt,
            topology="shared",
            ledger=Ledger(gradients=2),
        )


def optimizer(rate):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate, momentum=0.9))


def schedule(number):
    return 0.9**number


FACTORS = jnp.array([1.0, 1.0, 2.0])


def weighted(outputs, y):
    return FACTORS[y] * optax.softmax_cross_entropy_with_integer_labels(1.5 * outputs, y)


def clients(seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(48, 8)) * PRIOR).astype(np.float32)
    y = rng.integers(0, 3, 48)
    owner = np.repeat(np.arange(4), 12)
    return pfl.Federation.from_arrays(x, y, client=owner, test_fraction=0.25, standardize=True)


def run():
    local = pfl.LocalTraining(
        optimizer, 0.1, batch_size=4, epochs=1, schedule=schedule, class_weights=(1.0, 1.0, 2.0)
    )
    return pfl.Run(
        Mine(pull=0.5),
        clients(),
        Backbone(),
        local,
        seed=0,
        participation=0.5,
        server=pfl.Server(aggregator="mean"),
        attack=pfl.Attack("none"),
        execution=pfl.Execution(plan="map", chunk=8, devices=1),
    )
