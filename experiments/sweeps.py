"""Runs of several methods, seeds and settings side by side: cells, each a run of its own that is not run again.

Entry points that compare build on this: `cell` runs one, `tune` finds a method's learning rate, `write_table` ends.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import common
from pfljax import algorithms, data
from pfljax.core.types import RunError, UsageError
from pfljax.data import Federation
from pfljax.engine import processes
from pfljax.training import files, loop
from pfljax.training.history import check_directory

FLAGS = flags.FLAGS
PRESETS = Path(__file__).parent / "presets"


def define_sweep_flags(methods: Sequence[str], seeds: Sequence[str], out: str) -> None:
    """Which methods, on which seeds, into which folder; and tuning."""
    flags.DEFINE_list("algorithms", list(methods), "methods, or all")
    flags.DEFINE_list("seeds", list(seeds), "each decides its own split, initial models, cohorts, batches, sampling")
    flags.DEFINE_enum("replicate", "no", ["no", "vmap"], "vmap: a method's seeds run at once, stacked in one kernel")
    flags.DEFINE_string("out", out, "folder of the table; finished cells in it are kept")
    flags.DEFINE_list("tune", [], "rates: each method takes the one of best validation accuracy, on the first seed")


def method_names() -> list[str]:
    """The methods that --algorithms names, in its order."""
    names = list(algorithms.METHODS) if FLAGS.algorithms == ["all"] else FLAGS.algorithms
    for name in names:
        algorithms.get(name, flag="--algorithms")
    common.check_knobs(names)
    return names


def seed_numbers() -> list[int]:
    """The seeds that --seeds names."""
    try:
        seeds = [int(seed) for seed in FLAGS.seeds]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise UsageError(f"--seeds={','.join(FLAGS.seeds)}: accepted: whole numbers of 0 or more, separated by commas")
    return seeds


def refuse(flag: str, why: str) -> None:
    """Raises UsageError for a flag that is on the command line and would not be read."""
    if FLAGS[flag].present:
        raise UsageError(f"--{flag}: not read here: {why}")


def numbers(
    flag: str, kind: type, least: float | None = None, below: float | None = None, sets: str | None = None
) -> list:
    """A list flag's numbers.

    Args:
        flag: Its name.
        kind: int or float.
        least: The least that is accepted; None: anything above 0.
        below: What all must be below; None: no such bound.
        sets: The flag that takes these numbers in turn, and so cannot be on the command line itself.

    Raises:
        UsageError: naming the flag.
    """
    if sets and FLAGS[flag].value:
        refuse(sets, f"--{flag} gives it its values")
    try:
        values = [kind(value) for value in FLAGS[flag].value]
    except ValueError:
        values = [-math.inf]
    good = lambda value: (value > 0 if least is None else value >= least) and (below is None or value < below)
    if not all(map(good, values)):
        accepted = "positive numbers" if least is None else f"numbers of {least:g} or more"
        accepted += "" if below is None else f" and below {below:g}"
        raise UsageError(f"--{flag}={','.join(FLAGS[flag].value)}: accepted: {accepted}, separated by commas")
    return values


@contextlib.contextmanager
def settings(**values):
    """Flags with other values for a while; a dot in a name is written as two underscores."""
    values = {name.replace("__", "."): value for name, value in values.items()}
    before = {name: FLAGS[name].value for name in values}
    try:
        for name, value in values.items():
            FLAGS[name].value = value
        yield
    finally:
        for name, value in before.items():
            FLAGS[name].value = value


def preset(path: Path) -> dict:
    """The flags of a flagfile that are not on the command line, for `settings`; nothing where there is no such file."""
    if not path.exists():
        return {}
    found = [word.removeprefix("--").split("=", 1) for word in FLAGS.read_flags_from_files([f"--flagfile={path}"])]
    return {name.replace(".", "__"): FLAGS[name].parser.parse(v) for name, v in found if not FLAGS[name].present}


class Paper(NamedTuple):
    """A paper whose experiments are repeated: settings for each of its data sets, in experiments/presets.

    Attributes:
        folder: Where in the presets its files are: NAME.flags of a data set, NAME-METHOD.flags of a method on it.
        names: Its data sets.
        of_dataset: Which of them a --dataset is.
    """

    folder: str
    names: tuple[str, ...]
    of_dataset: dict[str, str]

    def define_flag(self) -> None:
        """Which of the paper's data sets this is."""
        flags.DEFINE_string(
            "preset", None, f"settings of a data set of the paper: {', '.join(self.names)}; default: by --dataset"
        )

    def name(self) -> str | None:
        """The paper's name of the data set, or None for one of the user's own.

        Raises:
            UsageError: for a preset that there is not.
        """
        if FLAGS.preset is not None and FLAGS.preset not in self.names:
            raise UsageError(f"--preset={FLAGS.preset}: accepted: {', '.join(self.names)}")
        return FLAGS.preset or self.of_dataset.get(FLAGS.dataset)

    def settings_of(self, method: str):
        """The settings for a method, where the command line does not say otherwise."""
        both = [PRESETS / self.folder / f"{self.name()}{end}.flags" for end in ("", f"-{method}")]
        return settings(**preset(both[0]) | preset(both[1]))


