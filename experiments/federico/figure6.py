"""FedeRiCo's Figure 6: test accuracy over rounds for values of epsilon, the number of neighbors M, and beta.

    python -m experiments.federico.figure6
    python -m experiments.federico.figure6 --data_file=CIFAR100.npz --preset=cifar100

The paper varies epsilon and beta on Office-Home and M on CIFAR-100, and its panel for beta shows client 0. Here all
three panels are means over the clients, on the run's data.
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from experiments.figures import hyperparameter_curves
from experiments.papers import Row, Study
from pfljax import report
from pfljax.cli import launch, tables
from pfljax.cli.settings import Settings
from pfljax.folder import files
from pfljax.report.run_data import over_rounds

VARIED = {
    "epsilon": (0.0, 0.1, 0.3, 0.6, 1.0),
    "neighbors": (0, 1, 3, 5, 7),
    "beta": (0.1, 0.3, 0.6, 0.9),
}


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["federico"], "runs/federico-figure6")


def curve(study: Study, row: Row) -> dict:
    """A line of a panel: the last round's scores, and accuracy over rounds, averaged over trials."""
    hyperparameters = {
        name: value for name, value in row.flags.items() if value != study.settings[name]
    }
    out = study.out / (row.folder if hyperparameters else "default")  # shared by all panels
    cell = paper.accuracies(study, row, out)
    read = [files.read_jsonl(out / trial.folder / "metrics.jsonl") for trial in study.trials]
    rounds, curves = over_rounds(read, "accuracy")
    return {"title": row.title, "rounds": rounds, "curve": curves.mean(axis=0).tolist(), **cell}


def run(settings: Settings) -> None:
    """The command."""
    paper.refuse_methods(settings, "federico")
    for hyperparameter in VARIED:
        settings.refuse(f"federico.{hyperparameter}", "the figure varies it")
    study = paper.start(settings)
    study.check()
    panels = {}
    body = []
    for hyperparameter, values in VARIED.items():
        panels[hyperparameter] = []
        for value in values:
            if hyperparameter == "neighbors" and not value < study.settings.num_clients:
                continue
            panels[hyperparameter].append(
                curve(
                    study,
                    Row(
                        f"{hyperparameter}={value:g}",
                        "federico",
                        {f"federico.{hyperparameter}": value},
                    ),
                )
            )
            body.append([hyperparameter, f"{value:g}", study.shown(panels[hyperparameter][-1])])
            print(f"{hyperparameter}={value:g} done")
    report.save(hyperparameter_curves(panels), study.out / "figure6.png")
    rows = [
        line | {"panel": hyperparameter, "paper": None}
        for hyperparameter, lines in panels.items()
        for line in lines
    ]
    title = f"{study.data}, {study.settings.partition_groups} groups, after {study.settings.rounds} rounds"
    tables.write(
        title, ["hyperparameter", "value", "test accuracy, %"], body, rows, study.out, "figure6.png"
    )
    study.print_differences(Row("federico", "federico", {}), rows[-1])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
