"""The loop over rounds: several rounds a dispatch, evaluation, checkpoints, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pfljax import data, evaluation, privacy, tree
from pfljax.mapping import Plan
from pfljax.models import Model
from pfljax.solvers import Solver
from pfljax.training import checkpoints, files, memory
from pfljax.training.rounds import Record, make_round, participations
from pfljax.types import Algorithm, Federation, Key, Predictor, RunError, Shard, Split, State, UsageError


@dataclasses.dataclass(frozen=True)
class Setup:
    """One run.

    Attributes:
        name: The algorithm's registered name.
        make: Plan -> Algorithm; called again with a smaller chunk if the first does not fit.
        model: The clients' network.
        solver: How they train it.
        federation: The clients that train.
        unseen: Clients kept out of training, or None.
        plan: How clients are mapped.
        rounds: R.
        cohort_size: S.
        eval_every: Rounds between evaluations.
        checkpoint_every: Least rounds between checkpoints, which are made after evaluations.
        seed: Decides initial models, cohorts, batches and sampling.
        config: For config.json: flags, versions, device, commit, command.
    """

    name: str
    make: Callable[[Plan], Algorithm]
    model: Model
    solver: Solver
    federation: Federation
    unseen: Federation | None
    plan: Plan
    rounds: int
    cohort_size: int
    eval_every: int
    checkpoint_every: int
    seed: int
    config: dict


@dataclasses.dataclass
class Compiled:
    """A run's compiled functions, and where its state lives."""

    algorithm: Algorithm
    plan: Plan
    state: Any  # a State of ShapeDtypeStructs with shardings
    init: Callable[[Key, Shard], State]
    segment: Callable  # (key, start, stop, state, clients) -> (state, stacked records, rounds done)
    memory: memory.MemoryPlan
    compile_seconds: float


def state_shardings(algorithm: Algorithm, plan: Plan, state: State, axis: int = 0) -> State:
    """Rows (at `axis`) of clients, and of models where they are the clients' own, are spread over the devices."""
    by_client = algorithm.topology != "shared"
    spread = State(server=False, models=by_client, optimizer=by_client, clients=True, round=False)
    parts = [
        jax.tree.map(lambda leaf, rows=rows: plan.sharding(leaf, by_rows=rows, axis=axis), part)
        for part, rows in zip(state, spread, strict=True)
    ]
    return State(*parts)


DISPATCH_SECONDS = 2.0  # how long a dispatch may last before the progress is shown again
LARGE = 32 << 20  # bytes of a model stack from which on a dispatch is one round


def lifted(plan: Plan, fn: Callable, replicates: int, in_axes: Any = 0) -> Callable:
    """`fn` for one run, or for as many `replicates` at once."""
    return plan.over_replicates(fn, in_axes) if replicates else fn


