"""What users set between clients and server, at its boundaries: rules, attacks, compression, and runs in one kernel.

Each row has what is right in NumPy, or the line of the error. Sizes are 0, 1, 2 and a prime.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from samples import params, sample
from staged import staged

import pfljax as pfl
from pfljax.contract.types import ClientContext, ClientData, ClientOutput, ClientReport, Upload
from pfljax.run.experiment import differences
from pfljax.run.replicates import Replicates
from pfljax.settings.fields import fields_of
from pfljax.stages import robust
from pfljax.stages.attacks import Attack
from pfljax.stages.collusion import colluded
from pfljax.stages.compression import COMPRESS, parsed
from pfljax.stages.pipeline import WithNotes

RNG = np.random.default_rng(0)
SEVEN = RNG.normal(size=(7, 5))
WEIGHTS = np.array([3.0, 1, 4, 1, 5, 9, 2])
SHARE = 0.2


def rows_of(update: Any) -> np.ndarray:
    """Stacked updates as rows (n, d)."""
    leaves = [np.float64(leaf) for leaf in jax.tree.leaves(update)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def one_row(update: Any) -> np.ndarray:
    """An update as a row (d,)."""
    return rows_of(jax.tree.map(lambda leaf: np.asarray(leaf)[None], update))[0]


def clipped_to_median(rows: np.ndarray) -> np.ndarray:
    """Rows of which none is longer than the median one."""
    length = np.linalg.norm(rows, axis=1)
    return rows * np.minimum(1, np.median(length) / np.maximum(length, 1e-6))[:, None]


def by_numpy(rule: str, rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What a rule makes of rows (n, d), in float64."""
    num = len(rows)
    cut = int(SHARE * len(rows) + 1e-9)
    if rule == "mean":
        return weight @ rows / weight.sum()
    if rule in ("median", "geometric_median"):  # which agree where the latter is used here
        return np.median(rows, axis=0)
    if rule == "trimmed_mean":
        return np.sort(rows, axis=0)[cut : num - cut].mean(axis=0)
    if rule in ("krum", "multi_krum"):
        square = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
        near = max(num - cut - 2, 1)
        scores = [np.sort(np.delete(row, k))[:near].sum() for k, row in enumerate(square)]
        best = np.argsort(scores, kind="stable")
        return rows[best[: 1 if rule == "krum" else num - cut]].mean(axis=0)
    if rule == "norm_clipping":
        return weight @ clipped_to_median(rows) / weight.sum()
    if rule == "flame":  # of updates that all point the same way
        return clipped_to_median(rows).mean(axis=0)
    if rule == "centered_clipping":
        center = np.median(rows, axis=0)
        for _ in range(5):
            center = center + clipped_to_median(rows - center).mean(axis=0)
        return center
    if rule == "dnc":
        apart = rows - rows.mean(axis=0)
        along = np.linalg.svd(apart, full_matrices=False)[2][0]
        kept = np.argsort((apart @ along) ** 2, kind="stable")[: num - cut]
        return rows[kept].mean(axis=0)
    assert rule == "sign_majority"
    return np.sign(np.sign(rows).sum(axis=0)) * np.median(np.abs(rows).mean(axis=1))


class Updates(NamedTuple):
    """What clients of a cohort send.

    Attributes:
        rule: How the server combines it.
        name: What is awkward.
        rows: (n, d), the clients' updates.
        counts: (n,) which of them are there; the others have weight 0.
        expected: (d,) what is right; None: what the rule gives in NumPy for those that are there.
    """

    rule: str
    name: str
    rows: np.ndarray
    counts: np.ndarray
    expected: np.ndarray | None = None


