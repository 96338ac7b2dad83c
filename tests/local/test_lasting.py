"""What of an optimizer's state goes on over rounds for a shared model: by hand, and for optimizers of optax."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.local import lasting

DECAY = optax.exponential_decay(0.4, transition_steps=1, decay_rate=0.5)
PARAMS = {
    "dense": {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)},
    "temperature": jnp.zeros(()),
}


class One(nn.Module):
    """w x for examples of one feature."""

    @nn.compact
    def __call__(self, x):
        return self.param("w", nn.initializers.zeros, (1,)) * x[:, 0]


class Pair(NamedTuple):
    shared: dict
    own: dict


class Counted(NamedTuple):
    count: jax.Array
    sums: dict


def ones(num=3):
    """Clients with examples x = 1 and y = 1, so that a step of SGD at rate r takes 2 r of the way from w to 1."""
    x = np.ones((4 * num, 1), np.float32)
    client = np.arange(4 * num) % num
    return pfl.Federation.from_arrays(
        x, np.ones(4 * num, np.float32), client=client, standardize=False, task="regression"
    )


def trained(optimizer, rounds=8, method=None):
    """The value of w that client 0 has after rounds of one step."""
    sim = pfl.Simulation(method or pfl.FedAvg(), ones(), One(), pfl.LocalTraining(optimizer))
    state = sim.init(jax.random.key(0))
    for _ in range(rounds):
        state, _ = sim.step(jax.random.key(1), state)
    return float(state.models["w"][0, 0])


def left(rates):
    """What is left of 1 - w after steps with these rates."""
    return float(np.prod([1 - 2 * rate for rate in rates]))


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        (optax.sgd(DECAY), [0.4 * 0.5**t for t in range(8)]),
        pytest.param(
            optax.sgd(optax.linear_schedule(0.0, 0.4, 8)),
            [0.05 * t for t in range(8)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            optax.inject_hyperparams(optax.sgd)(DECAY),
            [0.4 * 0.5**t for t in range(8)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation(),
            [0.1, 0.1],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            optax.apply_if_finite(optax.sgd(DECAY), 3),
            [0.4 * 0.5**t for t in range(8)],
            marks=pytest.mark.long,
        ),
        pytest.param(
            optax.chain(optax.sgd(0.1), optax.apply_every(4)), [0.4, 0.4], marks=pytest.mark.long
        ),
    ],
    ids=[
        "schedule",
        "warm-up",
        "inject_hyperparams",
        "MultiSteps",
        "apply_if_finite",
        "apply_every",
    ],
)
def test_a_schedule_inside_the_optimizer_goes_on_with_a_shared_model(optimizer, rates):
    """With one step a round: FedAvg's rate decays as Local's does, a warm-up warms up, and MultiSteps takes steps."""
    found = trained(optimizer)
    np.testing.assert_allclose(1 - found, left(rates), rtol=1e-4)


@pytest.mark.slow
def test_fedavg_s_rate_decays_as_local_s_does():
    assert abs(trained(optax.sgd(DECAY)) - trained(optax.sgd(DECAY), method=pfl.Local())) < 1e-5


@pytest.mark.slow
def test_counts_are_those_of_the_client_s_own_steps():
    """Two steps in each of the rounds in which a client takes part; the others do not count."""
    local = pfl.LocalTraining(optax.sgd(DECAY), steps=2)
    sim = pfl.Simulation(pfl.FedAvg(), ones(), One(), local, participation=1 / 3)
    state = sim.init(jax.random.key(0))
    left_over = 1.0
    counts = np.zeros(3, int)

    def counts_of(state):
        (kept,) = jax.tree.leaves(state.rows.notes["optimizers"].state)
        return np.asarray(kept).ravel()

    for _ in range(6):
        before = counts_of(state)
        state, _ = sim.step(jax.random.key(1), state)
        after = counts_of(state)
        (chosen,) = np.flatnonzero(after != before)
        left_over *= left([0.4 * 0.5 ** (counts[chosen] + t) for t in range(2)])
        counts[chosen] += 2
        np.testing.assert_array_equal(after, counts)
        np.testing.assert_allclose(1 - np.ravel(state.models["w"]), left_over, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_count_of_adam_starts_anew_with_its_moments():
    """A first step of Adam is as long as its rate, whatever the gradient; its schedule has gone on."""
    np.testing.assert_allclose(trained(optax.adam(DECAY), rounds=3), 0.4 + 0.2 + 0.1, rtol=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "goes_on"),
    [
        (optax.sgd(0.1, 0.9), set()),
        (optax.adam(0.1), set()),
        (optax.adam(DECAY), {"ScaleByScheduleState.count"}),
        (
            optax.masked(optax.adam(DECAY), {"dense": True, "temperature": False}),
            {"ScaleByScheduleState.count"},
        ),
        (
            optax.partition(
                {"a": optax.adam(DECAY), "b": optax.sgd(0.1)}, {"dense": "a", "temperature": "b"}
            ),
            {"ScaleByScheduleState.count"},
        ),
        (
            optax.named_chain(("one", optax.adam(DECAY)), ("two", optax.ema(0.9))),
            {"ScaleByScheduleState.count"},
        ),
        (
            optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
            {"AddNoiseState.count", "AddNoiseState.rng_key"},
        ),
        (
            optax.MultiSteps(optax.adam(DECAY), 2).gradient_transformation(),
            {f"MultiStepsState.{name}" for name in ("mini_step", "gradient_step", "acc_grads")}
            | {"ScaleByScheduleState.count"},
        ),
        (
            optax.contrib.schedule_free(optax.sgd(DECAY), DECAY),
            {"ScheduleFreeState.step_count", "ScaleByScheduleState.count"},
        ),
        (optax.adafactor(DECAY), {"ScaleByScheduleState.count"}),
        (optax.contrib.muon(DECAY), {"ScaleByScheduleState.count"}),
        (optax.lion(DECAY), {"ScaleByScheduleState.count"}),
    ],
)
@pytest.mark.parametrize("pairs", [False, True], ids=["parameters", "pairs of models"])
def test_counts_of_steps_go_on_and_moments_do_not(optimizer, goes_on, pairs):
    params = PARAMS
    if pairs:
        try:
            params = Pair(PARAMS, PARAMS)
            jax.eval_shape(optimizer.init, params)
        except (ValueError, KeyError):
            pytest.skip("its labels are those of single models")
    text = (
        lasting.described(optimizer, params)
        .partition("; in each round")[0]
        .removeprefix("over rounds goes on: ")
    )
    assert set(text.split(", ") if goes_on else ()) == goes_on
    state = optimizer.init(params)
    marked = lasting.marks(optimizer, params)
    earlier = lasting.select_lasting(marked, state)
    again = lasting.resumed(marked, state, earlier)
    assert jax.tree.structure(again) == jax.tree.structure(state) and len(earlier) == sum(marked)


def own():
    """A transformation with a count beside arrays like the parameters."""

    def zeros(params):
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformation(
        lambda params: Counted(jnp.zeros((), jnp.int32), zeros(params)),
        lambda grads, state, params=None: (
            jax.tree.map(lambda leaf: -0.1 * leaf, grads),
            Counted(state.count + 1, jax.tree.map(jnp.add, state.sums, grads)),
        ),
    )


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (optax.contrib.dog(), "DoGState"),
        (optax.rprop(0.1), "ScaleByRpropState"),
        (own(), "Counted"),
    ],
    ids=["DoG", "Rprop", "own"],
)
def test_optimizers_that_learn_from_many_steps_are_told(optimizer, name):
    with pytest.warns(UserWarning, match=f"^optimizer: {name} starts anew in each round"):
        pfl.Run(pfl.FedAvg(), ones(), One(), pfl.LocalTraining(optimizer))


@pytest.mark.slow
def test_the_plan_says_what_is_kept(said):
    pfl.Run(pfl.FedAvg(), ones(), One(), pfl.LocalTraining(optax.adam(DECAY))).train(rounds=1)
    (line,) = [line for line in said if "optimizer's state" in line]
    assert "over rounds goes on: ScaleByScheduleState.count" in line
    assert "in each round starts anew: ScaleByAdamState.count" in line


def test_federico_s_deltas_refuse_a_schedule_that_would_start_anew():
    local = pfl.LocalTraining(optax.sgd(DECAY))
    with pytest.raises(pfl.ArgumentError, match="update=delta: keeps no optimizer over rounds"):
        pfl.Run(pfl.FedeRiCo(neighbors=1, update="delta"), ones(), One(), local)