def compile_segment(setup: Setup, clients: Shard, plan: Plan, replicates: int = 0) -> Compiled:
    """Compiles up to `eval_every` rounds into one dispatch, or a single one of peers with a large model stack.

    Peers' models are read by others until the round ends, so that the next ones need memory of their own. In a loop
    of rounds that is a temporary beside the models; for a single round it is the output, and the old models are freed.

    Args:
        setup: The run.
        clients: Its data; with `replicates` stacked, and everything else then too.
        plan: How clients are mapped.
        replicates: Runs in one kernel; 0: one, without an axis of its own.
    """
    begin = time.perf_counter()
    algorithm = setup.make(plan)
    num_clients = setup.federation.num_clients
    one_round = make_round(algorithm, plan, num_clients, setup.cohort_size)
    one_round = lifted(plan, one_round, replicates, in_axes=(0, None, 0, 0))
    init = lifted(plan, algorithm.init, replicates)
    key = jax.random.key(setup.seed)
    key = jnp.stack([key] * replicates) if replicates else key
    shape = jax.eval_shape(init, key, clients)
    shardings = state_shardings(algorithm, plan, shape, axis=int(replicates > 0))
    state = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shape, shardings)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    logged = jax.eval_shape(one_round, key, number, state, clients)[1]
    single = algorithm.topology == "peers" and tree.num_bytes(shape.models) > LARGE
    length = 1 if single else setup.eval_every

    def segment(key, start, stop, rest, models, clients):
        state = rest._replace(models=models)
        if single:
            state, record = one_round(key, start, state, clients)
            return split(state), tree.stack_one(record), jnp.ones((), jnp.int32)

        def body(carry):
            done, state, records = carry
            state, record = one_round(key, start + done, state, clients)
            records = jax.tree.map(lambda all, one: all.at[done].set(one), records, record)
            return done + 1, state, records

        def proceeds(carry):
            done, _, records = carry
            return (start + done < stop) & (records.diverged[jnp.maximum(done - 1, 0)] < 0).all()

        records = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), logged)
        records = records._replace(diverged=jnp.full_like(records.diverged, -1))
        done, state, records = jax.lax.while_loop(proceeds, body, (jnp.zeros((), jnp.int32), state, records))
        return split(state), records, done

    # The rest first: JAX gives donated memory to the first outputs of the same shape, and Adam's moments have the
    # models' shapes.
    def split(state):
        return state._replace(models=()), state.models

    jitted = jax.jit(segment, donate_argnums=(3,) if single else (3, 4), out_shardings=(split(shardings), None, None))
    compiled = jitted.lower(key, number, number, *split(state), clients).compile()

    def dispatch(key, start, stop, state, clients):
        (rest, models), records, done = compiled(key, np.int32(start), np.int32(stop), *split(state), clients)
        return rest._replace(models=models), records, done

    init = jax.jit(init, out_shardings=shardings)
    seconds = time.perf_counter() - begin
    return Compiled(algorithm, plan, state, init, dispatch, memory.of_compiled(compiled), seconds)


def compile_to_fit(setup: Setup, clients: Shard, replicates: int = 0) -> Compiled:
    """Compiles under the largest chunk, from the plan's downward, that fits the device's memory."""
    compiled = compile_segment(setup, clients, setup.plan, replicates)
    while not compiled.memory.fits:
        plan = memory.next_smaller(compiled.plan, setup.cohort_size)
        if plan is None:
            raise memory.too_large(compiled.memory)
        compiled = compile_segment(setup, clients, plan, replicates)
    return compiled


def place(plan: Plan, stacked: Any, axis: int = 0) -> Any:
    """Puts stacked host arrays on the devices, clients (at `axis`) spread over them."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, plan.sharding(leaf, by_rows=True, axis=axis)), stacked)


class History:
    """What has been evaluated so far, kept in the run's files, from which a resumed run takes it up again."""

    def __init__(self, directory: Path, num_rounds: int, topology: str):
        """Takes up what the files hold of the first `num_rounds` rounds; `topology` is that of the weighed models."""
        self.directory, self.topology = directory, topology
        self.rows: list[dict] = []
        self.results: dict[str, list[np.ndarray]] = {}
        self.collaboration: dict[str, list[np.ndarray]] = {}
        if num_rounds:
            self.rows = [row for row in files.read_jsonl(directory / "metrics.jsonl") if row["round"] <= num_rounds]
            count = len(self.rows)
            results = files.read_npz(directory / "results.npz")
            self.results = {k: list(v[:count]) for k, v in results.items() if k not in ("rounds", "scored")}
            collaboration = files.read_npz(directory / "collaboration.npz")
            fixed = ("topology", "distribution", "target")
            self.collaboration = {k: list(v[:count]) for k, v in collaboration.items() if k not in fixed}

    def add(self, row: dict, metrics: dict[str, dict[str, np.ndarray]], collaboration: dict[str, np.ndarray]) -> None:
        """Adds one evaluation: metrics by split and name, leaves (K,), and who used whom."""
        self.rows.append(row)
        for split, values in metrics.items():
            for name, value in values.items():
                self.results.setdefault(f"{name}_{split}", []).append(value)
        for name, value in ({"round": row["round"]} | collaboration).items():
            self.collaboration.setdefault(name, []).append(np.asarray(value))

    def write_rows(self) -> None:
        """Writes metrics.jsonl."""
        files.write_jsonl(self.directory / "metrics.jsonl", self.rows)

    def write(self, scored: str, federation: Federation) -> None:
        """Writes metrics.jsonl, results.npz and collaboration.npz."""
        self.write_rows()
        rounds = np.array([row["round"] for row in self.rows], np.int64)
        results = {name: np.stack(values) for name, values in self.results.items()}
        files.write_npz(self.directory / "results.npz", {"rounds": rounds, "scored": scored, **results})
        stacked = {name: np.stack(values) for name, values in self.collaboration.items()}
        stacked |= {"topology": self.topology, "distribution": federation.distribution}
        if federation.target is not None:
            stacked["target"] = federation.target
        files.write_npz(self.directory / "collaboration.npz", stacked)


