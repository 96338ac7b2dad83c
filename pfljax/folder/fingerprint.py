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
from pathlib import Path
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
from pfljax.models.torch_modules import written_by_user
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
    "select_models",
    "predict",
    "apply",
    "adapt",
    "tune",
)
PREDICTS = ("select_models", "predict", "apply", "tune", "collaboration")
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
    "name",
    "debug_info",
    "callback",
    "fwd_jaxpr_thunk",
    "jvp_jaxpr_fun",
    "jvp_jaxpr_thunk",
    "bwd",
    "inline",
    "sharding",
    "in_shardings",
    "out_shardings",
    "out_sharding",
    "in_layouts",
    "out_layouts",
    "mesh",
    "ctx_mesh",
    "devices",
    "srcs",
    "platforms",
    "donated_invars",
    "keep_unused",
    "compiler_options_kvs",
    "unroll",
    "_split_transpose",
    "ft_in",
    "ft_out",
}

# Parameters that are functions on the host, or become part of the program by a transformation.
CALLED = {"callback", "rule"}
DEBUGGING = {"debug_callback", "debug_print"}
# Parameters whose text has neither names nor addresses.
PRINTED = (enum.Enum, np.dtype, type, str, int, float, complex, bytes, types.NoneType)

Digests = dict[str, str]


def identified(experiment: Experiment) -> Experiment:
    """The run, which describes its program as it is now; later padding and execution plans change no result."""
    # By planned number of rounds; None: it does not depend on it.
    known: dict[int | None, dict[str, Any]] = {}

    def programs(planned: int) -> dict[str, Any]:
        if None in known:
            return known[None]
        if planned not in known:
            described = program(experiment, planned=planned)
            if not reads_rounds(described):
                known[None] = described
                return described
            known[planned] = described
        return known[planned]

    return dataclasses.replace(experiment, programs=programs)


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
    modules = [written_by_user(model.module) for model in experiment.problem.models]
    objects: list[Any] = [experiment.method, *modules]
    local = experiment.local
    if local is not None:
        objects += [local.optimizer, local.schedule, local.loss]
    sources: Digests = {}
    for value in objects:
        sources |= source(value)
    trace = traced(experiment, planned, within)
    newcomers = {"rounds": planned, "digest": trace.newcomers} if trace.newcomers else None
    host = {name: host_code.identity(function) for name, function in on_host(experiment).items()}
    return {
        "method": type(experiment.method).__name__,
        "planned_rounds": planned if trace.reads_rounds else None,
        "newcomers": newcomers,
        "parts": trace.parts,
        "sources": sources,
        "versions": {name: version(name) for name in LIBRARIES},
        "host": host,
        "settings": {name: getattr(jax.config, name, None) for name in SETTINGS},
    }


def reads_rounds(program: dict[str, Any]) -> bool:
    """Whether the description of a program depends on the planned number of rounds."""
    return program["planned_rounds"] is not None or program["newcomers"] is not None


def on_host(experiment: Experiment) -> dict[str, Any]:
    """The functions of a run that Python calls, by what they are."""
    metrics = experiment.metrics
    functions: dict[str, Any] = {f"metric {name}": metric for name, metric in metrics.items()}
    if experiment.stop is not None:
        functions["stop rule"] = experiment.stop
    return functions