EVERY = (
    "mean",
    "median",
    "trimmed_mean",
    "multi_krum",
    "geometric_median",
    "norm_clipping",
    "centered_clipping",
)
EVERY += ("dnc", "flame", "sign_majority")
OF_MORE = ("multi_krum", "geometric_median")
EXACT = (
    "mean",
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "norm_clipping",
    "centered_clipping",
    "dnc",
)
EXACT += ("sign_majority",)
ABSENT = np.where(np.arange(7)[:, None] < 5, SEVEN, np.nan)
SPIKED = np.where(np.arange(7)[:, None] == 3, 1e18, SEVEN)
BROKEN = np.where(np.arange(7)[:, None] == 3, np.nan, SEVEN)
OTHERS = np.arange(7) != 3
TWO = np.array([[1.0, 2, 3, 4, 0], [2.0, 3, 1, 5, 0]])
RULES = [
    *(Updates(rule, "cohort of one", SEVEN[:1], np.ones(1, bool)) for rule in EVERY),
    *(
        Updates(rule, "cohort of two", TWO, np.ones(2, bool))
        for rule in EVERY
        if rule not in OF_MORE
    ),
    Updates(
        "geometric_median", "cohort of two", TWO, np.ones(2, bool), TWO[0]
    ),  # which weighs more
    *(
        Updates(rule, "nothing moved", 0 * SEVEN, np.ones(7, bool), np.zeros(5))
        for rule in (*EVERY, "krum")
    ),
    *(Updates(rule, "all the same", np.tile(SEVEN[0], (7, 1)), np.ones(7, bool)) for rule in EVERY),
    *(
        Updates(rule, "nobody came", SEVEN, np.zeros(7, bool), np.zeros(5))
        for rule in (*EVERY, "krum")
    ),
    *(Updates(rule, "a prime number", SEVEN, np.ones(7, bool)) for rule in EXACT),
    *(Updates(rule, "two of seven absent", ABSENT, np.arange(7) < 5) for rule in EXACT),
    *(
        Updates(rule, "one that is NaN", BROKEN, OTHERS)
        for rule in ("krum", "multi_krum", "sign_majority")
    ),
    *(
        Updates(rule, "one of 1e18", SPIKED, np.ones(7, bool))
        for rule in ("median", "trimmed_mean", "krum")
    ),
]


def rules(rows):
    """Parameters: a few by default, at least one of each kind in CI."""
    few = [row for row in rows if row.name == "cohort of one" and row.rule == "sign_majority"]
    some = sample_of(rows, lambda row: row.name)
    return params(
        [tuple(row) for row in rows], [tuple(row) for row in few], [tuple(row) for row in some]
    )


def sample_of(rows, kind: Callable[[Any], Any]) -> list:
    """A sample of rows, at least one of each kind."""
    by_name = {f"{row[0]} {row[1]}": row for row in rows}
    assert len(by_name) == len(rows)
    return [by_name[name] for name in sample([*by_name], lambda name: kind(by_name[name]))]


@pytest.mark.parametrize(("rule", "name", "rows", "counts", "expected"), rules(RULES))
def test_rules(rule, name, rows, counts, expected):
    """A scalar, a vector and an empty array in one update."""
    num = len(rows)
    rows = np.float32(rows)
    update = {"a": rows[:, :3], "b": rows[:, 3], "c": rows[:, 4:].reshape(num, 1, 1)}
    update["empty"] = np.zeros((num, 0), np.float32)
    weight = np.float32(np.where(counts, WEIGHTS[:num], 0))
    given = rows_of(update)[counts]
    found = one_row(jax.jit(robust.combine, static_argnums=0)(rule, update, weight, SHARE))
    if expected is None:
        expected = by_numpy(rule, given, WEIGHTS[:num][counts])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


class Shares(NamedTuple):
    """A rule that needs more clients than there are."""

    rule: str
    name: str
    num: int
    trim: float


TOO_FEW = [
    Shares("krum", "one client", 1, 0.2),
    Shares("krum", "two clients", 2, 0.0),
    Shares("multi_krum", "two of six attack", 6, 0.4),
    Shares("bulyan", "two clients", 2, 0.0),
    Shares("bulyan", "one of six attacks", 6, 0.2),
]