def check_directory(out: Path, config: dict, resume: bool) -> None:
    """Sees to it that a run neither overwrites another nor goes on from one with other settings.

    Raises:
        UsageError: naming --out or the flags that differ.
    """
    path = out / "config.json"
    if not path.exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"--out={out}: holds something that is not a run; name an empty or a new folder")
        return
    if not resume:
        raise UsageError(f"--out={out}: holds another run; add --resume to go on with it, or name a new folder")
    before = files.read_json(path).get("flags", {})
    free = {"resume", "rounds", "eval_every", "checkpoint_every", "plan", "chunk", "devices", "out"}
    free |= {"algorithms", "seeds", "tune", "replicate"}  # which other cells a sweep has
    if config["flags"].get("lr_schedule") == "multistep":
        free -= {"rounds"}  # by which the rates fall
    changed = [
        f"--{name} was {before[name]!r} and is {value!r}"
        for name, value in files.plain(config["flags"]).items()
        if name not in free and name in before and before[name] != value
    ]
    if changed:
        raise UsageError(f"--resume: --out={out} was run with other settings: {'; '.join(changed)}")


class Result(NamedTuple):
    """What a run returns: summary.json's content, and the predictor that was scored last, made when it is asked for."""

    summary: dict
    predictor: Callable[[], Predictor]
    plan: Plan


def run(setup: Setup, out: Path, *, resume: bool = False, say: Callable[[str], None] = print) -> Result:
    """Trains, evaluates, saves; the files are those of DESIGN.md's "What a run leaves behind", less the report.

    Args:
        setup: The run.
        out: Its directory.
        resume: Go on from the newest whole checkpoint there, if any.
        say: Takes the lines for the user.

    Raises:
        UsageError: if `out` holds another run.
        RunError: if a loss is not finite, or nothing fits into memory.
    """
    return run_replicates([setup], [out], resume=resume, say=say)[0]


