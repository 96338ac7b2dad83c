"""How a method's time and memory grow with the number of clients: a table (markdown, CSV, JSON) and a figure.

    python -m experiments.scaling --num_clients=10,100,1000

On random pixels of a chosen shape, so that K is not bound to a data set. Compile time, seconds a round, clients a
second, and the compiled round's bytes: arguments (state and data), what of the outputs needs memory beside them, and
temporaries, all per device.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import common, timing
from pfljax import algorithms, data, report
from pfljax.training import files, memory
from pfljax.types import RunError, UsageError

FLAGS = flags.FLAGS

common.define_training_flags(rounds=5)
common.define_device_flags()
flags.DEFINE_list("algorithms", ["federico"], "methods, or all")
flags.DEFINE_list("num_clients", ["10", "100", "1000"], "numbers of clients K")
flags.DEFINE_integer("train_examples", 20, "training examples a client", lower_bound=1)
flags.DEFINE_list("shape", ["28", "28", "1"], "of an example")
flags.DEFINE_integer("num_classes", 10, "C", lower_bound=2)
flags.DEFINE_string("out", "runs/scaling", "folder of the table and the figure")


def measure(name: str, num_clients: int) -> dict:
    """One cell: compiles, times `--rounds` rounds, reads the memory analysis."""
    federation = data.random_pixels(
        num_clients, FLAGS.train_examples, common.whole_numbers("shape"), FLAGS.num_classes, 0
    )
    model = common.build_model(federation)
    compiled, dispatch = timing.compile_rounds(
        name,
        common.method_config(name),
        federation,
        model,
        common.build_solver(model),
        common.build_plan(),
        common.cohort_size(num_clients),
        rounds_per_dispatch=1,
    )
    seconds = timing.median_seconds(dispatch, FLAGS.rounds)
    return {
        "algorithm": name,
        "num_clients": num_clients,
        "compile_seconds": compiled.compile_seconds,
        "seconds_per_round": seconds,
        "clients_per_second": common.cohort_size(num_clients) / seconds,
        "argument_bytes": compiled.memory.arguments,
        "output_bytes": compiled.memory.outputs,
        "temporary_bytes": compiled.memory.temporaries,
        "devices": compiled.plan.num_devices,
        "chunk": compiled.plan.chunk,
    }


def run() -> None:
    """The command."""
    names = list(algorithms.METHODS) if FLAGS.algorithms == ["all"] else FLAGS.algorithms
    for name in names:
        algorithms.get(name, flag="--algorithms")
    common.check_knobs(names)
    out, rows = Path(FLAGS.out), []
    table = Table(
        title=f"{FLAGS.model} on random pixels {'x'.join(FLAGS.shape)}, {FLAGS.train_examples} examples a client"
    )
    heads = ["method", "K", "compile s", "s per round", "clients/s", "arguments", "outputs", "temporaries"]
    for head in heads:
        table.add_column(head, justify="left" if head == "method" else "right")
    for name in names:
        for num_clients in common.whole_numbers("num_clients"):
            try:
                row = measure(name, num_clients)
            except RunError as error:
                print(f"{name}, K={num_clients}: left out, {error}")
                continue
            rows.append(row)
            sizes = [memory.readable(row[f"{kind}_bytes"]) for kind in ("argument", "output", "temporary")]
            cells = [name, str(num_clients), f"{row['compile_seconds']:.1f}", f"{row['seconds_per_round']:.4g}"]
            table.add_row(*cells, f"{row['clients_per_second']:.0f}", *sizes)
            print(f"{name}, K={num_clients}: {row['seconds_per_round']:.4g} s a round")
    if not rows:
        raise UsageError("--num_clients: none of the cells fits into memory")
    files.write_json(out / "scaling.json", rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_text(out / "scaling.csv", text.getvalue())
    report.save(report.scaling_figure(rows), out / "scaling.png")
    Console(width=120).print(table)
    print(f"table: {out / 'scaling.csv'}, .json; figure: {out / 'scaling.png'}")


if __name__ == "__main__":
    common.main(run, keep_compiled=False)