def differences(
    before: dict[str, Any], now: dict[str, Any], within: Sequence[str] = ()
) -> list[str]:
    """Names the parts of two programs (see `program`) that differ; empty if they compute the same, or one is not known.

    Compares the parts `within`, or all.
    """
    if not (before and now):
        return []
    entry = "sources" if before["versions"] != now["versions"] else "parts"
    digests_before = before[entry]
    digests_now = now[entry]
    names = [*digests_now, *(digests_before.keys() - digests_now.keys())]
    changed = [name for name in names if digests_before.get(name) != digests_now.get(name)]
    if entry == "parts" and ADAPT not in changed and adapts_otherwise(before, now):
        changed.append(ADAPT)
    # The inputs of a part change with the parts before it.
    causes = [name for name in changed if not name.endswith(INPUTS)]
    changed = causes or changed
    if within and entry == "parts":
        changed = [name for name in changed if _part(name) in within]
    # All others depend on these.
    upstream = [name for name in changed if _part(name) in (FROZEN, MODEL, LOSS, OPTIMIZER)]

    texts = []
    for name in upstream or changed:
        part, colon, rest = name.partition(":")
        if part in (*FUNCTIONS, "collaboration", "ledger"):
            part = f"{part} of {now['method']}"
        texts.append(part + colon + rest)
    return texts if within else texts + untraced_differences(before, now)


def _part(name: str) -> str:
    """The part of a program of which a digest has this name."""
    return name.partition(":")[0]


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


def untraced_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names what differs between two programs that no trace shows; what an older program does not tell is left out."""
    texts = []
    functions_before = before.get("host", {})
    functions_now = now.get("host", {})
    # A run may go on with further metrics.
    for name in sorted(functions_before.keys() & functions_now.keys()):
        text = host_code.difference(functions_before[name], functions_now[name])
        if text:
            texts.append(f"{name}: {text}")
    settings_before = before.get("settings", {})
    for name, value in now.get("settings", {}).items():
        value_before = settings_before.get(name, value)
        if value_before != value:
            texts.append(f"{name}: was {value_before}, is {value}")
    return texts


def other_versions(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Says which versions of libraries differ; "" if none does."""
    if not (before and now):
        return ""
    texts = []
    for name in LIBRARIES:
        version_before = before["versions"].get(name)
        version_now = now["versions"][name]
        if version_before != version_now:
            texts.append(f"{name} {version_before} (now {version_now})")
    return ", ".join(texts)


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
    current = BUILD  # what is being traced

    def note_read() -> None:
        reads.add(current)

    problem, algorithm = in_parts(experiment, planned, note_read)
    arguments = shapes(problem, algorithm, experiment)
    network = problem.model.network
    streams: dict[str, Any] = defaultdict(hashlib.sha256)

    def add(part: str, function: Callable, *args: Any) -> None:
        """Adds the digests of a traced function to their parts."""
        make_jaxpr = needed if part == "predict" else jax.make_jaxpr
        jaxpr = make_jaxpr(taking(network, function))(*args, frozen=network.frozen_on_host)
        for (name, suffix), digest in digests(jaxpr, part).items():
            # "predict" has those of `adapt`, too, and `pfljax.load` traces it alone.
            if part != ADAPT or name not in PREDICTS:
                streams[name + suffix].update(digest)

    # All that a run computes, but for newcomers.
    for part, function, *args in training(problem, algorithm, arguments):
        if not within or part in within:
            current = part
            add(part, function, *args)

    # What newcomers compute.
    newcomers_digest = ""
    if algorithm.adapt and (not within or ADAPT in within):
        current = ADAPT
        for rounds in ROUNDS:
            if rounds == ROUNDS[0] or reads & {BUILD, ADAPT}:
                function, *args = newcomers(*in_parts(experiment, rounds, note_read), arguments)
                add(ADAPT, function, *args)
        if reads & {BUILD, ADAPT}:
            newcomers_digest = digest_of_newcomers(experiment, planned, arguments)

    # What no trace shows.
    streams["ledger"].update(repr(algorithm.ledger).encode())
    model = problem.model
    if model.frozen is not None:
        streams[FROZEN].update(model.adapted.digest().encode())
    for part, value in named_arrays(problem, arguments).items():
        if not within or part in within:
            streams[part].update(names_of_leaves(value).encode())
    parts = {name: stream.hexdigest()[:16] for name, stream in streams.items()}
    return Traced(parts, bool(reads - {ADAPT}), newcomers_digest)


