"""A run's program: digests of everything that it computes, by part.

A round and the predictors are traced for the run's shapes, on one device. The digest of a traced function covers its
operations, their parameters and the arrays that it captured; it contains no names, comments, addresses or devices, so
that only what changes results changes it. Each operation belongs to a part, such as the model or a method's
`client_update`, which tells the user what has changed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval as pe

from pfljax.contract import tree
from pfljax.contract.held import taking
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientData,
    Key,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
)
from pfljax.exchange import lifting
from pfljax.exchange.plan import make_host_plan
from pfljax.exchange.rounds import make_round
from pfljax.folder import host_code
from pfljax.folder.host_code import content
from pfljax.local.problem import Problem, watched
from pfljax.run.experiment import Experiment
from pfljax.stores import serving

LIBRARIES = ("pfljax", "jax", "flax", "optax")
# Settings of JAX that change results and that no trace shows.
SETTINGS = ("jax_threefry_partitionable", "jax_random_seed_offset", "jax_default_matmul_precision")
FUNCTIONS = (
    "start",
    "first_row",
    "download",
    "sample",
    "client_update",
    "server_update",
    "whom",
    "predict",
    "apply",
    "adapt",
    "tune",
)
PREDICTS = ("whom", "predict", "apply", "tune", "collaboration")
MODEL = "model"
LOSS = "loss"
OPTIMIZER = "optimizer"
ENGINE = "rounds and evaluation"
FROZEN = "frozen parameters"
ARRAYS = ": captured arrays"
INPUTS = ": inputs"
PART = re.compile(r"part:(\w+)")
WRITTEN: dict[tuple, str] = {}  # literals as text
# Numbers of rounds in traces of `adapt`, if it reads them, beside the planned one, for which it is traced apart: a run
# that goes on for more rounds stays the same, and its newcomers then train for all of them. What is computed only in
# short runs, or only in long ones, is in some of the traces.
ROUNDS = (5, 100, 500)
BUILD = "build"
ADAPT = "adapt"
# Parameters of operations that change no result: names, and where and how it is computed.
IGNORED = {
    *(
        "name",
        "debug_info",
        "callback",
        "fwd_jaxpr_thunk",
        "jvp_jaxpr_fun",
        "jvp_jaxpr_thunk",
        "bwd",
        "inline",
    ),
    *(
        "sharding",
        "in_shardings",
        "out_shardings",
        "out_sharding",
        "in_layouts",
        "out_layouts",
        "mesh",
        "ctx_mesh",
    ),
    *(
        "devices",
        "srcs",
        "platforms",
        "donated_invars",
        "keep_unused",
        "compiler_options_kvs",
        "unroll",
    ),
    *("_split_transpose", "ft_in", "ft_out"),
}

# Parameters that are functions on the host, or become part of the program by a transformation.
CALLED = {"callback", "rule"}
DEBUGGING = {"debug_callback", "debug_print"}

Digests = dict[str, str]


def identified(experiment: Experiment) -> Experiment:
    """The run, which describes its program as it is now; later padding and execution plans change no result."""
    # by planned number of rounds; None: it does not depend on it
    known: dict[int | None, dict[str, Any]] = {}

    def described(planned: int) -> dict[str, Any]:
        if None not in known and planned not in known:
            found = program(experiment, planned=planned)
            known[planned if reads_rounds(found) else None] = found
        return known[None] if None in known else known[planned]

    return dataclasses.replace(experiment, programs=described)


def program(
    experiment: Experiment, within: Sequence[str] = (), planned: int | None = None
) -> dict[str, Any]:
    """Describes what a run computes, for config.json.

    Args:
        experiment: The run.
        within: The parts to describe; empty: all.
        planned: Planned number of rounds; None: the run's own.

    Returns:
        "method": name of its class.
        "planned_rounds": the planned number of rounds, if training or predictions depend on it: if it is read while the
            method is built or while one of its functions but `adapt` is traced. Otherwise None.
        "newcomers": the planned number of rounds, and digest of what newcomers compute after these, if `adapt` reads
            the number. Otherwise None.
        "parts": digest by part.
        "sources": digest of each file of the user's that defines something, or that such a file imports from its
            folder, without comments.
        "versions": version by library. Where versions differ, sources are compared, since parts cannot be.
        "host": what functions compute with that are not traced, by what they are; see `host_code.identity`.
        "settings": JAX's own settings on which random numbers and products depend.
    """
    planned = experiment.planned if planned is None else planned
    found = [experiment.method, *(model.module for model in experiment.problem.models)]
    if experiment.local is not None:
        found += [experiment.local.optimizer, experiment.local.schedule, experiment.local.loss]
    of_run = traced(experiment, planned, within)
    return {
        "method": type(experiment.method).__name__,
        "planned_rounds": planned if of_run.reads_rounds else None,
        "newcomers": {"rounds": planned, "digest": of_run.newcomers} if of_run.newcomers else None,
        "parts": of_run.parts,
        "sources": {name: digest for each in found for name, digest in source(each).items()},
        "versions": {name: version(name) for name in LIBRARIES},
        "host": {
            name: host_code.identity(function) for name, function in on_host(experiment).items()
        },
        "settings": {name: getattr(jax.config, name, None) for name in SETTINGS},
    }


def reads_rounds(program: dict[str, Any]) -> bool:
    """Whether the description of a program depends on the planned number of rounds."""
    return program["planned_rounds"] is not None or program["newcomers"] is not None


def on_host(experiment: Experiment) -> dict[str, Any]:
    """The functions of a run that Python calls, by what they are."""
    found: dict[str, Any] = {
        f"metric {name}": metric for name, metric in experiment.metrics.items()
    }
    if experiment.stop is not None:
        found["stop rule"] = experiment.stop
    return found


def differences(
    before: dict[str, Any], now: dict[str, Any], within: Sequence[str] = ()
) -> list[str]:
    """Names the parts of two programs (see `program`) that differ; empty if they compute the same, or one is not known.

    Compares the parts `within`, or all.
    """
    if not (before and now):
        return []
    known = "sources" if before["versions"] != now["versions"] else "parts"
    was = before[known]
    new = now[known]
    changed = [
        name for name in (*new, *(was.keys() - new.keys())) if was.get(name) != new.get(name)
    ]
    if known == "parts" and ADAPT not in changed and adapts_otherwise(before, now):
        changed.append(ADAPT)
    own = [name for name in changed if not name.endswith(INPUTS)]
    changed = own or changed  # what a part is given changes with the parts before it
    if within and known == "parts":
        changed = [name for name in changed if name.partition(":")[0] in within]
    upstream = [
        name for name in changed if name.partition(":")[0] in (FROZEN, MODEL, LOSS, OPTIMIZER)
    ]  # others depend on these

    def named(part):
        return (
            f"{part} of {now['method']}"
            if part in (*FUNCTIONS, "collaboration", "ledger")
            else part
        )

    split = (part.partition(":") for part in upstream or changed)
    found = [named(part) + colon + rest for part, colon, rest in split]
    return found if within else found + beside_traces(before, now)


def adapts_otherwise(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether newcomers compute something else after the same number of rounds; False if they are not known for it."""
    rounds = rounds_of_newcomers(before)
    if rounds is None or rounds != rounds_of_newcomers(now):
        return False
    return before["newcomers"].get("digest") != now["newcomers"]["digest"]


