"""The loop over rounds: several rounds a dispatch, evaluation, checkpoints, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pfljax import data
from pfljax.core.types import Algorithm, ClientData, Key, Predictor, RunError, State
from pfljax.data import Federation
from pfljax.engine import processes
from pfljax.engine.plan import ExecutionPlan
from pfljax.engine.rounds import Record, participations
from pfljax.evaluation import metrics as evaluation
from pfljax.local import privacy
from pfljax.models import Model
from pfljax.training import checkpoints, files, host_store, memory, profiling
from pfljax.training.compiled import (
    Compiled,
    Setup,
    compile_segment,
    is_private_mixture,
    lifted,
    make_evaluation,
    place,
    state_shardings,
    tuned,
)
from pfljax.training.history import History, check_directory

DISPATCH_SECONDS = 2.0  # how long a dispatch may last before the progress is shown again


class Result(NamedTuple):
    """What a run returns: summary.json's content, and the predictor that was scored last, made when it is asked for."""

    summary: dict
    predictor: Callable[[], Predictor]
    plan: ExecutionPlan


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
        processes.first(functools.partial(check_directory, out, each.config, resume))
    of_run = lambda stacked, number: jax.tree.map(lambda leaf: leaf[number], stacked) if many else stacked
    joined = lambda parts: jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts) if many else parts[0]
    on_host = setup.client_store == "host"
    placed = {}
    for part in ("train", "validation", "test"):
        parts = [getattr(each.federation, part) for each in setups]
        parts = jax.tree.map(lambda *leaves: np.stack(leaves), *parts) if many else parts[0]
        placed[part] = parts if on_host else place(plan, parts, setup.federation.num_clients, axis=int(many > 0))
    clients = ClientData(placed["train"], placed["validation"])
    splits = {name: placed[name] for name in ("train", "test", "validation") if placed[name].y.size}
    compiled = compile_to_fit(setup, clients, many)
    algorithm, plan = compiled.algorithm, compiled.plan
    lines = [*memory.describe(plan, compiled.memory, compiled.state, splits, setup, algorithm), *algorithm.facts]
    lines += [("replicates in one kernel", f"{many}, whose seconds are shares of the whole")] if many else []
    for name, value in lines:
        say(f"  {name:32} {memory.readable(value) if isinstance(value, int) else value}")
    for each, out in zip(setups, outs, strict=True):
        files.write_json(out / "config.json", each.config)

    keys = [jax.random.key(each.seed) for each in setups]
    key_for = lambda purpose: joined([jax.random.fold_in(key, purpose) for key in keys])
    if setup.profile:
        say(f"  {profile(setup.profile, compiled, key_for, clients)}")
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
    evaluate = (
        host_store.make_evaluation(setup, algorithm, plan) if on_host else make_evaluation(setup, algorithm, plan, many)
    )
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
            pace = int(processes.from_first(np.int32(max(1, DISPATCH_SECONDS * int(count) / elapsed))))
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
        args = (of_run(part, number) for part in (evaluate_key, state, clients))
        return jax.jit(one, out_shardings=plan.everywhere)(*args)

    results = []
    for number, (each, out, history) in enumerate(zip(setups, outs, histories, strict=True)):
        own = of_run(state, number)
        summary = summarize(each, algorithm, history, lines, compiled.compile_seconds, of_run(rounds_key, number))
        if each.unseen is not None:
            summary["unseen"] = score_unseen(each, algorithm, plan, jax.random.fold_in(keys[number], 3), own)
        files.write_json(out / "summary.json", summary)
        results.append(Result(summary, functools.partial(predict, number), plan))
    processes.wait()  # until the first has written what the others may read
    return results


def compile_to_fit(setup: Setup, clients: ClientData, replicates: int = 0) -> Compiled:
    """Compiles under the largest chunk, from the plan's downward, that fits the device's memory.

    Where models would be gathered on every device, they first go around a ring.
    """
    plan = setup.plan
    while True:
        sorted_plan = plan.for_steps(setup.steps, setup.cohort_size)
        if setup.client_store == "host":
            found = host_store.compile_segment(setup, clients, sorted_plan)
        else:
            found = compile_segment(setup, clients, sorted_plan, replicates)
        if setup.client_store == "host":
            memory.check_host(found.state)
        if found.memory.fits:
            if found.making and not found.making.fits:
                raise memory.too_large(found.making, "making the first state")
            return found
        plan = memory.next_smaller(plan, setup.cohort_size, found.algorithm.topology)
        if plan is None:
            raise memory.too_large(found.memory)


def profile(directory: Path, compiled: Compiled, key_for: Callable[[int], Key], clients: ClientData) -> str:
    """Traces a few rounds of a state that is then thrown away; says where their time goes."""
    state, done = compiled.init(key_for(0), clients), 0

    def dispatch() -> int:
        nonlocal state, done
        state, _, count = compiled.segment(key_for(1), done, done + 1, state, clients)
        jax.block_until_ready(state)
        done += int(count)
        return int(count)

    dispatch()
    return profiling.describe(profiling.profile(directory, dispatch))


def restore(
    algorithm: Algorithm, plan: ExecutionPlan, like: State, outs: Sequence[Path], many: int
) -> tuple[int, State] | None:
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


def score_unseen(setup: Setup, algorithm: Algorithm, plan: ExecutionPlan, key: Key, state: State) -> dict:
    """Adapts the trained state to clients that were kept out, and scores them."""
    unseen = setup.unseen
    there = lambda part: place(plan, part, unseen.num_clients)
    clients = there(unseen.client_data)
    everywhere = plan.everywhere
    predict = lambda *args: tuned(algorithm, args[0], algorithm.adapt(*args), args[2])
    predictor = jax.jit(predict)(key, state, clients)
    score = jax.jit(evaluation.evaluate, static_argnums=(0, 1), out_shardings=everywhere)
    splits = (("train", unseen.train), ("test", unseen.test))
    metrics = jax.device_get({name: score(plan, setup.model, predictor, there(split)) for name, split in splits})
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