def digest_of_newcomers(experiment: Experiment, rounds: int, arguments: Arguments) -> str:
    """Digest of what newcomers compute after a number of rounds."""
    problem, algorithm = in_parts(experiment, rounds, lambda: None)
    function, *args = newcomers(problem, algorithm, arguments)
    network = problem.model.network
    jaxpr = jax.make_jaxpr(taking(network, function))(*args, frozen=network.frozen_on_host)
    by_part = digests(jaxpr, ADAPT)
    stream = hashlib.sha256()
    for name in sorted(by_part):
        if name[0] not in PREDICTS:
            stream.update(by_part[name])
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
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return ";".join(jax.tree_util.keystr(path) for path, _ in leaves)


def in_parts(
    experiment: Experiment, rounds: int, note_read: Callable[[], None]
) -> tuple[Problem, Algorithm]:
    """A run's problem and algorithm for a number of rounds, whose operations belong to parts of the program.

    `note_read` is called whenever the number of rounds is read.
    """
    plan = make_host_plan()
    problem = experiment.problem
    model = problem.model
    if model.criterion is not None and experiment.local is not None:
        model = dataclasses.replace(model, criterion=in_part(LOSS, model.criterion))
        problem = problem._replace(model=model, solver=experiment.local.bind(model))
    optimizer = problem.solver.optimizer
    optimizer = optimizer._replace(
        init=in_part(OPTIMIZER, optimizer.init), update=in_part(OPTIMIZER, optimizer.update)
    )
    solver = problem.solver._replace(optimizer=optimizer)
    problem = problem._replace(rounds=rounds, plan=plan, solver=solver)
    problem = watched(problem, note_read)
    experiment = dataclasses.replace(experiment, problem=problem, planned_rounds=None)
    algorithm = experiment.algorithm(plan)
    report = algorithm.report
    if report.collaboration:
        collaboration = in_part("collaboration", report.collaboration)
        report = dataclasses.replace(report, collaboration=collaboration)
    named = {name: in_part(name, function) for name, function in functions(algorithm).items()}
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
    init = functools.partial(lifting.init, algorithm, problem.plan)
    state = jax.eval_shape(init, key, clients)
    return Arguments(key, clients, start, state)


def training(problem: Problem, algorithm: Algorithm, arguments: Arguments) -> list[tuple]:
    """(part, function, arguments...) of all that a run computes, but for newcomers.

    Each is traced by itself, so that no part depends on the values of another.
    """
    key, clients, start, state = arguments
    model = problem.model
    models = problem.models
    play_round = make_round(algorithm, problem.plan, problem.cohort_size)
    ids = jax.ShapeDtypeStruct((problem.num_clients,), jnp.int32)
    trained = jax.ShapeDtypeStruct((problem.num_clients,), bool)

    def use_models(
        key: Key, params: Sequence[Params], x: PyTree, y: Array
    ) -> list[tuple[Params, Array, Array]]:
        """Initializes each model, predicts with it, and computes its loss."""
        results = []
        for m, p in zip(models, params, strict=True):
            results.append((m.init(key), m.predict(p, x), m.loss(p, x, y, key)))
        return results

    predict = functools.partial(
        lifting.serve, algorithm, problem.plan, predicted(problem, algorithm)
    )
    params = [m.network.shapes for m in models]
    labels = jnp.zeros(model.targets.shape, model.targets.dtype)
    return [
        ("start", algorithm.start, key, clients),
        ("first_row", algorithm.first_row, key, np.int32(0), start),
        (ENGINE, play_round, key, np.int32(0), state, clients),
        ("predict", predict, key, state, ids, clients, (), None, trained),
        (MODEL, use_models, key, params, model.example_input, labels),
    ]


def newcomers(problem: Problem, algorithm: Algorithm, arguments: Arguments) -> tuple:
    """(function, arguments...) of what newcomers predict."""
    key, clients, _, state = arguments
    predict = functools.partial(
        lifting.serve_newcomers, algorithm, problem.plan, predicted(problem, algorithm)
    )
    return predict, key, state, clients, ()


