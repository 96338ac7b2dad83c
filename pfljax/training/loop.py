"""The training loop: several rounds per dispatch, evaluation, checkpoints, and the run's files."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import jax
import numpy as np

from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError, RunError, warn
from pfljax.contract.types import Algorithm, ClientData, Key, State, Topology
from pfljax.evaluation import metrics as evaluation
from pfljax.evaluation import recovery
from pfljax.exchange import lifting
from pfljax.exchange.rounds import Record
from pfljax.folder import endings, files, recorded_clients
from pfljax.folder.folders import CLIENTS, Folders, Resume, clear, is_checked
from pfljax.folder.history import History
from pfljax.folder.locks import locked
from pfljax.local import lasting
from pfljax.local.privacy import secret_key
from pfljax.run import memory
from pfljax.run.experiment import Experiment
from pfljax.run.replicates import Replicates
from pfljax.settings.fields import hyperparameter
from pfljax.stores import stacks
from pfljax.stores.initial_rows import completed
from pfljax.stores.registry import store_of
from pfljax.stores.serving import scored_ids
from pfljax.training import conformance, evaluating, mixing, never_trained, scoring
from pfljax.training.compiling import Dispatch, compile_to_fit, dispatcher
from pfljax.training.describe import SURPRISES, plan_lines, short_lines
from pfljax.training.evaluating import EvalEvery
from pfljax.training.outcome import Outcome, make_key
from pfljax.training.progress import Display, Seconds, described, logger
from pfljax.training.saving import AUTO, CheckpointEvery, Interval, Saver, interval
from pfljax.training.tracking import Tracker, make_evaluation

FROM_THE_START = (
    "the untrained network's outputs are NaN or infinite there, so no learning rate helps: look for NaN in the data, "
    "and for inputs out of range, such as tokens beyond those of an Embed"
)
DISPATCH_SECONDS = 2.0  # target time per dispatch; progress is shown after each
TOTAL = "total"
OTHER = "other"
PARTS = ("compiling", "rounds", "evaluation", "checkpoints")  # of a run's seconds
NAMED = 10  # most clients that lines name
MOST_AHEAD = 1000  # rounds from whose cohorts follows which rows are saved ahead


class Diverged(RunError):
    """A loss that is not finite."""


Rounds = Annotated[int, hyperparameter(at_least=1, help="number of communication rounds R")]


class Schedule(NamedTuple):
    """When to evaluate and save a run."""

    # Number of rounds between evaluations. The first evaluation is at round 0, the last one after the last round.
    # "auto": 10, or more where evaluations would take more than a tenth of the time.
    eval_every: EvalEvery = AUTO
    # Rounds between checkpoints, or seconds such as "60s". "auto": a minute, or longer where saving
    # would take more than a tenth of the time. The last round is always saved.
    checkpoint_every: CheckpointEvery = AUTO
    # Whether the initial models are evaluated, as round 0.
    initial: bool = True


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
        bar: bool = False,
        profile: Callable[[Dispatch], str] | None = None,
        keep_going: bool = False,
        trackers: Sequence[Tracker | None] = (),
    ):
        """Checks the directories `outs`, if anything is written. Compiles and writes nothing yet.

        Federations are padded to the same sizes. `resume` is as in `folders.Resume`. `bar` is as in
        `Display`. `profile` plays a few rounds and says where their time goes. With `keep_going`,
        the other runs continue if the loss of one is not finite. `trackers` has one for each run,
        called with its evaluations, or none. Raises `ArgumentError` if a directory contains another
        run.
        """
        outs = outs or ()
        experiments = in_folders(experiments, outs)
        if resume in (True, "if_possible"):
            drops_clients = np.int32(any(map(is_checked, outs)))
            if processes.from_first(drops_clients):
                experiments = checked(experiments)
        self.store = store_of(experiments[0])
        if profile and self.store.on_disk:
            text = "needs a state to discard; accepted with client_store=device or host"
            raise ArgumentError("profile", text)

        # What was asked for.
        self.experiments = experiments
        self.histories: list[History] = []
        self.replicates = Replicates.from_experiments(experiments)
        self.folders = Folders(experiments, outs, resume)
        self.planned_rounds = experiments[0].planned_rounds
        self.display = Display(bar)
        self.parts = Seconds()
        self.timed_until = time.perf_counter()  # the total has all seconds until then
        self.profile = profile
        self.keep_going = keep_going
        self.trackers = trackers or [None] * len(experiments)
        self.keys = [jax.random.key(experiment.seed) for experiment in experiments]
        self.secrets = [
            secret_key(experiment.noise_seeds, key)
            for experiment, key in zip(experiments, self.keys, strict=True)
        ]

        # Where training is.
        self.resumed = 0
        self.diverged: dict[int, str] = {}  # number of the run -> reason
        # Numbers of runs whose initial models have losses that are not finite.
        self.lost: set[int] = set()
        # They share the state until further rounds.
        self.outcomes: weakref.WeakSet[Outcome] = weakref.WeakSet()
        self.done = 0
        self.saver = Saver(Interval(), 0)
        self.stopped = ""  # why the run stopped before its last round
        self.seconds = 0.0
        self.state: State | None = None
        self.length = 0
        self.phase = 0  # of the clients' data
        # The last round that each client takes part in (K,), once rows are saved ahead.
        self.last_rounds: np.ndarray | None = None
        self.evaluates_less = False  # whether the default is a larger number of rounds than usual
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
            self.timed_until = time.perf_counter()
            self.play(rounds, schedule)
            outcomes = [self._outcome(number) for number in range(self.replicates.num)]
            processes.wait()  # wait until the first process has written what the others may read
        self._tell(f"  {described(outcomes[0].summary['seconds'])}")
        return outcomes

    def play(self, rounds: int, schedule: Schedule = EVERY) -> bool:
        """Like `train`, but without the final outcome. Returns False if every run diverged under `keep_going`."""
        self._set_rounds(rounds)
        if self.state is None:
            self.folders.check_rounds(rounds)
            for experiment in self.experiments:
                mixing.check(experiment)
        eval_every = min(evaluating.interval(schedule.eval_every, self.experiments), rounds)
        self.evaluates_less = schedule.eval_every == AUTO and eval_every > evaluating.USUAL
        checkpoint_interval = interval(schedule.checkpoint_every)
        if self.length != eval_every:
            with self.display.step("compiling"), self.parts.measured("compiling"):
                self._compile(eval_every)
            if self.state is not None:
                self._enter(self.done)
        if self.compiled.saving:
            self.compiled.saving.check(rounds)
        if self.state is None:
            self._begin(schedule.initial)
        else:
            self._describe()
        try:
            self._play(rounds, eval_every, checkpoint_interval)
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
                continued = f"up to round {first.planned}"
                anew = f"a new run with planned_rounds={rounds}"
                raise ArgumentError("rounds", f"{text}; accepted: {continued}, or {anew}")
        self.experiments = [
            dataclasses.replace(experiment, planned_rounds=planned).with_rounds(rounds)
            for experiment in self.experiments
        ]
        self.folders.experiments = self.experiments

    def _starts_over(self) -> bool:
        """Goes back to before round 0, with a program that drops clients whose results are not finite.

        Returns False if that was the program, or if the run is to stop; no private noise is used again.
        """
        if not self.done:  # the initial models' predictions, which stay as they are
            return False
        first = self.experiments[0]
        if first.checked or first.noise_seeds:
            return False
        if not first.faults.droppable(self.compiled.algorithm):
            return False
        why = next(iter(self.diverged.values()))
        self._tell(f"  {why}; the run starts over and drops clients whose results are not finite")
        for out in self.folders.outs:
            processes.first(functools.partial(clear, out))
        self.experiments = checked(self.experiments)
        self.folders = Folders(self.experiments, self.folders.outs, False)
        self.state = None
        self.diverged = {}
        self.length = 0
        self.done = 0
        self.saver = Saver(Interval(), 0)
        self.resumed = 0
        return True

    def _tell(self, line: str) -> None:
        logger.info("%s", line)

    def _key(self, purpose: int) -> Key:
        """The runs' keys for the initial state (0), rounds (1), predictors (2) or newcomers (3)."""
        runs = zip(self.experiments, self.keys, self.secrets, strict=True)
        keys = [
            make_key(experiment, key, secret, purpose, self.done)
            for experiment, key, secret in runs
        ]
        return self.replicates.join(keys)

    def _compile(self, length: int) -> None:
        """Places the data of the first round and compiles rounds and evaluation."""
        self._place(0)
        self.length = length
        self._compile_rounds()

    def _compile_rounds(self) -> None:
        """Compiles rounds and evaluation for the data as they are placed."""
        first = self.experiments[0]
        self.compiled = compile_to_fit(first, self.clients, self.length, self.replicates)
        self.evaluate = self.store.make_evaluation(self.experiments, self.compiled, self.replicates)

    def _enter(self, number: int) -> None:
        """Exchanges the clients' data for those of a round, if these are others."""
        phases = self.experiments[0].phases
        if phases is None or phases.number(number) == self.phase:
            return
        before = _shapes(self.clients)
        self._place(number)
        for history, experiment in zip(self.histories, self.experiments, strict=False):
            history.experiment = experiment
        # Pools of examples on several devices, or of fewer examples, have other shapes.
        if self.store.on_devices and _shapes(self.clients) != before:
            with self.display.step("compiling"), self.parts.measured("compiling"):
                self._compile_rounds()

    def _place(self, number: int) -> None:
        """Places the clients' data of a round; 0: those of the initial models."""
        self.experiments = [experiment.in_round(number) for experiment in self.experiments]
        first = self.experiments[0]
        self.phase = 0 if first.phases is None else first.phases.number(number)
        federations = [experiment.federation for experiment in self.experiments]

        def put(values: Sequence[Any]) -> Any:
            """Places data of all runs on the devices, or where the store keeps them."""
            plan = first.problem.plan
            return self.store.put(plan, self.replicates, values, first.federation.num_clients)

        # The clients' data, with the splits that are scored.
        train = put([federation.train for federation in federations])
        validation = put([federation.validation for federation in federations])
        test = put([federation.test for federation in federations])
        self.clients = ClientData(train, validation)
        attackers = [federation.attacker for federation in federations]
        if attackers[0] is not None:
            self.clients = self.clients._replace(attacker=put(attackers))
        splits = {"train": train, "test": test, "validation": validation}
        self.splits = {
            name: split for name, split in splits.items() if getattr(first.federation, name).y.size
        }

    def _begin(self, evaluates: bool) -> None:
        """Prints the plan, and initializes or restores the state. Evaluates initial models if asked to."""
        self._print_plan()
        if self.profile:
            dispatch = dispatcher(self.compiled, self._key, self.clients)
            self._tell(f"  {self.profile(dispatch)}")
        with self.parts.measured("checkpoints"):
            restored = self._restore()
        self._enter(self.done)
        self._describe()
        self.folders.forget_later(self.done)
        if not restored:
            self._initialize()

        # Histories, with earlier evaluations.
        scored = self.compiled.algorithm.report.scored
        topology = self._topology()
        outs = self.folders.outs or [None] * self.replicates.num
        self.histories = [
            History(experiment, out, self.done, topology, scored)
            for out, experiment in zip(outs, self.experiments, strict=True)
        ]
        self.seconds = self.histories[0].seconds
        for part, seconds in self.histories[0].parts.items():
            earlier = self.replicates.num * seconds
            self.parts.total[part] = self.parts.total.get(part, 0.0) + earlier
        if not restored and not evaluates:
            return
        if not restored:
            self._evaluate()
            return
        measures = set(self.experiments[0].measures)
        if not measures <= self.histories[0].last.keys():
            self._evaluate()
        for history in self.histories:
            history.write()  # files may be missing, or contain later rounds

    def _print_plan(self) -> None:
        """Logs the plan, in short as INFO and in full as DEBUG, and keeps its lines for the summary."""
        divided = not self.store.on_devices
        splits = self.replicates.split(self.splits)[0] if divided else self.splits
        facts = self.compiled.algorithm.report.facts
        self.lines = [*plan_lines(self.compiled, splits, self.experiments[0]), *facts]
        if self.replicates.num > 1:
            sizes = "; bytes are per run" if divided else ""
            text = f"{self.replicates.num}; seconds are divided evenly among them{sizes}"
            self.lines.append(("replicates in one kernel", text))
        if self.evaluates_less:
            text = f"every {self.length:,} rounds instead of {evaluating.USUAL}, to take less time"
            self.lines.append(("evaluations", text))
        in_short = short_lines(self.compiled, self.experiments[0], self.folders.outs)
        for name, text in in_short:
            logger.info("  %-32s %s", name, text)
        shown = {name for name, _ in in_short}
        for name, value in self.lines:
            text = memory.readable(value) if isinstance(value, int) else value
            # What may surprise is shown in any case.
            level = logging.INFO if name in SURPRISES else logging.DEBUG
            if name not in shown:
                logger.log(level, "  %-32s %s", name, text)

    def _restore(self) -> bool:
        """Restores the state from the newest checkpoint. Returns whether there is one."""
        saving = self.compiled.saving
        if saving:
            like = saving.like
        else:
            like = self.store.restorable(self.compiled, self.replicates)
        restored = self.folders.restore(like, self._tell, self._joined)
        if restored is None:
            return False
        self.done, self.state = restored
        return True

    def _initialize(self) -> None:
        """Initializes the state, and checks what users' methods make of it."""
        with self.display.step("initializing the models"):
            self.state = self.compiled.init(self._key(0), self.clients)
        states = self.replicates.split(self.state)
        data = self.replicates.split(self.clients)
        runs = zip(self.experiments, self.keys, states, data, strict=True)
        for experiment, key, state, clients in runs:
            conformance.check_start(experiment, self.compiled.plan, key, state, clients)

    def _describe(self) -> None:
        outs = self.folders.outs
        for experiment, out in zip(self.experiments, outs, strict=bool(outs)):
            files.write_json(out / "config.json", experiment.described)
            if experiment.clients is not None:
                recorded_clients.write(out, experiment.clients)

    def _topology(self) -> Topology:
        """Returns the topology that is recorded for the models that clients use."""
        algorithm = self.compiled.algorithm
        if algorithm.report.topology:
            return Topology(algorithm.report.topology)

        def first_clients(clients: ClientData) -> ClientData:
            return self.replicates.split(clients)[0]

        on_devices = self.store.on_devices
        clients = (
            jax.eval_shape(first_clients, self.clients)
            if on_devices
            else first_clients(self.clients)
        )
        plan = self.compiled.plan
        key = self.keys[0]
        init = functools.partial(lifting.init, algorithm, plan)
        state = jax.eval_shape(init, key, clients)
        mixture, prediction = lifting.shapes(algorithm, plan, key, state, clients)
        return lifting.recorded_topology(algorithm.topology, prediction, len(mixture.index))

    def _joined(self, states: Sequence[Any]) -> State:
        """Returns the state of all runs from the contents of their checkpoints."""
        saving = self.compiled.saving
        keys = self.replicates.split(self._key(0))
        first = self.experiments[0]
        states = [
            completed(first, self.replicates, number, *saved)
            for number, saved in enumerate(zip(keys, states, strict=True))
        ]
        if (
            self.replicates.num > 1 or saving
        ):  # rounds of several runs or processes track no changes of rows
            states = [stacks.in_memory(state) for state in states]
        if saving:
            states = [
                saving.thaw(number, *saved)
                for number, saved in enumerate(zip(keys, states, strict=True))
            ]
        return self.store.join_states(self.compiled, self.replicates, states)

    def _play(self, rounds: int, eval_every: int, checkpoint_interval: Interval) -> None:
        """Dispatches all rounds; evaluates and saves in between."""
        pace = 1
        rounds_key = self._key(1)
        self.last_rounds = None
        self.resumed = self.done
        self.saver = Saver(checkpoint_interval, self.saver.round if self.saver.round else self.done)
        phases = self.experiments[0].phases
        pauses = recovery.pauses(phases.starts[1:]) if phases else []
        while self.outcomes:
            self.outcomes.pop().detach()
        with (
            self.display.rounds(rounds, self.done),
            endings.noted() as signaled,
            self.folders.saving(),
        ):
            while self.done < rounds and not self._stops():
                next_evaluation = (self.done // self.length + 1) * self.length
                next_save = max(self.saver.next_round() or rounds, self.done + 1)
                next_pauses = [number for number in pauses if number > self.done]
                stop = min(self.done + pace, next_evaluation, next_save, rounds, *next_pauses)
                self._enter(self.done + 1)
                records, count, pace = self._dispatch(rounds_key, stop)
                self.display.advance(self.done, self._seconds_left(rounds, eval_every))
                newest = self._note(records, count)
                if len(self.diverged) == self.replicates.num:
                    return
                is_last = self.done == rounds
                self._save_ahead(rounds_key, rounds, eval_every)
                if self.done % eval_every == 0 or is_last or self.done in pauses:
                    self._evaluate(newest)
                if processes.from_first(np.int32(is_last or self._is_save_due())):
                    self._save()
                number = signaled()  # also after the last round: more runs may follow
                if number:
                    self._interrupt(number)
            if self.saver.round != self.done:
                self._save()
            self._finish_saving()

    def _save_ahead(self, rounds_key: Key, rounds: int, eval_every: int) -> None:
        """Begins to save rows that no further round changes, once the next checkpoint is likely the last one."""
        cohort = self.compiled.cohort
        assert self.state is not None
        if cohort is None or not self.folders.outs or self.folders.is_saving:
            return
        if self.last_rounds is None:
            next_save = self.saver.next_round()
            is_last = next_save is None or next_save >= rounds
            if next_save is None:
                seconds_left = self._seconds_left(rounds, eval_every)
                is_last = seconds_left < self.saver.interval.seconds
            if not is_last or rounds - self.done > MOST_AHEAD:
                return
            self.last_rounds = np.full(self.experiments[0].federation.num_clients, -1)
            for number in range(self.done, rounds):
                self.last_rounds[np.asarray(cohort(rounds_key, number))] = number
        self.folders.save_ahead(self.state, np.flatnonzero(self.last_rounds < self.done))

    def _is_save_due(self) -> bool:
        """Whether to save now. While a checkpoint is being saved, only a number of rounds makes the next one due."""
        is_saving = self.folders.is_saving
        self.saver.note_duration(self.folders.save_seconds)
        if is_saving and self.saver.interval.rounds is None:
            return False
        return self.saver.is_due(self.done)

    def _finish_saving(self) -> None:
        """Waits until the newest checkpoint is complete."""
        begin = time.perf_counter()
        with self.display.step("saving the checkpoint"):
            self.folders.wait()
        self.parts.add("checkpoints", time.perf_counter() - begin)

    def _seconds_left(self, rounds: int, eval_every: int) -> float:
        """Estimates the time until round `rounds` is evaluated and saved, by what each part took last."""
        last = self.parts.last
        left = (rounds - self.done) * last.get("rounds", 0.0)
        evaluations = -(-rounds // eval_every) - self.done // eval_every
        left += evaluations * last.get("evaluation", 0.0)
        return left + last.get("checkpoints", 0.0)

    def _dispatch(self, rounds_key: Key, stop: int) -> tuple[Record, int, int]:
        """Plays rounds up to `stop` at most: (records, number of rounds, rounds that take DISPATCH_SECONDS)."""
        begin = time.perf_counter()
        self.state, records, count = self.compiled.segment(
            rounds_key, self.done, stop, self.state, self.clients
        )
        records, count = jax.device_get((records, count))
        count = int(count)
        elapsed = time.perf_counter() - begin
        self.seconds += elapsed / self.replicates.num
        self.parts.last["rounds"] = elapsed / max(count, 1)
        self.done += count
        pace = np.int32(max(1, DISPATCH_SECONDS * count / elapsed))
        return records, count, int(processes.from_first(pace))

    def _stops(self) -> bool:
        """Whether a run, which is trained alone, stops after the newest evaluation. A stopped run stays so.

        If the clients' data change, it does so only after the last change, by the evaluations since then.
        """
        first = self.experiments[0]
        rule = first.stop
        rows = self.histories[0].rows
        is_new = bool(rows) and rows[-1]["round"] == self.done
        if rule is None or self.replicates.num > 1 or not is_new:
            return False
        if first.phases is not None:
            if self.done <= first.phases.starts[-1]:
                return False
            rows = scoring.rows_of_phase(first, rows)
        try:
            why = rule(rows)
        except Exception as error:  # a user's function
            line = f"raised {type(error).__name__}: {error}".split("\n")[0]
            raise ArgumentError("stop", f"{line}, for the rows of the history") from error
        accepted = isinstance(why, bool | int | str | np.generic | None)
        if not accepted and getattr(why, "ndim", 1) > 0:
            text = f"returned {type(why).__name__}, for the rows of the history"
            raise ArgumentError("stop", f"{text}; accepted: whether to stop, or why")
        if processes.from_first(np.int32(bool(why))):
            reason = why if isinstance(why, str) and why else "its stop rule holds"
            self.stopped = f"after round {self.done}: {reason}"
            self._tell(f"  stopped {self.stopped}")
        return bool(self.stopped)

    def _interrupt(self, number: int) -> NoReturn:
        """Saves the run and raises `Interrupted`."""
        if self.saver.round != self.done:
            self._save()
        self._finish_saving()
        outs = self.folders.outs
        if outs:
            where = f"which is saved in {outs[0]}"
        else:
            where = "and nothing was saved, since the run has no folder"
        raise endings.Interrupted(number, f"interrupted after round {self.done}, {where}")

    def _note(self, records: Record, count: int) -> list[Record]:
        """Counts the traffic of `count` rounds. Returns each run's records."""
        if self.replicates.num > 1:  # the first axis is rounds
            records = jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0), records)
        parts = [
            jax.tree.map(lambda leaf: leaf[:count], part) for part in self.replicates.split(records)
        ]

        # Bytes per client, and seconds on the simulated clock.
        for experiment, history, record in zip(
            self.experiments, self.histories, parts, strict=True
        ):
            num_clients = experiment.federation.num_clients
            history.down += float(record.down.sum(dtype=np.float64)) / num_clients
            history.up += float(record.up.sum(dtype=np.float64)) / num_clients
            history.count_trained(record.trained)
            if record.seconds is not None:
                history.simulated += float(record.seconds.sum(dtype=np.float64))

        # Losses that are not finite.
        done = self.done - count
        for number, record in enumerate(parts):
            if record.dropped is not None:
                self._count_dropped(number, record.dropped, done)
            lost = record.diverged >= 0
            if number not in self.diverged and lost.any():
                first = int(np.argmax(lost))
                client = record.diverged[first]
                self.diverged[number] = (
                    f"round {done + first + 1}: the loss of client {client} is not finite"
                )
        self._stop_if_diverged()
        return parts

    def _count_dropped(self, number: int, dropped: np.ndarray, done: int) -> None:
        """Counts the clients (rounds, S) that were dropped after `done` rounds, and names each once."""
        times = self.histories[number].dropped
        run = f"run {number}, " if self.replicates.num > 1 else ""
        for index, ids in enumerate(dropped, done + 1):
            for client in map(int, ids[ids >= 0]):
                times[client] = times.get(client, 0) + 1
                if times[client] == 1 and len(times) <= NAMED:
                    results = f"the results of client {client} are not finite and are dropped"
                    self._tell(f"  {run}round {index}: {results}")

    def _stop_if_diverged(self) -> None:
        """Raises `Diverged` for the first run whose loss is not finite, unless the others continue."""
        if self.diverged and not self.keep_going:
            number, why = next(iter(self.diverged.items()))
            self._stop(number, why)

    def _stop(self, number: int, why: str) -> NoReturn:
        """Saves the earlier evaluations and raises `Diverged`."""
        for history in self.histories:
            if history.rows:
                history.write()
        saved = ""
        if self.folders.outs:
            subject = (
                "Earlier evaluations are saved" if self.histories[number].rows else "The run is"
            )
            saved = f"{subject} in {self.folders.outs[number]}"
        cause = FROM_THE_START if number in self.lost else "a smaller learning rate may help"
        run = f"seed {self.experiments[number].seed}, " if self.replicates.num > 1 else ""
        raise Diverged(f"{run}{why}; {cause}", saved)

    def _evaluate(self, newest: Sequence[Record] | None = None) -> None:
        """Adds a row to every run's history, with the runs' `newest` records.

        None are those of the initial models: then "train_loss" is the loss of their predictions, and the method's own
        metrics are missing.
        """
        trained = self.store.put(
            self.compiled.plan,
            self.replicates,
            [history.has_trained for history in self.histories],
            self.experiments[0].federation.num_clients,
        )
        num_scored = len(scored_ids(self.experiments[0]))
        text = (
            f"evaluating {num_scored:,} clients" if self.done else "evaluating the initial models"
        )
        with self.display.step(text), self.parts.measured("evaluation"):
            scores_of_runs = self.evaluate(
                self._key(2), self.state, self.clients, self.splits, trained
            )
            scores_of_runs = self.replicates.split(jax.device_get(scores_of_runs))
        records: Sequence[Record | None] = newest or [None] * self.replicates.num
        for number, record in enumerate(records):
            scores, collaboration = scores_of_runs[number]
            self._add_evaluation(number, record, scores, collaboration)
        self._stop_if_diverged()

    def _add_evaluation(
        self,
        number: int,
        record: Record | None,
        scores: dict[str, dict[str, np.ndarray]],
        collaboration: dict[str, np.ndarray],
    ) -> None:
        """Adds a row to one run's history, writes it, and hands it to the run's tracker."""
        experiment = self.experiments[number]
        history = self.histories[number]
        scored = slice(None) if experiment.scored is None else experiment.scored
        sizes = {}
        means = {}
        for part, values in scores.items():
            sizes[part] = np.asarray(getattr(experiment.federation, part).size)[scored]
            means[part] = evaluation.summarize(values, sizes[part], experiment.lower_is_better)
        # The earlier row is that of a run that goes on with other metrics.
        row = history.take_back(self.done) or self._new_row(number, record, means)
        for metric in experiment.measures:
            for name in (metric, f"{metric}_bottom_decile"):
                row[name] = means["test"][name]

        why = self._not_finite(number, scores, sizes)
        if why:
            self.diverged.setdefault(number, why)
            if not self.keep_going:
                return
        elif not self.compiled.algorithm.report.collaboration:
            field = (
                "select_models and predict" if self.compiled.algorithm.predict else "select_models"
            )
            weights = collaboration["weights"]
            conformance.check_weights(experiment, field, weights, experiment.scored)

        validation = means.get("validation", {})
        for name in ("loss", "accuracy", *experiment.measures):
            if name in validation:
                row[f"validation_{name}"] = validation[name]
        history.add(row, scores, collaboration)
        history.write_rows()
        tracker = self.trackers[number]
        if tracker and processes.is_first():
            newest = make_evaluation(
                row,
                means,
                scores,
                collaboration if experiment.scored is None else {},
                shared=history.topology.on_server,
                resumed=self.resumed,
            )
            tracker(newest)

    def _new_row(
        self, number: int, record: Record | None, means: dict[str, dict[str, float]]
    ) -> dict[str, Any]:
        """A row of metrics.jsonl for the newest round, without the scores of validation examples."""
        history = self.histories[number]
        row = {
            "round": self.done,
            "seconds": self.seconds,
            "train_loss": float(record.train_loss[-1]) if record else means["train"]["loss"],
        }
        row |= means["test"]
        row["bytes_down"] = history.down
        row["bytes_up"] = history.up
        if self.experiments[number].problem.clock:
            row["simulated_seconds"] = history.simulated
        if record:
            row |= {name: float(values[-1]) for name, values in record.metrics.items()}
        return row

    def _not_finite(self, number: int, scores: dict, sizes: dict) -> str:
        """Says which client's test loss is not finite, now or after the last update; "" if all are.

        Of the initial models, also notes losses of training examples that are not finite. Each of these clients may be
        dropped, so that the run can go on.
        """
        scored = self.experiments[number].scored
        clients = {}  # the first whose loss is not finite, by split
        for part in ("test", "train"):
            not_finite = ~np.isfinite(scores[part]["loss"])
            lost = np.flatnonzero(not_finite & (sizes[part] > 0))
            if len(lost):
                clients[part] = lost[0] if scored is None else scored[lost[0]]
        if self.done:
            if "test" not in clients:
                return ""
            return f"round {self.done}: the loss of client {clients['test']} is not finite after it"
        was_lost = number in self.lost  # before the run started over
        for part, client in clients.items():
            self.lost.add(number)
            loss = f"the loss of client {client} is not finite on its {part} examples"
            text = f"the initial models: {loss}"
            if part == "test":
                return text
            if not was_lost:
                self._tell(f"  {text}; {FROM_THE_START}")
        return ""

    def _save(self) -> None:
        assert self.state is not None
        for history in self.histories:
            history.seconds = self.seconds
            history.parts = self._seconds_by_part()
        states = self.replicates.split(self.state)
        begin = time.perf_counter()
        if self.folders.outs:
            size = memory.readable(self.folders.num_bytes(self.compiled, states))
            with self.display.step(f"saving a checkpoint of {size}"):
                self.folders.save(self.done, self.compiled, self.histories, states)
        duration = time.perf_counter() - begin
        self.parts.add("checkpoints", duration)
        self.saver.saved(self.done, duration)

    def _seconds_by_part(self) -> dict[str, float]:
        """Seconds that each run took so far, by part but for its rounds: an equal share of those of all runs."""
        now = time.perf_counter()
        self.parts.add(TOTAL, now - self.timed_until)
        self.timed_until = now
        return {part: value / self.replicates.num for part, value in self.parts.total.items()}

    def _outcome(self, number: int) -> Outcome:
        """Returns one run's outcome and writes its summary."""

        def run_slice(joined: Any) -> Any:
            return self.replicates.split(joined)[number]

        experiment = self.experiments[number]
        compiled = self.compiled
        history = self.histories[number]
        state = run_slice(self.state)
        rounds_key = run_slice(self._key(1))
        summary = scoring.summarize(experiment, compiled, history, self.lines, rounds_key)
        summary["stopped"] = self.stopped or None
        by_part = {"rounds": self.seconds} | self._seconds_by_part()
        seconds = {part: by_part.get(part, 0.0) for part in PARTS}
        seconds[OTHER] = max(by_part[TOTAL] - sum(seconds.values()), 0.0)
        summary["seconds"] = seconds | {TOTAL: by_part[TOTAL]}
        dropped = history.dropped
        summary["dropped"] = {str(client): dropped[client] for client in sorted(dropped)}
        if dropped:
            clients_dropped = most_dropped(dropped)
            self._tell(f"  dropped, since their results were not finite: {clients_dropped}")
        self._add_never_trained(summary, number)
        newcomers_key = run_slice(self._key(3))
        summary["unseen"] = scoring.score_unseen(experiment, compiled, newcomers_key, state)
        self.folders.finish(number, summary, self.done)

        key = run_slice(self._key(2))
        clients = run_slice(self.clients)
        outcome = Outcome(summary, history, experiment, compiled.plan, key, clients, state)
        self.outcomes.add(outcome)
        return outcome

    def _add_never_trained(self, summary: dict, number: int) -> None:
        """Adds to a run's summary which clients have trained, and tells of those that have not."""
        history = self.histories[number]
        if history.trained is None:  # an earlier version began the run
            summary["never_trained"] = None
            return
        compiled = self.compiled
        rows = with_rounds_trained(summary["per_client"], history.trained)
        summary["per_client"] = rows
        summary["never_trained"] = never_trained.summarized(
            self.experiments[number], compiled.algorithm, compiled.state, history, rows
        )
        line = never_trained.line(summary["never_trained"])
        if line:
            self._tell(f"  {line}")