def run_replicates(
    setups: Sequence[Setup], outs: Sequence[Path], *, resume: bool = False, say: Callable[[str], None] = print
) -> list[Result]:
    """`run` for runs that differ in their seeds and data only: all in one kernel, stacked in front of everything.

    Each has its own directory, as if it had been run alone; its seconds are its share of the whole. Going on takes
    checkpoints of the same round in all directories, else all start anew.

    Args:
        setups: The runs; their federations padded to the same sizes.
        outs: Their directories.
        resume: As in `run`.
        say: As in `run`.

    Raises:
        UsageError: as `run`.
        RunError: as `run`.
    """
    setup, plan, many = setups[0], setups[0].plan, len(setups) if len(setups) > 1 else 0
    for each, out in zip(setups, outs, strict=True):
        check_directory(out, each.config, resume)
    of_run = lambda stacked, number: jax.tree.map(lambda leaf: leaf[number], stacked) if many else stacked
    joined = lambda parts: jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts) if many else parts[0]
    placed = {}
    for part in ("train", "validation", "test"):
        parts = [getattr(each.federation, part) for each in setups]
        parts = jax.tree.map(lambda *leaves: np.stack(leaves), *parts) if many else parts[0]
        placed[part] = place(plan, parts, axis=int(many > 0))
    clients = Shard(placed["train"], placed["validation"])
    splits = {name: placed[name] for name in ("train", "test", "validation") if placed[name].y.size}
    compiled = compile_to_fit(setup, clients, many)
    algorithm, plan = compiled.algorithm, compiled.plan
    lines = [*memory.describe(plan, compiled.memory, compiled.state, splits, setup.cohort_size), *algorithm.facts]
    lines += [("replicates in one kernel", f"{many}, whose seconds are shares of the whole")] if many else []
    for name, value in lines:
        say(f"  {name:32} {memory.readable(value) if isinstance(value, int) else value}")
    for each, out in zip(setups, outs, strict=True):
        files.write_json(out / "config.json", each.config)

    keys = [jax.random.key(each.seed) for each in setups]
    key_for = lambda purpose: joined([jax.random.fold_in(key, purpose) for key in keys])
    restored = restore(algorithm, plan, compiled.state, outs, many) if resume else None
    if restored:
        done, state = restored
        say(f"  resumed after round {done}")
    else:
        done, state = 0, compiled.init(key_for(0), clients)
    weighed = jax.eval_shape(lifted(plan, algorithm.predictor, many), key_for(0), compiled.state, clients)
    topology = "shared" if is_private_mixture(weighed) else weighed.topology
    topology = algorithm.collaboration[0] if algorithm.collaboration else topology
    histories = [History(out, done, topology) for out in outs]
    rounds_key, evaluate_key = key_for(1), key_for(2)
    evaluate = make_evaluation(setup, algorithm, plan, many)
    last = [history.rows[-1] if history.rows else {} for history in histories]
    down, up = ([row.get(name, 0.0) for row in last] for name in ("bytes_down", "bytes_up"))
    seconds = last[0].get("seconds", 0.0)
    newest: list[Record] = [None] * len(setups)  # of each run's records
    diverged = None

    saved, pace = done, 1
    with _progress(setup.rounds, done, say) as advance:
        while done < setup.rounds and diverged is None:
            stop = min(done + pace, (done // setup.eval_every + 1) * setup.eval_every, setup.rounds)
            begin = time.perf_counter()
            state, records, count = compiled.segment(rounds_key, done, stop, state, clients)
            records, count = jax.device_get((records, count))
            elapsed = time.perf_counter() - begin
            seconds += elapsed / len(setups)
            pace = max(1, int(DISPATCH_SECONDS * int(count) / elapsed))
            done += int(count)
            advance(done)
            for number, each in enumerate(setups):
                record: Record = jax.tree.map(
                    lambda leaf, count=count, n=number: leaf[:count, n] if many else leaf[:count], records
                )
                down[number] += float(record.down.sum(dtype=np.float64)) / each.federation.num_clients
                up[number] += float(record.up.sum(dtype=np.float64)) / each.federation.num_clients
                newest[number] = record
                if record.diverged[-1] >= 0 and diverged is None:
                    diverged = number, int(record.diverged[-1])
            if diverged is None and (done % setup.eval_every == 0 or done == setup.rounds):
                metrics, collaboration = jax.device_get(evaluate(evaluate_key, state, clients, splits))
                for number, (each, history) in enumerate(zip(setups, histories, strict=True)):
                    record, scores = newest[number], of_run(metrics, number)
                    row = {
                        "round": done,
                        "seconds": seconds,
                        "train_loss": float(record.train_loss[-1]),
                        **evaluation.summarize(scores["test"], each.federation.test.size),
                        "bytes_down": down[number],
                        "bytes_up": up[number],
                        **{name: float(values[-1]) for name, values in record.metrics.items()},
                    }
                    if "validation" in scores:
                        values = evaluation.summarize(scores["validation"], each.federation.validation.size)
                        row |= {f"validation_{name}": values[name] for name in ("loss", "accuracy") if name in values}
                    history.add(row, scores, of_run(collaboration, number))
                    history.write_rows()
                if done - saved >= setup.checkpoint_every or done == setup.rounds:
                    for number, (each, out, history) in enumerate(zip(setups, outs, histories, strict=True)):
                        # The files first: a checkpoint never knows of rounds that they do not.
                        history.write(algorithm.scored, each.federation)
                        checkpoints.save(out / "checkpoints", done, of_run(state, number))
                    saved = done
    if diverged is not None:
        for each, history in zip(setups, histories, strict=True):
            if history.rows:
                history.write(algorithm.scored, each.federation)
        number, client = diverged
        raise RunError(
            f"round {done}: the loss of client {client} is not finite; a smaller --learning_rate may help. What was "
            f"evaluated before is in {outs[number]}"
        )

    def predict(number: int) -> Predictor:
        one = lambda *args: tuned(algorithm, args[0], algorithm.predictor(*args), args[2])
        return jax.jit(one)(*(of_run(part, number) for part in (evaluate_key, state, clients)))

    results = []
    for number, (each, out, history) in enumerate(zip(setups, outs, histories, strict=True)):
        own = of_run(state, number)
        summary = summarize(each, algorithm, history, lines, compiled.compile_seconds, of_run(rounds_key, number))
        if each.unseen is not None:
            summary["unseen"] = score_unseen(each, algorithm, plan, jax.random.fold_in(keys[number], 3), own)
        files.write_json(out / "summary.json", summary)
        results.append(Result(summary, functools.partial(predict, number), plan))
    return results


def restore(algorithm: Algorithm, plan: Plan, like: State, outs: Sequence[Path], many: int) -> tuple[int, State] | None:
    """The newest round of whose state all directories have a whole checkpoint, and the state, stacked if `many`."""
    if not many:
        return checkpoints.restore(outs[0] / "checkpoints", like)
    shape = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), like)
    shardings = state_shardings(algorithm, plan, shape)
    own = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shape, shardings)
    found = [checkpoints.restore(out / "checkpoints", own) for out in outs]
    if None in found or len({done for done, _ in found}) > 1:
        return None
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[state for _, state in found])
    return found[0][0], jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), stacked, like)