def predicted(problem: Problem, algorithm: Algorithm) -> Callable[[Prediction, Any], Array]:
    """The outputs for an example of zeros, as a function of a prediction and its inputs."""

    def outputs(prediction: Prediction, inputs: Any) -> Array:
        x = jax.tree.map(jnp.zeros_like, problem.model.example_input)
        return serving.outputs(problem, algorithm, x)(prediction, inputs)

    return outputs


def needed(function: Callable) -> Callable[..., Any]:
    """Like `jax.make_jaxpr`, without what no result depends on.

    So what a client predicts with does not depend on an optimizer in its row, which `pfljax.load` may not know.
    """

    def trace(*args: Any, **options: Any) -> Any:
        traced = jax.make_jaxpr(function)(*args, **options)
        all_results = [True] * len(traced.jaxpr.outvars)
        jaxpr, used, _ = pe.dce_jaxpr_consts(traced.jaxpr, all_results)
        consts = [array for array, is_used in zip(traced.consts, used, strict=True) if is_used]
        return types.SimpleNamespace(jaxpr=jaxpr, consts=consts)

    return trace


def functions(algorithm: Algorithm) -> dict[str, Callable]:
    """The functions of a method, by name."""
    fields = {name: getattr(algorithm, name, None) for name in FUNCTIONS}
    fields["tune"] = algorithm.engine.tune
    return {name: function for name, function in fields.items() if function is not None}


def in_part(name: str, function: Callable) -> Callable:
    """The same function, whose operations belong to a part of the program."""

    @functools.wraps(function)
    def in_scope(*args: Any, **options: Any) -> Any:
        with jax.named_scope(f"part:{name}"):
            return function(*args, **options)

    return in_scope


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
    describe = _Atoms(jaxpr, captured, streams)

    for eqn in without_debugging(jaxpr.eqns, jaxpr.outvars):
        part_here = part_of(eqn, part)
        texts = [eqn.primitive.name]
        texts += [describe(atom, part_here) for atom in (*eqn.invars, *eqn.outvars)]
        inside: list[Any] = []  # the functions that the operation calls
        for name in sorted(eqn.params.keys() - IGNORED):
            texts.append(f"{name}={canonical(eqn.params[name], inside)}")
        stream = streams[part_here, ""]
        stream.update(";".join(texts).encode())
        for name in CALLED & eqn.params.keys():
            stream.update(code_of_rule(eqn.params[name]).encode())
        for function in inside:
            for position, digest in digests(function, part_here, known).items():
                streams[position].update(digest)

    stream = streams[part, ""]
    results = ";".join(describe(atom, part) for atom in jaxpr.outvars)
    stream.update(results.encode())
    known[id(jaxpr), part] = {position: stream.digest() for position, stream in streams.items()}
    return known[id(jaxpr), part]


def code_of_rule(function: Any) -> str:
    """Digest of a function that Python calls while a program is lowered or run.

    A rule of this package reaches caches and settings that differ between one trace and the next; what it computes
    depends on its file and on what is traced.
    """
    module = getattr(inspect.unwrap(function), "__module__", None) or ""
    if module.partition(".")[0] == "pfljax":
        return host_code.source_digest(Path(sys.modules[module].__file__ or ""))
    return host_code.identity(function)["code"]