@pytest.mark.parametrize("row", TOO_FEW, ids=lambda row: f"{row.rule}, {row.name}")
def test_rules_that_need_more_clients(row):
    with pytest.raises(
        pfl.ArgumentError, match=r"^trim=.*needs at least \d+ clients a round.* more clients than"
    ):
        robust.check_number(row.rule, row.trim, row.num)


class Colluders(NamedTuple):
    """Attackers that see what all others send."""

    kind: str
    name: str
    attackers: np.ndarray


ONE_HONEST = np.arange(7) > 0
ONE_ATTACKS = np.arange(7) == 3
COLLUDERS = [
    Colluders(kind, name, attackers)
    for kind in ("alie", "ipm", "min_max", "min_sum")
    for name, attackers in (
        ("nobody attacks", np.zeros(7, bool)),
        ("one attacks", ONE_ATTACKS),
        ("all but one attack", ONE_HONEST),
        ("all attack", np.ones(7, bool)),
    )
    if name != "one attacks" or kind in ("alie", "ipm")  # the others' values are in tests/stages
]


def colluders():
    """Parameters of attackers."""
    few = [row for row in COLLUDERS if row.kind == "alie" and row.name == "all but one attack"]
    some = sample_of(COLLUDERS, lambda row: row.name)
    return params(
        [tuple(row) for row in COLLUDERS], [tuple(row) for row in few], [tuple(row) for row in some]
    )


@pytest.mark.parametrize(("kind", "name", "attackers"), colluders())
def test_colluders(kind, name, attackers):
    """Nobody attacks, or nobody is honest: all send their own. Of a single honest update the deviation is 0."""
    attack = Attack(kind)
    updates = {"a": np.float32(SEVEN)}
    found = jax.jit(colluded, static_argnums=(0, 1))(
        kind, attack.factor, updates, np.ones(7, bool), attackers
    )["a"]
    expected = SEVEN.copy()
    honest = SEVEN[~attackers]
    if attackers.any() and len(honest):
        mean = honest.mean(axis=0)
        deviation = honest.std(axis=0)
        expected[attackers] = {"alie": mean - 1.5 * deviation, "ipm": -4 * mean}.get(kind, mean)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


FEDERATION = toys.make_federation((2, 1, 3))
PROBLEM = toys.make_problem(FEDERATION)
UPLOAD = Upload(
    update={
        "scale": np.float32([3]),
        "kernel": np.float32([[1, -2]]),
        "empty": np.zeros((1, 0), np.float32),
    },
    weight=np.float32([5]),
    sums={"seen": np.int32([[4, 1]])},
)
ENTRIES = {
    "several": np.bool_(True),
    "steps": np.int32([4, 4]),
    "head": np.float32([3, 4]),
    "sums": {"likelihood": np.float32(0.5)},
    "nothing": np.zeros(0, np.float32),
}
TOLD = ClientReport(np.float32(1.5), entries=ENTRIES)


def sent(attack: Attack) -> tuple[Upload, ClientReport]:
    """What an attacker with examples sends in place of `UPLOAD` and `TOLD`."""

    def client_update(context, models, row, data):
        return ClientOutput((), UPLOAD, TOLD)

    plain = toys.make_algorithm("fedavg", PROBLEM)
    algorithm = dataclasses.replace(plain, client_update=client_update)
    zero = jnp.zeros((), jnp.int32)
    nothing = WithNotes((), {"attack": ()})
    index = jnp.zeros((1,), jnp.int32)
    context = ClientContext(jax.random.key(7), zero, zero, index, nothing, zero)
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), FEDERATION.train)
    attacked = staged(PROBLEM, algorithm, FEDERATION, attack=attack)
    data = ClientData(one, one, jnp.asarray(True))
    out = attacked.client_update(context, (), nothing, data)
    return jax.device_get((out.upload, out.report))


