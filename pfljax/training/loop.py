"""The training loop: several rounds per dispatch, evaluation, checkpoints, and the run's files."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import jax
import numpy as np

from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError, RunError, warn
from pfljax.contract.types import Algorithm, ClientData, Key, Split, State, Topology
from pfljax.evaluation import metrics as evaluation
from pfljax.exchange import lifting
from pfljax.exchange.rounds import Record
from pfljax.folder import endings, files
from pfljax.folder.folders import CLIENTS, Folders, Resume, clear, is_checked
from pfljax.folder.history import History
from pfljax.folder.locks import locked
from pfljax.local import lasting
from pfljax.local.privacy import secret_key
from pfljax.run import memory
from pfljax.run.experiment import Experiment
from pfljax.run.replicates import Replicates
from pfljax.settings.fields import knob
from pfljax.stores.registry import store_of
from pfljax.training import conformance, mixing, scoring
from pfljax.training.compiling import Dispatch, compile_to_fit, dispatcher
from pfljax.training.describe import plan_lines
from pfljax.training.outcome import Outcome, make_key
from pfljax.training.progress import announced, progress
from pfljax.training.tracking import Tracker, make_evaluation

FROM_THE_START = (
    "the untrained network's outputs are NaN or infinite there, so no learning rate helps: look for NaN in the data, "
    "and for inputs out of range, such as tokens beyond those of an Embed"
)
DISPATCH_SECONDS = 2.0  # target time per dispatch; progress is shown after each
NAMED = 10  # most clients that lines name


class Diverged(RunError):
    """A loss that is not finite."""


Rounds = Annotated[int, knob(at_least=1, help="number of communication rounds R")]
EvalEvery = Annotated[int, knob(at_least=1, help="number of rounds between evaluations")]
CheckpointEvery = Annotated[
    int, knob(at_least=1, help="minimum number of rounds between checkpoints")
]


class Schedule(NamedTuple):
    """When to evaluate and save a run."""

    # number of rounds between evaluations. The first evaluation is at round 0.
    eval_every: EvalEvery = 10
    # Minimum number of rounds between checkpoints. Checkpoints are saved after evaluations.
    checkpoint_every: CheckpointEvery = 50


EVERY = Schedule()


class Trainer:
    """Trains one run, or several runs of one method in one kernel; see `Replicates.of` for how they may differ.

    Each replicate has its own directory, as if it had been run alone. Its seconds are an equal share of the total.
    Replicates resume from checkpoints of the same round in all directories; otherwise all start over.
    """

    def __init__(
        self,
        experiments: Sequence[Experiment],
        *,
        outs: Sequence[Path] | None = None,
        resume: Resume = False,
        say: Callable[[str], None] | None = None,
        bar: bool = False,
        profile: Callable[[Dispatch], str] | None = None,
        keep_going: bool = False,
        trackers: Sequence[Tracker | None] = (),
    ):
        """Checks the directories `outs`, if anything is written. Compiles and writes nothing yet.

        Federations are padded to the same sizes. `resume` is as in `folders.Resume`, `say` gets lines
        for the user, and `profile` plays a few rounds and says where their time goes. With
        `keep_going`, the other runs continue if the loss of one is not finite. `trackers` has one for
        each run, called with its evaluations, or none. Raises `ArgumentError` if a directory contains
        another run.
        """
        if outs:
            places = [{"directory": Path(out) / CLIENTS} for out in outs]
            experiments = [
                dataclasses.replace(e, **place)
                for e, place in zip(experiments, places, strict=True)
            ]
        if resume in (True, "if_possible") and processes.from_first(
            np.int32(any(map(is_checked, outs or ())))
        ):
            experiments = [dataclasses.replace(each, checked=True) for each in experiments]
        self.store = store_of(experiments[0])
        if profile and self.store.on_disk:
            raise ArgumentError(
                "profile", "needs a state to discard; accepted with client_store=device or host"
            )
        self.experiments = list(experiments)
        self.replicates = Replicates.of(experiments)
        self.folders = Folders(experiments, outs or (), resume)
        self.planned_rounds = experiments[0].planned_rounds
        self.say = say
        self.bar = bar
        self.profile = profile
        self.keep_going = keep_going
        self.trackers = trackers or [None] * len(experiments)
        self.resumed = 0
        self.diverged: dict[int, str] = {}  # number of the run -> reason
        # numbers of runs whose initial models have losses that are not finite
        self.lost: set[int] = set()
        self.keys = [jax.random.key(each.seed) for each in experiments]
        self.secrets = [
            secret_key(each.noise_seeds, key)
            for each, key in zip(experiments, self.keys, strict=True)
        ]
        # they share the state until further rounds
        self.outcomes: weakref.WeakSet[Outcome] = weakref.WeakSet()
        self.done = self.saved = 0
        self.stopped = ""  # why the run stopped before its last round
        self.seconds = 0.0
        self.state: State | None = None
        self.length = 0
        self.folders.check()

    def train(self, rounds: int, schedule: Schedule = EVERY) -> list[Outcome]:
        """Trains up to round `rounds`, evaluates and saves. Returns the outcome of every run.

        Raises:
            RunError: if a loss is not finite and its client cannot be dropped, or memory runs out.
        """
        self._set_rounds(rounds)
        with endings.full_disk_told(self.folders.outs), locked(self.folders.outs, self._tell):
            if self.state is None:
                self.folders.check()  # again, since another process may have written there
            self.play(rounds, schedule)
            outcomes = [self._outcome(number) for number in range(self.replicates.num)]
            processes.wait()  # wait until the first process has written what the others may read
        return outcomes

    def play(self, rounds: int, schedule: Schedule = EVERY) -> bool:
        """Like `train`, but without the final outcome. Returns False if every run diverged under `keep_going`."""
        self._set_rounds(rounds)
        if self.state is None:
            self.folders.check_rounds(rounds)
        schedule = Schedule(*(min(every, rounds) for every in schedule))
        if self.state is None:
            for each in self.experiments:
                mixing.check(each)
        if self.length != schedule.eval_every:
            with announced("compiling", self.say):
                self._compile(schedule.eval_every)
        if self.compiled.saving:
            self.compiled.saving.check(rounds)
        if self.state is None:
            self._begin()
        else:
            self._describe()
        try:
            self._play(rounds, schedule)
        except Diverged:
            if not self._starts_over():
                raise
            return self.play(rounds, schedule)
        return len(self.diverged) < self.replicates.num

    def _set_rounds(self, rounds: int) -> None:
        """Sets the number of rounds. Those of the first call are planned, unless the runs say for how many they are.

        Raises:
            ArgumentError: if runs that have begun would go on for more than the planned rounds, on which they depend.
        """
        first = self.experiments[0]
        planned = self.planned_rounds or rounds
        if self.state is not None:
            planned = max(first.planned, rounds)
            if planned > first.planned and first.depends_on_rounds:
                text = f"{first.name} depends on the planned number of rounds, here {first.planned}"
                accepted = f"accepted: up to round {first.planned}, or a new run with planned_rounds={rounds}"
                raise ArgumentError("rounds", f"{text}; {accepted}")
        planned_alike = [
            dataclasses.replace(each, planned_rounds=planned) for each in self.experiments
        ]
        self.experiments = [each.with_rounds(rounds) for each in planned_alike]
        self.folders.experiments = self.experiments

    def _starts_over(self) -> bool:
        """Goes back to before round 0, with a program that drops clients whose results are not finite.

        Returns False if that was the program, or if the run is to stop; no private noise is used again.
        """
        first = self.experiments[0]
        if not self.done:  # the initial models' predictions, which stay as they are
            return False
        if (
            first.checked
            or first.noise_seeds
            or not first.faults.droppable(self.compiled.algorithm)
        ):
            return False
        why = next(iter(self.diverged.values()))
        self._tell(f"  {why}; the run starts over and drops clients whose results are not finite")
        for out in self.folders.outs:
            processes.first(functools.partial(clear, out))
        self.experiments = [dataclasses.replace(each, checked=True) for each in self.experiments]
        self.folders = Folders(self.experiments, self.folders.outs, False)
        self.state = None
        self.diverged = {}
        self.length = 0
        self.done = 0
        self.saved = 0
        self.resumed = 0
        return True

    def _tell(self, line: str) -> None:
        if self.say is not None:
            self.say(line)

    def _key(self, purpose: int) -> Key:
        """The runs' keys for the initial state (0), rounds (1), predictors (2) or newcomers (3)."""
        runs = zip(self.experiments, self.keys, self.secrets, strict=True)
        return self.replicates.join([make_key(*run, purpose, self.done) for run in runs])

    def _compile(self, length: int) -> None:
        """Places the data and compiles rounds and evaluation."""
        first = self.experiments[0]
        replicates = self.replicates
        store = self.store
        parts: dict[str, Split] = {}
        for part in ("train", "validation", "test"):
            of_runs = [getattr(each.federation, part) for each in self.experiments]
            parts[part] = store.put(
                first.problem.plan, replicates, of_runs, first.federation.num_clients
            )
        self.clients = ClientData(parts["train"], parts["validation"])
        attackers = [each.federation.attacker for each in self.experiments]
        if attackers[0] is not None:
            placed = store.put(
                first.problem.plan, replicates, attackers, first.federation.num_clients
            )
            self.clients = self.clients._replace(attacker=placed)
        scored = [
            name
            for name in ("train", "test", "validation")
            if getattr(first.federation, name).y.size
        ]
        self.splits = {name: parts[name] for name in scored}
        self.compiled = compile_to_fit(first, self.clients, length, replicates)
        self.evaluate = store.make_evaluation(self.experiments, self.compiled, replicates)
        self.length = length

    def _begin(self) -> None:
        """Prints the plan, and initializes or restores the state."""
        first = self.experiments[0]
        compiled = self.compiled
        algorithm = compiled.algorithm
        apart = not self.store.on_devices
        splits = self.replicates.split(self.splits)[0] if apart else self.splits
        self.lines = [*plan_lines(compiled, splits, first), *algorithm.report.facts]
        if self.replicates.num > 1:
            sizes = "; bytes are per run" if apart else ""
            text = f"{self.replicates.num}; seconds are divided evenly among them{sizes}"
            self.lines.append(("replicates in one kernel", text))
        for name, value in self.lines:
            self._tell(f"  {name:32} {memory.readable(value) if isinstance(value, int) else value}")
        if self.profile:
            dispatch = dispatcher(compiled, self._key, self.clients)
            self._tell(f"  {self.profile(dispatch)}")
        like = (
            compiled.saving.like
            if compiled.saving
            else self.store.restorable(compiled, self.replicates)
        )
        restored = self.folders.restore(like, self._tell, self._joined)
        if restored:
            self.done, self.state = restored
            self.saved = self.done
        self._describe()
        self.folders.forget_later(self.done)
        if not restored:
            with announced("initializing the models", self.say):
                self.state = compiled.init(self._key(0), self.clients)
            parts = [self.keys, *map(self.replicates.split, (self.state, self.clients))]
            for each, *arrays in zip(self.experiments, *parts, strict=True):
                conformance.check_start(each, compiled.plan, *arrays)
        outs = self.folders.outs or [None] * self.replicates.num
        topology = self._topology()
        self.histories = [
            History(each, out, self.done, topology, algorithm.report.scored)
            for out, each in zip(outs, self.experiments, strict=True)
        ]
        self.seconds = self.histories[0].seconds
        if restored and not set(first.measures) <= self.histories[0].last.keys():
            with announced("evaluating the models", self.say):
                self._evaluate()
        for history in self.histories if restored else ():
            history.write()  # files may be missing, or contain later rounds
        if not restored:
            with announced("evaluating the initial models", self.say):
                self._evaluate()

    def _describe(self) -> None:
        for each, out in zip(self.experiments, self.folders.outs, strict=bool(self.folders.outs)):
            files.write_json(out / "config.json", each.described)

    def _topology(self) -> Topology:
        """Returns the topology that is recorded for the models that clients use."""
        algorithm = self.compiled.algorithm
        if algorithm.report.topology:
            return Topology(algorithm.report.topology)

        def of_first(clients):
            return self.replicates.split(clients)[0]

        on_devices = self.store.on_devices
        clients = jax.eval_shape(of_first, self.clients) if on_devices else of_first(self.clients)
        plan = self.compiled.plan
        key = self.keys[0]
        state = jax.eval_shape(functools.partial(lifting.init, algorithm, plan), key, clients)
        mixture, made = lifting.shapes(algorithm, plan, key, state, clients)
        return lifting.recorded_topology(algorithm.topology, made, len(mixture.index))

    def _joined(self, states: Sequence[Any]) -> State:
        """Returns the state of all runs from the contents of their checkpoints."""
        saving = self.compiled.saving
        if saving:
            keys = self.replicates.split(self._key(0))
            states = [
                saving.thaw(number, *saved)
                for number, saved in enumerate(zip(keys, states, strict=True))
            ]
        return self.store.join_states(self.compiled, self.replicates, states)

    def _play(self, rounds: int, schedule: Schedule) -> None:
        """Dispatches all rounds; evaluates and saves in between."""
        pace = 1
        rounds_key = self._key(1)
        self.resumed = self.done
        while self.outcomes:
            self.outcomes.pop().detach()
        with (
            progress(rounds, self.done, self.say, self.bar) as advance,
            endings.noted() as signaled,
        ):
            while self.done < rounds and not self._stops():
                stop = min(self.done + pace, (self.done // self.length + 1) * self.length, rounds)
                begin = time.perf_counter()
                self.state, records, count = self.compiled.segment(
                    rounds_key, self.done, stop, self.state, self.clients
                )
                records, count = jax.device_get((records, count))
                count = int(count)
                elapsed = time.perf_counter() - begin
                self.seconds += elapsed / self.replicates.num
                pace = int(
                    processes.from_first(np.int32(max(1, DISPATCH_SECONDS * count / elapsed)))
                )
                self.done += count
                advance(self.done)
                newest = self._note(records, count)
                if len(self.diverged) == self.replicates.num:
                    return
                if self.done % schedule.eval_every == 0 or self.done == rounds:
                    self._evaluate(newest)
                    if self.done - self.saved >= schedule.checkpoint_every or self.done == rounds:
                        self._save()
                if number := signaled():  # also after the last round: more runs may follow
                    self._interrupt(number)
            if self.saved != self.done:
                self._save()

    def _stops(self) -> bool:
        """Whether a run, which is trained alone, stops after the newest evaluation. A stopped run stays so."""
        rule = self.experiments[0].stop
        rows = self.histories[0].rows
        if rule is None or self.replicates.num > 1 or rows[-1]["round"] != self.done:
            return False
        try:
            why = rule(rows)
        except Exception as error:  # a user's function
            line = f"raised {type(error).__name__}: {error}".split("\n")[0]
            raise ArgumentError("stop", f"{line}, for the rows of the history") from error
        if (
            not isinstance(why, bool | int | str | np.generic | None)
            and getattr(why, "ndim", 1) > 0
        ):
            text = f"returned {type(why).__name__}, for the rows of the history"
            raise ArgumentError("stop", f"{text}; accepted: whether to stop, or why")
        if processes.from_first(np.int32(bool(why))):
            self.stopped = f"after round {self.done}: {why if isinstance(why, str) and why else 'its stop rule holds'}"
            self._tell(f"  stopped {self.stopped}")
        return bool(self.stopped)

    def _interrupt(self, number: int) -> NoReturn:
        """Saves the run and raises `Interrupted`."""
        if self.saved != self.done:
            self._save()
        outs = self.folders.outs
        where = (
            f"which is saved in {outs[0]}"
            if outs
            else "and nothing was saved, since the run has no folder"
        )
        raise endings.Interrupted(number, f"interrupted after round {self.done}, {where}")

    def _note(self, records: Record, count: int) -> list[Record]:
        """Counts the traffic of `count` rounds. Returns each run's records."""
        if self.replicates.num > 1:  # the first axis is rounds
            records = jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0), records)
        parts = [
            jax.tree.map(lambda leaf: leaf[:count], part) for part in self.replicates.split(records)
        ]
        for each, history, record in zip(self.experiments, self.histories, parts, strict=True):
            history.down += float(record.down.sum(dtype=np.float64)) / each.federation.num_clients
            history.up += float(record.up.sum(dtype=np.float64)) / each.federation.num_clients
            if record.seconds is not None:
                history.simulated += float(record.seconds.sum(dtype=np.float64))
        for number, record in enumerate(parts):
            if record.dropped is not None:
                self._count_dropped(number, record.dropped, self.done - count)
            if number not in self.diverged and (record.diverged >= 0).any():
                first = int(np.argmax(record.diverged >= 0))
                at = self.done - count + first + 1
                self.diverged[number] = (
                    f"round {at}: the loss of client {record.diverged[first]} is not finite"
                )
        if self.diverged and not self.keep_going:
            self._stop(*next(iter(self.diverged.items())))
        return parts

    def _count_dropped(self, number: int, dropped: np.ndarray, done: int) -> None:
        """Counts the clients (rounds, S) that were dropped after `done` rounds, and names each once."""
        times = self.histories[number].dropped
        run = f"run {number}, " if self.replicates.num > 1 else ""
        for at, client in (
            (at, int(client))
            for at, ids in enumerate(dropped, done + 1)
            for client in ids[ids >= 0]
        ):
            times[client] = times.get(client, 0) + 1
            if times[client] == 1 and len(times) <= NAMED:
                self._tell(
                    f"  {run}round {at}: the results of client {client} are not finite and are dropped"
                )

    def _stop(self, number: int, why: str):
        """Saves the earlier evaluations and raises `Diverged`."""
        for history in self.histories:
            if history.rows:
                history.write()
        said = "Earlier evaluations are saved" if self.histories[number].rows else "The run is"
        kept = f"{said} in {self.folders.outs[number]}" if self.folders.outs else ""
        cause = FROM_THE_START if number in self.lost else "a smaller learning rate may help"
        run = f"seed {self.experiments[number].seed}, " if self.replicates.num > 1 else ""
        raise Diverged(f"{run}{why}; {cause}", kept)

    def _evaluate(self, newest: Sequence[Record] | None = None) -> None:
        """Adds a row to every run's history, with the runs' `newest` records.

        None are those of the initial models: then "train_loss" is the loss of their predictions, and the method's own
        metrics are missing.
        """
        found = jax.device_get(self.evaluate(self._key(2), self.state, self.clients, self.splits))
        records = newest or [None] * self.replicates.num
        parts = zip(
            self.experiments, self.histories, records, self.replicates.split(found), strict=True
        )
        for number, (each, history, record, (scores, collaboration)) in enumerate(parts):
            scored = slice(None) if each.scored is None else each.scored
            sizes = {
                part: np.asarray(getattr(each.federation, part).size)[scored] for part in scores
            }
            means = {
                part: evaluation.summarize(values, sizes[part], each.lower_is_better)
                for part, values in scores.items()
            }
            earlier = history.take_back(self.done)  # of a run that goes on with other metrics
            row = earlier or {
                "round": self.done,
                "seconds": self.seconds,
                "train_loss": float(record.train_loss[-1]) if record else means["train"]["loss"],
                **means["test"],
                "bytes_down": history.down,
                "bytes_up": history.up,
                **({"simulated_seconds": history.simulated} if each.problem.clock else {}),
                **{
                    name: float(values[-1])
                    for name, values in (record.metrics.items() if record else ())
                },
            }
            row |= {
                name: means["test"][name]
                for metric in each.measures
                for name in (metric, f"{metric}_bottom_decile")
            }
            if why := self._not_finite(number, scores, sizes):
                self.diverged.setdefault(number, why)
                if not self.keep_going:
                    continue
            elif not self.compiled.algorithm.report.collaboration:
                field = "whom and predict" if self.compiled.algorithm.predict else "whom"
                conformance.check_weights(each, field, collaboration["weights"], each.scored)
            validated = means.get("validation", {})
            row |= {
                f"validation_{name}": validated[name]
                for name in ("loss", "accuracy", *each.measures)
                if name in validated
            }
            history.add(row, scores, collaboration)
            history.write_rows()
            if processes.is_first() and (tracker := self.trackers[number]):
                used = collaboration if each.scored is None else {}
                place = {"shared": history.topology.on_server, "resumed": self.resumed}
                tracker(make_evaluation(row, means, scores, used, **place))
        if self.diverged and not self.keep_going:
            self._stop(*next(iter(self.diverged.items())))

    def _not_finite(self, number: int, scores: dict, sizes: dict) -> str:
        """Says which client's test loss is not finite, now or after the last update; "" if all are.

        Of the initial models, also notes losses of training examples that are not finite. Each of these clients may be
        dropped, so that the run can go on.
        """
        scored = self.experiments[number].scored
        found = {}
        for part in ("test", "train"):
            lost = np.flatnonzero(~np.isfinite(scores[part]["loss"]) & (sizes[part] > 0))
            if len(lost):
                found[part] = lost[0] if scored is None else scored[lost[0]]
        if self.done:
            client = found.get("test")
            return (
                ""
                if client is None
                else f"round {self.done}: the loss of client {client} is not finite after it"
            )
        told = number in self.lost  # before the run started over
        for part, client in found.items():
            self.lost.add(number)
            text = f"the initial models: the loss of client {client} is not finite on its {part} examples"
            if part == "test":
                return text
            if not told:
                self._tell(f"  {text}; {FROM_THE_START}")
        return ""

    def _save(self) -> None:
        assert self.state is not None
        for history in self.histories:
            history.seconds = self.seconds
        self.folders.save(
            self.done, self.compiled, self.histories, self.replicates.split(self.state)
        )
        self.saved = self.done

    def _outcome(self, number: int) -> Outcome:
        """Returns one run's outcome and writes its summary."""

        def of_run(joined):
            return self.replicates.split(joined)[number]

        experiment = self.experiments[number]
        compiled = self.compiled
        history = self.histories[number]
        state = of_run(self.state)
        summary = scoring.summarize(experiment, compiled, history, self.lines, of_run(self._key(1)))
        summary["stopped"] = self.stopped or None
        summary["dropped"] = {
            str(client): history.dropped[client] for client in sorted(history.dropped)
        }
        if history.dropped:
            self._tell(
                f"  dropped, since their results were not finite: {most_dropped(history.dropped)}"
            )
        summary["unseen"] = scoring.score_unseen(experiment, compiled, of_run(self._key(3)), state)
        self.folders.finish(number, summary, self.done)
        key = of_run(self._key(2))
        clients = of_run(self.clients)
        outcome = Outcome(summary, history, experiment, compiled.plan, key, clients, state)
        self.outcomes.add(outcome)
        return outcome