class _Atoms:
    """Describes the variables of a jaxpr; adds captured arrays, and what other parts made, to the digests of parts.

    Each part numbers the variables that it uses, so that parts do not depend on each other's length. Where those come
    from that other parts made is a digest of its own.
    """

    def __init__(self, jaxpr: Any, captured: dict, streams: dict[tuple[str, str], Any]):
        self._captured = captured
        self._streams = streams
        self._numbers: dict[str, dict] = defaultdict(dict)
        inputs = (*jaxpr.invars, *jaxpr.constvars)
        self._origins = {atom: ("input", number) for number, atom in enumerate(inputs)}

    def __call__(self, atom: Any, part: str) -> str:
        """A variable that a part reads or makes, as text."""
        if isinstance(atom, core.Literal):
            return f"{written(atom.val)}:{text(getattr(atom.aval, 'dtype', ''))}"
        if atom in self._captured:
            self._streams[part, ARRAYS].update(content(self._captured[atom]))
        numbers = self._numbers[part]
        if atom not in numbers:
            numbers[atom] = len(numbers)
            origin = self._origins.setdefault(atom, (part, numbers[atom]))
            if origin[0] != part:
                self._streams[part, INPUTS].update(f"{numbers[atom]}:{origin};".encode())
        shape = getattr(atom.aval, "shape", "")
        dtype = getattr(atom.aval, "dtype", atom.aval)
        return f"{numbers[atom]}:{shape}{text(dtype)}"


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
        uses = [reader for atom in eqn.outvars for reader in readers[atom]]
        is_result = any(atom in results for atom in eqn.outvars)
        if not uses or is_result or eqn.effects:
            continue
        if all(id(reader) in dropped for reader in uses):
            dropped.add(id(eqn))
    return [eqn for eqn in eqns if id(eqn) not in dropped]


def part_of(eqn: Any, part: str) -> str:
    """The part of the program that an operation belongs to."""
    scopes = text(eqn.source_info.name_stack)
    parts = PART.findall(scopes) or [part]
    return parts[-1]


@functools.lru_cache(maxsize=1 << 14)
def text(value: Any) -> str:
    """`str` of a type or a stack of names, which a trace repeats thousands of times."""
    return str(value)


def written(value: Any) -> str:
    """`repr` of a literal, which is slow for NumPy's scalars."""
    if isinstance(value, int | float | complex):
        return repr(value)
    array = np.asarray(value)
    weak_type = getattr(value, "weak_type", None)
    key = (type(value), array.dtype, array.shape, array.tobytes(), weak_type)
    if key not in WRITTEN:
        WRITTEN[key] = repr(value)
    return WRITTEN[key]


def canonical(value: Any, inside: list) -> str:
    """A parameter of an operation as text without names and addresses; collects the traced functions in it."""
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        inside.append(value)
        return "traced"
    if isinstance(value, np.ndarray | jax.Array):
        return content(value).hex()
    if isinstance(value, dict):
        entries = sorted(value.items(), key=str)
        return str({str(name): canonical(entry, inside) for name, entry in entries})
    if isinstance(value, tuple | list | frozenset):
        items = sorted(value, key=str) if isinstance(value, frozenset) else value
        return str([canonical(item, inside) for item in items])
    if isinstance(value, PRINTED):
        return str(value)
    if callable(value):
        return type(value).__name__
    return re.sub(r"0x[0-9a-f]+", "", str(value))


def source(value: Any) -> Digests:
    """Digests of the file that defines a user's class or function and of the files below its folder that it imports.

    Comments and docstrings do not count. Files are named by their folder's name and their path within it. Empty if the
    object belongs to a library, or has no file.
    """
    while isinstance(value, functools.partial):
        value = value.func
    has_module = callable(value) and hasattr(value, "__module__")
    defined = inspect.unwrap(value if has_module else type(value))
    module = sys.modules.get(getattr(defined, "__module__", ""))
    file = host_code.file_of(module)
    if file is None:
        return {}
    digests: Digests = {}
    folder = file.parent
    remaining = [file]
    while remaining:
        file = remaining.pop()
        name = file.relative_to(folder.parent).as_posix()
        digest = host_code.source_digest(file)
        if digest and name not in digests:
            digests[name] = digest
            imported = host_code.imported_files(file)
            remaining += [path for path in imported if path.is_relative_to(folder)]
    return digests