def rounds_of_newcomers(program: dict[str, Any]) -> int | None:
    """The number of rounds after which newcomers are known; None if they do not depend on it."""
    newcomers = program.get("newcomers")
    rounds = newcomers.get("rounds") if isinstance(newcomers, dict) else None
    # a file that is not whole may say anything
    return rounds if isinstance(rounds, int) and rounds > 0 else None


def beside_traces(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names what differs between two programs that no trace shows; what an older program does not tell is left out."""
    found = []
    functions_before = before.get("host", {})
    functions_now = now.get("host", {})
    # a run may go on with further metrics
    for name in sorted(functions_before.keys() & functions_now.keys()):
        if text := host_code.difference(functions_before[name], functions_now[name]):
            found.append(f"{name}: {text}")
    for name, value in now.get("settings", {}).items():
        was = before.get("settings", {}).get(name, value)
        if was != value:
            found.append(f"{name}: was {was}, is {value}")
    return found


def other_versions(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Says which versions of libraries differ; "" if none does."""
    both = before and now
    pairs = [
        (name, before["versions"].get(name), now["versions"][name]) for name in LIBRARIES if both
    ]
    return ", ".join(f"{name} {was} (now {new})" for name, was, new in pairs if was != new)


@functools.cache
def version(name: str) -> str:
    return importlib.metadata.version(name)


class Traced(NamedTuple):
    """A run's program.

    Attributes:
        parts: Digest by part.
        reads_rounds: Whether anything but `adapt` reads the planned number of rounds.
        newcomers: Digest of what newcomers compute after that number of rounds; "" if it does not depend on it.
    """

    parts: Digests
    reads_rounds: bool
    newcomers: str


def traced(experiment: Experiment, planned: int, within: Sequence[str] = ()) -> Traced:
    """Traces a run's program for a planned number of rounds; its execution plan does not matter.

    `adapt` is traced for several numbers of rounds if it reads them, or if they are read while the method is built.
    """
    reads: set[str] = set()  # what has read the number of rounds
    now = BUILD  # what is being traced
    adapted = ""

    def noted() -> None:
        reads.add(now)

    problem, algorithm = in_parts(experiment, planned, noted)
    arguments = shapes(problem, algorithm, experiment)
    streams: dict[str, Any] = defaultdict(hashlib.sha256)

    def add(part: str, fn: Callable, *args: Any) -> None:
        """Adds the digests of a traced function to their parts."""
        make = needed if part == "predict" else jax.make_jaxpr
        made = make(taking(problem.model.network, fn))(*args, frozen=problem.model.network.own)
        for (name, suffix), digest in digests(made, part).items():
            # which "predict" has, and `pfljax.load` traces alone
            if part != ADAPT or name not in PREDICTS:
                streams[name + suffix].update(digest)

    for part, fn, *args in training(problem, algorithm, arguments):
        if not within or part in within:
            now = part
            add(part, fn, *args)
    if algorithm.adapt and (not within or ADAPT in within):
        now = ADAPT
        for rounds in ROUNDS:
            if rounds == ROUNDS[0] or reads & {BUILD, ADAPT}:
                add(ADAPT, *newcomers(*in_parts(experiment, rounds, noted), arguments))
        if reads & {BUILD, ADAPT}:
            adapted = digest_of_newcomers(experiment, planned, arguments)
    streams["ledger"].update(repr(algorithm.ledger).encode())
    model = problem.model
    if model.frozen is not None:
        streams[FROZEN].update(model.adapted.digest().encode())
    for part, value in named_arrays(problem, arguments).items():
        if not within or part in within:
            streams[part].update(names_of_leaves(value).encode())
    parts = {name: stream.hexdigest()[:16] for name, stream in streams.items()}
    return Traced(parts, bool(reads - {ADAPT}), adapted)


def digest_of_newcomers(experiment: Experiment, rounds: int, arguments: Arguments) -> str:
    """Digest of what newcomers compute after a number of rounds."""
    problem, algorithm = in_parts(experiment, rounds, lambda: None)
    fn, *args = newcomers(problem, algorithm, arguments)
    made = jax.make_jaxpr(taking(problem.model.network, fn))(
        *args, frozen=problem.model.network.own
    )
    found = digests(made, ADAPT)
    stream = hashlib.sha256()
    for name in sorted(found):
        if name[0] not in PREDICTS:
            stream.update(found[name])
    return stream.hexdigest()[:16]


def named_arrays(problem: Problem, arguments: Arguments) -> dict[str, PyTree]:
    """Arrays that checkpoints hold under their names, by the part of the program that makes them."""
    state = arguments.state
    return {
        MODEL: [model.network.shapes for model in problem.models],
        "start": state.server,
        "first_row": state.clients,
    }


def names_of_leaves(value: PyTree) -> str:
    """The names of a tree's arrays, by which they are restored."""
    return ";".join(
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)
    )