@pytest.mark.parametrize(
    "kind",
    [
        "noise",
        *(
            pytest.param(kind, marks=pytest.mark.campaign)
            for kind in ("sign_flip", "scale", "free_ride")
        ),
    ],
)
def test_attackers_leave_integers_switches_and_single_numbers(kind):
    """The noise attackers crashed on FedPAC's switch. A model's scalar parameter is attacked as others are."""
    upload, report = sent(Attack(kind))
    for found, own in ((upload.weight, 5), (upload.sums["seen"], [[4, 1]]), (report.loss, 1.5)):
        np.testing.assert_array_equal(found, own)
    entries = report.entries
    np.testing.assert_array_equal(entries["steps"], [4, 4])
    assert entries["several"] and entries["several"].dtype == bool
    assert entries["sums"]["likelihood"] == 0.5
    if kind == "noise":
        length = np.linalg.norm(np.append(upload.update["kernel"], upload.update["scale"]))
        assert length == pytest.approx(4 * np.linalg.norm([1, -2, 3]), rel=1e-5)
        assert np.linalg.norm(entries["head"]) == pytest.approx(4 * 5, rel=1e-5)
    else:
        factor = {"sign_flip": -4, "scale": 4, "free_ride": 0}[kind]
        np.testing.assert_array_equal(upload.update["kernel"], [[factor, -2 * factor]])
        np.testing.assert_array_equal(upload.update["scale"], [3 * factor])
        np.testing.assert_array_equal(entries["head"], [3 * factor, 4 * factor])


class Compressed(NamedTuple):
    """An update to compress.

    Attributes:
        form: How it is compressed.
        name: What is awkward.
        update: Leaves (1, ...).
        expected: What arrives; None: every entry is one of -m, 0 and m, of one sign with what was sent.
        num_bytes: That travel.
    """

    form: str
    name: str
    update: dict
    expected: dict | None
    num_bytes: float


def update_of(**leaves: Any) -> dict:
    """An update of one client."""
    return {name: np.float32([leaf]) for name, leaf in leaves.items()}


SCALAR = update_of(a=-3.0, b=[0.0])
EMPTY = update_of(a=np.zeros((0, 2)), b=np.zeros(0))
NOTHING = update_of(a=np.zeros((2, 3)), b=0.0)
PRIME = update_of(a=[[1.0, -4.0, 2.0]], b=[8.0, 0.0, -1.0, 3.0])
COMPRESSED = [
    Compressed("sign", "scalar", SCALAR, update_of(a=-1.5, b=[0.0]), 1 + 4),
    Compressed("topk:0.01", "scalar", SCALAR, SCALAR, 8),
    Compressed("lowrank:1", "scalar", SCALAR, SCALAR, 8),
    Compressed("quantize:8", "scalar", SCALAR, SCALAR, 2 + 4),
    Compressed("randomk:1", "scalar", SCALAR, SCALAR, 8),
    Compressed("sign", "empty", EMPTY, EMPTY, 0),
    Compressed("topk:0.01", "empty", EMPTY, EMPTY, 0),
    Compressed("randomk:0.5", "empty", EMPTY, EMPTY, 0),
    Compressed("quantize:1", "empty", EMPTY, EMPTY, 0),
    Compressed("lowrank:4", "empty", EMPTY, EMPTY, 0),
    Compressed("sign", "zeros", NOTHING, NOTHING, 1 + 4),
    Compressed("topk:0.5", "zeros", NOTHING, NOTHING, 4 * 8),
    Compressed("randomk:0.5", "zeros", NOTHING, NOTHING, 4 * 4),
    Compressed("quantize:1", "zeros", NOTHING, NOTHING, 1 + 4),
    Compressed("lowrank:2", "zeros", NOTHING, NOTHING, 4 * 2 * 5 + 4),
    Compressed(
        "sign",
        "prime",
        PRIME,
        update_of(a=[[19 / 7, -19 / 7, 19 / 7]], b=[19 / 7, 0, -19 / 7, 19 / 7]),
        1 + 4,
    ),
    Compressed("topk:0.3", "prime", PRIME, update_of(a=[[0, -4.0, 0]], b=[8.0, 0, 0, 0]), 2 * 8),
    Compressed("topk:1", "prime", PRIME, PRIME, 7 * 8),
    Compressed("lowrank:9", "prime", PRIME, PRIME, 4 * (1 + 3) + 4 * 4),
]