@functools.lru_cache(maxsize=3)  # a data set of images may take a gigabyte
def _build_data(seed: int, values: tuple) -> tuple[Federation, Federation | None]:
    del values  # what the flags were, so that others build anew
    return common.build_data(seed)


def build_data(seed: int) -> tuple[Federation, Federation | None]:
    """`common.build_data`, once for all methods of the same seed and flags."""
    return _build_data(seed, tuple((flag, str(FLAGS[flag].value)) for flag in common.DATA_FLAGS))


def kept(setup: loop.Setup, out: Path) -> dict | None:
    """The summary of a cell that is finished, else None; complains of one with other settings."""
    processes.first(functools.partial(check_directory, out, setup.config, resume=True))
    summary = out / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["last"]["round"] >= setup.rounds:
        print(f"  {out}: finished before, kept")
        return json.loads(summary.read_text())
    print(f"  {out}: {setup.federation.num_clients} clients, {setup.rounds} rounds")
    return None


def say(line: str) -> None:
    """Of what a run says, only what its profile shows."""
    if FLAGS.profile and "profile: " in line:
        print(line)


def cell(name: str, seed: int, out: Path) -> dict:
    """One run's summary under the flags as they are, trained unless it is there already."""
    setup = common.build_setup(name, *build_data(seed), seed)
    return kept(setup, out) or loop.run(setup, out, resume=True, say=say).summary


def replicates(name: str, seeds: Sequence[int], outs: Sequence[Path]) -> list[dict]:
    """As `cell` for several seeds, those that are not finished in one kernel."""
    if FLAGS.client_store == "host":
        raise UsageError("--replicate=vmap: accepted with --client_store=device")
    trained, unseen = zip(*[build_data(seed) for seed in seeds], strict=True)
    trained = data.pad_alike(trained)
    setups = [common.build_setup(name, *each) for each in zip(trained, unseen, seeds, strict=True)]
    summaries = {out: kept(setup, out) for setup, out in zip(setups, outs, strict=True)}
    missing = [(setup, out) for setup, out in zip(setups, outs, strict=True) if summaries[out] is None]
    if missing:
        results = loop.run_replicates(*zip(*missing, strict=True), resume=True, say=say)
        summaries |= {out: result.summary for (_, out), result in zip(missing, results, strict=True)}
    return [summaries[out] for out in outs]


def tune(name: str, seed: int, out: Path) -> float:
    """The rate of --tune with the best validation accuracy (or least loss) in the last round.

    A quarter of the training examples is for validation, unless --validation_fraction says otherwise; a rate
    that diverges is out.

    Raises:
        RunError: if all of them diverge.
    """
    try:
        rates = [float(rate) for rate in FLAGS.tune]
    except ValueError:
        rates = [0.0]
    if min(rates) <= 0:
        raise UsageError(f"--tune={','.join(FLAGS.tune)}: accepted: rates above 0, separated by commas")
    scores = {}
    for rate in rates:
        with settings(learning_rate=rate, validation_fraction=FLAGS.validation_fraction or 0.25):
            try:
                last = cell(name, seed, out / f"rate-{rate:g}")["last"]
            except RunError as error:
                print(f"  rate {rate:g}: {error}")
                continue
        scores[rate] = last.get("validation_accuracy", -last["validation_loss"])
    if not scores:
        raise RunError(f"--tune={','.join(FLAGS.tune)}: {name} diverges at every rate")
    best = max(scores, key=scores.__getitem__)
    print(f"  {name}: rate {best:g} of " + ", ".join(f"{rate:g} ({score:.4f})" for rate, score in scores.items()))
    return best


def cells(name: str, seeds: Sequence[int], out: Path) -> list[dict]:
    """A method's summaries on all seeds, in OUT/seed-N, at the rate that --tune finds, if given."""
    rate = tune(name, seeds[0], out / "tuning") if FLAGS.tune else FLAGS.learning_rate
    outs = [out / f"seed-{seed}" for seed in seeds]
    with settings(learning_rate=rate):
        if FLAGS.replicate == "vmap":
            return replicates(name, seeds, outs)
        return [cell(name, seed, folder) for seed, folder in zip(seeds, outs, strict=True)]


def rate_of(out: Path) -> float:
    """The learning rate of a finished cell."""
    return files.read_json(out / "config.json")["flags"]["learning_rate"]


def mean_over(summaries: Sequence[dict], read: Callable[[dict], float]) -> float:
    """The mean of a figure over runs."""
    return float(np.mean([read(summary) for summary in summaries]))


def write_table(
    title: str, heads: Sequence[str], body: Sequence[Sequence[str]], rows: Sequence[dict], out: Path, figure: str = ""
) -> None:
    """Writes table.md and table.csv (heads and cells) and table.json (rows), and shows them and where they are."""
    lines = [" | ".join(line) for line in [heads, ["---"] * len(heads), *body]]
    files.write_text(out / "table.md", "".join(f"| {line} |\n" for line in lines))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *body])
    files.write_text(out / "table.csv", text.getvalue())
    files.write_json(out / "table.json", rows)
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    for cells in body:
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(f"table: {out / 'table.md'}, .csv, .json" + (f"; figure: {out / figure}" if figure else ""))