def most_dropped(times: dict[int, int]) -> str:
    """Names those that were dropped most often: "client 3 (12 times), client 7 (1 time)"."""
    ordered = sorted(times, key=lambda client: (-times[client], client))
    named = [
        f"client {each} ({times[each]} time{'s' * (times[each] > 1)})" for each in ordered[:NAMED]
    ]
    others = [f"{len(ordered) - NAMED} others"] * (len(ordered) > NAMED)
    return ", ".join(named + others)


def check(experiment: Experiment) -> Experiment:
    """Builds the method once, to find mistakes before compiling anything. Returns the run.

    Raises `ArgumentError` for a knob that does not fit the clients or the model, a user's method that returns something
    that is not accepted, a store that does not support the method, a metric of the run's that has the name of one of
    the method's, or more clients to score than there are.
    """
    num = experiment.federation.num_clients
    if experiment.eval_clients > num:
        raise ArgumentError("eval_clients", f"accepted: 0 to {num}", experiment.eval_clients)
    conformance.check(experiment)
    algorithm = experiment.algorithm(experiment.problem.plan)
    store_of(experiment).check(experiment, algorithm)
    conformance.check_metrics(experiment, algorithm)
    _check_optimizer(experiment, algorithm)
    return experiment


def _check_optimizer(experiment: Experiment, algorithm: Algorithm) -> None:
    """Warns of an optimizer that learns from many steps in a row, but starts anew in each round."""
    problem = experiment.problem
    if not algorithm.topology.on_server or problem.keep_optimizer:
        return
    names = lasting.long_lived(problem.solver.optimizer, problem.model.network.shapes)
    if names:
        text = (
            f"{', '.join(names)} starts anew in each round, with what earlier steps have taught it"
        )
        warn("optimizer", f"{text}; keep_optimizer=True keeps a client's state over its rounds")