def compressed():
    """Parameters of updates."""
    few = [row for row in COMPRESSED if row.form == "sign" and row.name == "empty"]
    some = sample_of(COMPRESSED, lambda row: row.name)
    return params(
        [tuple(row) for row in COMPRESSED],
        [tuple(row) for row in few],
        [tuple(row) for row in some],
    )


@pytest.mark.parametrize(("form", "name", "update", "expected", "num_bytes"), compressed())
def test_compression_of_scalars_empty_arrays_and_primes(form, name, update, expected, num_bytes):
    compressor = parsed("upload", form)
    whole = {"model": update, "steps": np.int32([3])}
    found = compressor(jax.random.key(COMPRESS), whole)
    toys.assert_trees_close(jax.device_get(found["model"]), expected, rtol=1e-5, atol=1e-6)
    assert found["steps"] == 3
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), whole)
    assert compressor.num_bytes(shapes) == num_bytes + 4  # and the number


CLIENTS = pfl.data.digits(num_clients=4, train_examples=6)
MODEL = pfl.models.MLP(hidden=())


NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Other(NamedTuple):
    """A run that differs from another one in one field.

    Attributes:
        declaring: What declares the field: `Run`, or a class whose name is that of the argument.
        field: Its name.
        value: Another value than the default.
        beside: Further values of the same kind that both runs have, so that the field is read.
        shares: Whether both may share a kernel.
        options: Further arguments of both runs.
    """

    declaring: Any
    field: str
    value: Any
    beside: Mapping[str, Any] = NOTHING
    shares: bool = False
    options: Mapping[str, Any] = NOTHING

    def __str__(self):
        return f"{self.declaring.__name__}.{self.field}"


def FALLING(number):
    return 0.9**number