def in_parts(
    experiment: Experiment, rounds: int, noted: Callable[[], None]
) -> tuple[Problem, Algorithm]:
    """A run's problem and algorithm for a number of rounds, whose operations belong to parts of the program.

    `noted` is called whenever the number of rounds is read.
    """
    plan = make_host_plan()
    problem = experiment.problem
    model = experiment.problem.model
    if model.criterion is not None and experiment.local is not None:
        model = dataclasses.replace(model, criterion=in_part(LOSS, model.criterion))
        problem = problem._replace(model=model, solver=experiment.local.bind(model))
    optimizer = problem.solver.optimizer
    optimizer = optimizer._replace(
        init=in_part(OPTIMIZER, optimizer.init), update=in_part(OPTIMIZER, optimizer.update)
    )
    problem = problem._replace(
        rounds=rounds, plan=plan, solver=problem.solver._replace(optimizer=optimizer)
    )
    problem = watched(problem, noted)
    algorithm = dataclasses.replace(experiment, problem=problem, planned_rounds=None).algorithm(
        plan
    )
    report = algorithm.report
    if report.collaboration:
        report = dataclasses.replace(
            report, collaboration=in_part("collaboration", report.collaboration)
        )
    named = {name: in_part(name, fn) for name, fn in functions(algorithm).items()}
    engine = algorithm.engine._replace(tune=named.pop("tune", None))
    return problem, dataclasses.replace(algorithm, **named, report=report, engine=engine)