def _shapes(clients: Any) -> Any:
    """The form of the clients' data: structure, shapes and types."""
    leaves, structure = jax.tree.flatten(clients)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def with_rounds_trained(rows: list[dict], trained: np.ndarray) -> list[dict]:
    """The summary's rows of clients, with the number of rounds in which each has trained."""
    return [row | {"rounds_trained": int(trained[row["client"]])} for row in rows]


def in_folders(experiments: Sequence[Experiment], outs: Sequence[Path]) -> list[Experiment]:
    """The runs, with the folders for their clients' rows; as they are if nothing is written."""
    if not outs:
        return list(experiments)
    return [
        dataclasses.replace(experiment, directory=Path(out) / CLIENTS)
        for experiment, out in zip(experiments, outs, strict=True)
    ]


def checked(experiments: Sequence[Experiment]) -> list[Experiment]:
    """The runs, with a program that drops clients whose results are not finite."""
    return [dataclasses.replace(experiment, checked=True) for experiment in experiments]


def most_dropped(times: dict[int, int]) -> str:
    """Names those that were dropped most often: "client 3 (12 times), client 7 (1 time)"."""
    ordered = sorted(times, key=lambda client: (-times[client], client))
    texts = []
    for client in ordered[:NAMED]:
        plural = "s" if times[client] > 1 else ""
        texts.append(f"client {client} ({times[client]} time{plural})")
    if len(ordered) > NAMED:
        texts.append(f"{len(ordered) - NAMED} others")
    return ", ".join(texts)


def check(experiment: Experiment) -> Experiment:
    """Builds the method once, to find mistakes before compiling anything. Returns the run.

    Raises `ArgumentError` for a hyperparameter that does not fit the clients or the model, a user's method that
    returns something that is not accepted, a store that does not support the method, a metric of the run's that has
    the name of one of the method's, or more clients to score than there are.
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
        forgets = "starts anew in each round, with what earlier steps have taught it"
        text = f"{', '.join(names)} {forgets}"
        warn("optimizer", f"{text}; keep_optimizer=True keeps a client's state over its rounds")