def make_evaluation(setup: Setup, algorithm: Algorithm, plan: Plan, replicates: int = 0) -> Callable:
    """(key, state, clients, splits) -> (metrics by split and name, who uses whom), in one compiled call."""

    def score(key: Key, state: State, clients: Shard, splits: dict[str, Split]):
        predictor = algorithm.predictor(key, state, clients)
        final = tuned(algorithm, key, predictor, clients)
        metrics = {name: evaluation.evaluate(plan, setup.model, final, split) for name, split in splits.items()}
        index = predictor.index
        if is_private_mixture(predictor):
            index = jnp.broadcast_to(jnp.arange(index.shape[1], dtype=jnp.int32), index.shape)
        collaboration = {"index": index, "weights": predictor.weights}
        return metrics, algorithm.collaboration[1](state) if algorithm.collaboration else collaboration

    return jax.jit(lifted(plan, score, replicates))


def tuned(algorithm: Algorithm, key: Key, predictor: Predictor, clients: Shard) -> Predictor:
    """What is evaluated in the predictor's place."""
    return algorithm.tune(jax.random.fold_in(key, 1), predictor, clients) if algorithm.tune else predictor


def is_private_mixture(predictor: Predictor) -> bool:
    """Whether clients mix several models of their own; weights are then recorded by the models' places, 0 to J - 1."""
    return predictor.topology == "own" and predictor.index.shape[-1] > 1


def score_unseen(setup: Setup, algorithm: Algorithm, plan: Plan, key: Key, state: State) -> dict:
    """Adapts the trained state to clients that were kept out, and scores them."""
    unseen = setup.unseen
    clients = place(plan, unseen.shards)
    predict = lambda *args: tuned(algorithm, args[0], algorithm.adapt(*args), args[2])
    predictor = jax.jit(predict)(key, state, clients)
    metrics = jax.device_get(
        {
            name: jax.jit(evaluation.evaluate, static_argnums=(0, 1))(plan, setup.model, predictor, place(plan, split))
            for name, split in (("train", unseen.train), ("test", unseen.test))
        }
    )
    out = evaluation.summarize(metrics["test"], unseen.test.size)
    train = evaluation.summarize(metrics["train"], unseen.train.size)
    return out | {f"train_{name}": value for name, value in train.items()} | {"per_client": per_client(unseen, metrics)}