class Arguments(NamedTuple):
    """What a run's functions are traced with: a key, and shapes of all clients' data and of the initial state."""

    key: Key
    clients: ClientData
    start: Start
    state: State


def shapes(problem: Problem, algorithm: Algorithm, experiment: Experiment) -> Arguments:
    """The shapes with which a run is traced."""
    key = jax.random.key(0)
    # All clients, of whom each process may have only some, and whose examples may be shared.
    clients = tree.shapes_of_rows(experiment.federation.client_data, problem.num_clients)
    start = jax.eval_shape(algorithm.start, key, clients)
    state = jax.eval_shape(functools.partial(lifting.init, algorithm, problem.plan), key, clients)
    return Arguments(key, clients, start, state)


def training(problem: Problem, algorithm: Algorithm, arguments: Arguments) -> list[tuple]:
    """(part, function, arguments...) of all that a run computes, but for newcomers.

    They are apart, so that no part depends on the values of another.
    """
    key, clients, start, state = arguments
    model = problem.model
    models = problem.models
    one_round = make_round(algorithm, problem.plan, problem.cohort_size)
    ids = jax.ShapeDtypeStruct((problem.num_clients,), jnp.int32)

    def of_models(key: Key, params: Params, x: PyTree, y: Array) -> list[tuple]:
        return [
            (m.init(key), m.predict(p, x), m.loss(p, x, y, key))
            for m, p in zip(models, params, strict=True)
        ]

    served = functools.partial(
        lifting.serve, algorithm, problem.plan, predicted(problem, algorithm)
    )
    labels = jnp.zeros(model.targets.shape, model.targets.dtype)
    return [
        ("start", algorithm.start, key, clients),
        ("first_row", algorithm.first_row, key, np.int32(0), start),
        (ENGINE, one_round, key, np.int32(0), state, clients),
        ("predict", served, key, state, ids, clients),
        (
            MODEL,
            of_models,
            key,
            [each.network.shapes for each in models],
            model.example_input,
            labels,
        ),
    ]