NOISY = {"noise_multiplier": 1.0, "clip_norm": 1.0}
LOCAL = pfl.LocalTraining
CLIENT_PRIVACY = pfl.ClientPrivacy
HALF = {"participation": 0.5}
OTHERS_OF = [
    Other(pfl.Run, "seed", 3, shares=True),
    Other(
        pfl.Run, "clients", pfl.data.digits(num_clients=4, train_examples=6, seed=1), shares=True
    ),
    Other(pfl.Run, "unseen", CLIENTS, shares=True),
    Other(pfl.Run, "config", {"settings": {"note": "mine"}}, shares=True),
    Other(pfl.Run, "method", pfl.FedProx()),
    Other(pfl.Run, "model", pfl.models.MLP(hidden=(3,))),
    Other(pfl.Run, "participation", 0.5),
    Other(pfl.Run, "fine_tune_epochs", 2),
    Other(pfl.Run, "eval_clients", 2),
    Other(pfl.Run, "never_trained", "initial"),
    Other(pfl.Run, "metrics", ["f1"]),
    Other(pfl.Run, "score", "loss"),
    Other(pfl.Run, "stages", [toys.load_example("own_stage").without_largest]),
    Other(pfl.Run, "stop", pfl.patience(3)),
    Other(pfl.Run, "drift", pfl.data.Drift(round=2)),
    Other(pfl.Run, "planned_rounds", 9),
    Other(pfl.Run, "clock", pfl.Clock()),
    Other(LOCAL, "optimizer", optax.sgd),
    Other(LOCAL, "learning_rate", 0.3, shares=True),
    Other(LOCAL, "batch_size", 2),
    Other(LOCAL, "epochs", 2),
    Other(LOCAL, "steps", 3),
    Other(LOCAL, "schedule", FALLING),
    Other(LOCAL, "keep_optimizer", True),
    Other(LOCAL, "common_init", True),
    Other(LOCAL, "privacy", pfl.Privacy(**NOISY)),
    Other(LOCAL, "loss", "cross_entropy"),
    Other(LOCAL, "label_smoothing", 0.1),
    Other(LOCAL, "class_weights", (2.0,) * 10),
    Other(LOCAL, "augment", "crop_flip"),
    Other(LOCAL, "dtype", "bfloat16"),
    Other(LOCAL, "matmul_precision", "highest"),
    Other(pfl.Server, "sampler", "weighted", options=HALF),
    Other(pfl.Server, "candidates", 3, {"sampler": "power_of_choice"}, options=HALF),
    Other(pfl.Server, "aggregator", "median"),
    Other(pfl.Server, "trim", 0.1, {"aggregator": "trimmed_mean"}),
    Other(pfl.Server, "root_examples", 5, {"aggregator": "fltrust"}),
    Other(pfl.Server, "secure_aggregation", True),
    Other(pfl.Attack, "kind", "noise"),
    Other(pfl.Attack, "attackers", 0.3, {"kind": "noise"}),
    Other(pfl.Attack, "strength", 2.0, {"kind": "noise"}),
    Other(pfl.Attack, "z", 0.5, {"kind": "alie"}),
    Other(pfl.Attack, "target", 1, {"kind": "backdoor"}),
    Other(pfl.Attack, "poisoned", 0.1, {"kind": "backdoor"}),
    Other(pfl.Attack, "trigger", 2.0, {"kind": "backdoor"}),
    Other(pfl.Compression, "upload", "sign"),
    Other(pfl.Compression, "download", "quantize:8"),
    Other(pfl.Compression, "error_feedback", False, {"upload": "sign"}),
    Other(pfl.Faults, "dropout", 0.1),
    Other(pfl.Faults, "lost", 0.1),
    Other(pfl.Faults, "broken", 0.1),
    Other(pfl.Faults, "on_divergence", "stop"),
    Other(CLIENT_PRIVACY, "noise_multiplier", 2.0, NOISY),
    Other(CLIENT_PRIVACY, "clip_norm", 2.0, NOISY),
    Other(CLIENT_PRIVACY, "mechanism", "tree", NOISY),
    Other(CLIENT_PRIVACY, "adaptive_quantile", 0.5, {"clip_norm": 1.0}),
    Other(CLIENT_PRIVACY, "clip_rate", 0.1, {"clip_norm": 1.0, "adaptive_quantile": 0.5}),
    Other(
        CLIENT_PRIVACY, "count_noise", 0.7, {**NOISY, "adaptive_quantile": 0.5, "count_noise": 0.6}
    ),
    Other(CLIENT_PRIVACY, "delta", 1e-6, NOISY),
    Other(CLIENT_PRIVACY, "noise_seed", 3, NOISY),
]
ARGUMENTS = {
    LOCAL: "local",
    pfl.Server: "server",
    pfl.Attack: "attack",
    pfl.Compression: "compression",
}
ARGUMENTS |= {pfl.Faults: "faults", CLIENT_PRIVACY: "client_privacy"}
ELSEWHERE = {*ARGUMENTS.values(), "tell_groups", "execution"}  # what tests of `Run` set as a whole
PRIVATE = [row for row in OTHERS_OF if row.declaring is CLIENT_PRIVACY]


def run_with(row: Other, value: Any) -> pfl.Run:
    """A run with a value of the field; `...`: its default."""
    given: dict[str, Any] = {"method": pfl.FedAvg(), "clients": CLIENTS, "model": MODEL}
    values = dict(row.beside) if value is ... else {**row.beside, row.field: value}
    if row.declaring is not pfl.Run:
        values = {ARGUMENTS[row.declaring]: row.declaring(**values)}
    return pfl.Run(**given | values | dict(row.options))