def per_client(federation: Federation, metrics: dict[str, dict[str, np.ndarray]]) -> list[dict]:
    """A row for each client, with its scores on its test examples."""
    test = metrics["test"]
    return [
        {
            "client": k,
            "n_train": int(federation.train.size[k]),
            "n_test": int(federation.test.size[k]),
            "distribution": int(federation.distribution[k]),
            **({} if federation.target is None else {"target": int(federation.target[k])}),
            "accuracy": float(test["accuracy"][k]) if "accuracy" in test else None,
            "loss": float(test["loss"][k]),
        }
        for k in range(federation.num_clients)
    ]


def spent(setup: Setup, algorithm: Algorithm, key: Key) -> dict | None:
    """What the privacy ledger says after the last round, or None where nothing is private; `key` drew the cohorts."""
    solver, train = setup.solver, setup.federation.train
    if not solver.privacy.active:
        return None
    n_max = train.y.shape[1]
    rounds = participations(key, setup.federation.num_clients, setup.cohort_size, setup.rounds)
    steps = np.asarray(rounds * solver.num_steps(train.size, n_max)) * algorithm.passes
    epsilon = privacy.epsilons(solver.privacy, train.size, solver.batch(n_max), steps, algorithm.gradients)
    finite = lambda value: float(value) if np.isfinite(value) else None  # JSON knows no infinity: null
    return {
        **{name: finite(value) for name, value in solver.privacy._asdict().items()},
        "epsilon": finite(epsilon.max()),
        "unaccounted": algorithm.unaccounted or None,
        "epsilon_per_client": [finite(value) for value in epsilon],
    }


def summarize(
    setup: Setup, algorithm: Algorithm, history: History, lines: list, compile_seconds: float, key: Key
) -> dict:
    """What summary.json holds; `key` drew the rounds."""
    rows, federation = history.rows, setup.federation
    if "validation_loss" in rows[-1]:
        name, better = ("validation_accuracy", max) if "validation_accuracy" in rows[-1] else ("validation_loss", min)
    else:
        name, better = "train_loss", min
    best = better(rows, key=lambda row: row[name])
    last_test = {"test": {k[: -len("_test")]: v[-1] for k, v in history.results.items() if k.endswith("_test")}}
    return {
        "algorithm": setup.name,
        "dataset": federation.name,
        "task": federation.task,
        "num_clients": federation.num_clients,
        "parameters": parameters(setup.model),
        "rounds": setup.rounds,
        "seed": setup.seed,
        "scored": algorithm.scored,
        "last": rows[-1],
        "best": best | {"selected_by": name},
        "per_client": per_client(federation, last_test),
        "earth_movers_distance": data.heterogeneity(federation),
        "privacy": spent(setup, algorithm, key),
        "seconds_per_round": rows[-1]["seconds"] / max(rows[-1]["round"], 1),
        "compile_seconds": compile_seconds,
        "peak_memory_bytes": memory.peak_bytes(),
        "plan": lines,
        **dict(algorithm.facts),
        "unseen": None,
    }


def parameters(model: Model) -> int:
    """Of one model, how many."""
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    return sum(leaf.size for leaf in leaves)


@contextlib.contextmanager
def _progress(total: int, done: int, say: Callable[[str], None]):
    """A bar with rounds a second and the time left; without a terminal, a line now and then."""
    if sys.stdout.isatty():
        columns = [
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        ]
        with Progress(*columns, console=Console(width=min(shutil.get_terminal_size().columns, 120))) as bar:
            task = bar.add_task("", total=total, completed=done, speed="")
            begin, first = time.monotonic(), done

            def advance(done: int) -> None:
                rate = (done - first) / max(time.monotonic() - begin, 1e-9)
                bar.update(task, completed=done, speed=f"{rate:.1f} rounds/s")

            yield advance
    else:
        begin, first, spoken = time.monotonic(), done, time.monotonic()

        def advance(done: int) -> None:
            nonlocal spoken
            now = time.monotonic()
            if now - spoken > 10:
                rate = (done - first) / (now - begin)
                say(f"  round {done} of {total}, {rate:.2f} rounds/s, {(total - done) / max(rate, 1e-9):.0f} s left")
                spoken = now

        yield advance