def newcomers(problem: Problem, algorithm: Algorithm, arguments: Arguments) -> tuple:
    """(function, arguments...) of what newcomers predict."""
    key, clients, _, state = arguments
    served = functools.partial(
        lifting.serve_newcomers, algorithm, problem.plan, predicted(problem, algorithm)
    )
    return served, key, state, clients, ()


def predicted(problem: Problem, algorithm: Algorithm) -> Callable[[Prediction, Any], Array]:
    """The outputs for an example of zeros, as a function of a prediction and its inputs."""

    def outputs(prediction: Prediction, inputs: Any) -> Array:
        x = jax.tree.map(jnp.zeros_like, problem.model.example_input)
        return serving.outputs(problem, algorithm, x)(prediction, inputs)

    return outputs


def needed(fn: Callable) -> Callable[..., Any]:
    """Like `jax.make_jaxpr`, without what no result depends on.

    So what a client predicts with does not depend on an optimizer in its row, which `pfljax.load` may not know.
    """

    def trace(*args: Any, **options: Any) -> Any:
        traced = jax.make_jaxpr(fn)(*args, **options)
        jaxpr, used, _ = pe.dce_jaxpr_consts(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
        consts = [array for array, kept in zip(traced.consts, used, strict=True) if kept]
        return types.SimpleNamespace(jaxpr=jaxpr, consts=consts)

    return trace


def functions(algorithm: Algorithm) -> dict[str, Callable]:
    """The functions of a method, by name."""
    found = {name: getattr(algorithm, name, None) for name in FUNCTIONS}
    found["tune"] = algorithm.engine.tune
    return {name: fn for name, fn in found.items() if fn is not None}


def in_part(name: str, fn: Callable) -> Callable:
    """The same function, whose operations belong to a part of the program."""

    @functools.wraps(fn)
    def named(*args, **options):
        with jax.named_scope(f"part:{name}"):
            return fn(*args, **options)

    return named


def digests(
    traced: Any, part: str, known: dict[tuple[int, str], dict] | None = None
) -> dict[tuple[str, str], bytes]:
    """Digests of a jaxpr, closed or without constants: of its operations and of the arrays that it captured, by part.

    Operations that name no part belong to `part`. `known` has the digests of functions inside others, which may be
    called several times.
    """
    known = {} if known is None else known
    jaxpr = getattr(traced, "jaxpr", traced)
    if (id(jaxpr), part) in known:
        return known[id(jaxpr), part]
    captured = dict(zip(jaxpr.constvars, getattr(traced, "consts", ()), strict=False))
    streams: dict[tuple[str, str], Any] = defaultdict(hashlib.sha256)
    # Each part numbers the variables that it uses, so that parts do not depend on each other's length. Where those come
    # from that other parts made is told apart.
    numbers: dict[str, dict] = defaultdict(dict)
    origins = {
        atom: ("input", number) for number, atom in enumerate((*jaxpr.invars, *jaxpr.constvars))
    }

    def told(atom: Any, where: str) -> str:
        if isinstance(atom, core.Literal):
            return f"{written(atom.val)}:{text(getattr(atom.aval, 'dtype', ''))}"
        if atom in captured:
            streams[where, ARRAYS].update(content(captured[atom]))
        if atom not in numbers[where]:
            numbers[where][atom] = len(numbers[where])
            origin = origins.setdefault(atom, (where, numbers[where][atom]))
            if origin[0] != where:
                streams[where, INPUTS].update(f"{numbers[where][atom]}:{origin};".encode())
        return f"{numbers[where][atom]}:{getattr(atom.aval, 'shape', '')}{text(getattr(atom.aval, 'dtype', atom.aval))}"

    for eqn in without_debugging(jaxpr.eqns, jaxpr.outvars):
        where = part_of(eqn, part)
        inside = []
        texts = [eqn.primitive.name, *(told(atom, where) for atom in (*eqn.invars, *eqn.outvars))]
        texts += [
            f"{name}={canonical(eqn.params[name], inside)}"
            for name in sorted(eqn.params.keys() - IGNORED)
        ]
        streams[where, ""].update(";".join(texts).encode())
        for name in CALLED & eqn.params.keys():
            streams[where, ""].update(host_code.identity(eqn.params[name])["code"].encode())
        for each in inside:
            for place, digest in digests(each, where, known).items():
                streams[place].update(digest)
    streams[part, ""].update(";".join(told(atom, part) for atom in jaxpr.outvars).encode())
    found = {place: stream.digest() for place, stream in streams.items()}
    known[id(jaxpr), part] = found
    return found


def without_debugging(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Operations without those of `jax.debug`, and without what only these read."""
    dropped = {id(eqn) for eqn in eqns if eqn.primitive.name in DEBUGGING}
    if not dropped:
        return [*eqns]
    readers: dict[Any, list[Any]] = defaultdict(list)
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, core.Literal):
                readers[atom].append(eqn)
    results = {atom for atom in outvars if not isinstance(atom, core.Literal)}
    for eqn in reversed(eqns):
        of_eqn = [each for atom in eqn.outvars for each in readers[atom]]
        is_result = any(atom in results for atom in eqn.outvars)
        if (
            of_eqn
            and not is_result
            and not eqn.effects
            and all(id(each) in dropped for each in of_eqn)
        ):
            dropped.add(id(eqn))
    return [eqn for eqn in eqns if id(eqn) not in dropped]


def part_of(eqn: Any, part: str) -> str:
    """The part of the program that an operation belongs to."""
    return (PART.findall(text(eqn.source_info.name_stack)) or [part])[-1]


@functools.lru_cache(maxsize=1 << 14)
def text(value: Any) -> str:
    """`str` of a type or a stack of names, which a trace repeats thousands of times."""
    return str(value)


def written(value: Any) -> str:
    """`repr` of a literal, which is slow for NumPy's scalars."""
    if isinstance(value, int | float | complex):
        return repr(value)
    array = np.asarray(value)
    like = type(value), array.dtype, array.shape, array.tobytes(), getattr(value, "weak_type", None)
    if like not in WRITTEN:
        WRITTEN[like] = repr(value)
    return WRITTEN[like]


def canonical(value: Any, inside: list) -> str:
    """A parameter of an operation as text without names and addresses; collects the traced functions in it."""
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        inside.append(value)
        return "traced"
    if isinstance(value, np.ndarray | jax.Array):
        return content(value).hex()
    if isinstance(value, dict):
        return str(
            {str(name): canonical(each, inside) for name, each in sorted(value.items(), key=str)}
        )
    if isinstance(value, tuple | list | frozenset):
        return str(
            [
                canonical(each, inside)
                for each in (sorted(value, key=str) if isinstance(value, frozenset) else value)
            ]
        )
    if isinstance(
        value, enum.Enum | np.dtype | type | str | int | float | complex | bytes | types.NoneType
    ):
        return str(value)
    return type(value).__name__ if callable(value) else re.sub(r"0x[0-9a-f]+", "", str(value))


def source(found: Any) -> dict[str, str]:
    """Digests of the file that defines a user's class or function and of the files below its folder that it imports.

    Comments and docstrings do not count. Files are named by their folder's name and their path within it. Empty if the
    object belongs to a library, or has no file.
    """
    while isinstance(found, functools.partial):
        found = found.func
    made = inspect.unwrap(
        found if callable(found) and hasattr(found, "__module__") else type(found)
    )
    module = sys.modules.get(getattr(made, "__module__", ""))
    file = host_code.file_of(module)
    if file is None:
        return {}
    digests: dict[str, str] = {}
    folder = file.parent
    left = [file]
    while left:
        file = left.pop()
        name = file.relative_to(folder.parent).as_posix()
        digest = host_code.source_digest(file)
        if digest and name not in digests:
            digests[name] = digest
            left += [each for each in host_code.imported_files(file) if each.is_relative_to(folder)]
    return digests