def others():
    """Parameters: one by default, some of each kind in CI."""
    some = [
        *sample_of(OTHERS_OF, lambda row: row.declaring),
        *sample_of(OTHERS_OF, lambda row: row.shares),
    ]
    few = [(row,) for row in OTHERS_OF if row.field == "batch_size"]
    return params([(row,) for row in OTHERS_OF], few, [(row,) for row in some])


@pytest.mark.parametrize("row", others())
def test_runs_that_differ_in_one_field(row):
    """`train_replicates` trained every run with the first run's batch size, epochs, participation and privacy noise."""
    if row in PRIVATE or row.field == "privacy":
        pytest.importorskip("jax_privacy")
    if row.field == "augment":
        pytest.skip("digits are too small to crop; its values are words, as those of `dtype`")
    first = run_with(row, ...)
    other = run_with(row, row.value)
    found = differences(first.experiment, other.experiment)
    if row.shares:
        assert not found
        return
    assert found
    words = r"^runs: .*accepted in one kernel: runs (that differ|without)"
    with pytest.raises(pfl.ArgumentError, match=words) as caught:
        pfl.train_replicates([first, other], 1)
    assert "\n" not in str(caught.value)


def test_every_declared_field_has_a_row():
    rows = {(row.declaring, row.field) for row in OTHERS_OF}
    declared = {(kind, name) for kind in (pfl.Run, *ARGUMENTS) for name in fields_of(kind)}
    missing = {(kind.__name__, name) for kind, name in declared - rows if name not in ELSEWHERE}
    assert not missing


@pytest.mark.slow
def test_a_private_run_states_the_epsilon_of_its_own_noise():
    """It stated epsilon 0.080 though it was trained with the noise of epsilon 74.9."""
    pytest.importorskip("jax_privacy")

    def of(noise):
        return run_with(
            Other(LOCAL, "privacy", None), pfl.Privacy(noise_multiplier=noise, clip_norm=1.0)
        )

    with pytest.raises(
        pfl.ArgumentError, match=r"local\.privacy\.noise_multiplier \(0\.5 and 20\.0\)"
    ):
        pfl.train_replicates([of(0.5), of(20.0)], 1)


@pytest.mark.slow
def test_hyperparameters_that_are_numbers_may_differ_and_others_may_not():
    def prox(mu):
        return pfl.Run(pfl.FedProx(mu=mu), CLIENTS, MODEL).experiment

    assert Replicates.from_experiments([prox(0.1), prox(1.0)]).numbers.hyperparameters[
        "mu"
    ].tolist() == pytest.approx([0.1, 1.0])

    def clusters(num):
        return pfl.Run(pfl.IFCA(clusters=num), CLIENTS, MODEL).experiment

    with pytest.raises(pfl.ArgumentError, match=r"method\.clusters \(2 and 3\)"):
        Replicates.from_experiments([clusters(2), clusters(3)])


@pytest.mark.slow
def test_equal_functions_written_twice_may_share_a_kernel():
    """A schedule, a loss or an optimizer with other numbers inside is another one."""

    def decaying(rate):
        return lambda number: rate**number

    def run(rate, step):
        return pfl.Run(
            pfl.FedAvg(),
            CLIENTS,
            MODEL,
            pfl.LocalTraining(optax.sgd(step), schedule=decaying(rate)),
        )

    same = run(0.9, 0.1)
    other = run(0.8, 0.1)
    faster = run(0.9, 0.2)
    assert differences(run(0.9, 0.1).experiment, same.experiment) == []
    assert differences(same.experiment, other.experiment) == ["local.schedule"]
    assert "local.optimizer.update" in differences(same.experiment, faster.experiment)
