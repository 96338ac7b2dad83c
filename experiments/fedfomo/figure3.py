"""FedFomo's Figure 3: accuracy over local epochs, by epsilon and by the number of models that a client weighs.

    python -m experiments.fedfomo.figure3
    python -m experiments.fedfomo.figure3 --data_file=CIFAR10.npz --seeds=0,1,2

The models include the client's own, as in the paper's n = 5 and n = 10. Writes figure3.png, and the last points as
table.md, .csv and .json. The paper draws its curves, over 100 epochs on CIFAR-10, without numbers.
"""

from __future__ import annotations

from absl import flags

from experiments.fedfomo import paper
from experiments.figures import hyperparameter_curves
from experiments.papers import Row, Study
from pfljax import report
from pfljax.cli import launch, tables
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["fedfomo"], ["0", "1", "2"], "runs/fedfomo-figure3")
    add = Group(RUNS, registry)
    add.several(
        "epsilons",
        ["0", "0.1", "0.3", "0.5", "1"],
        "probabilities of exploring, left",
        float,
        empty=True,
        at_least=0,
    )
    add.several(
        "downloads",
        ["1", "2", "5", "10"],
        "numbers of models, own included, right",
        int,
        empty=True,
    )


def run(settings: Settings) -> None:
    """The command."""
    paper.refuse_others(settings)
    epsilons = settings.numbers("epsilons", float, sets="fedfomo.epsilon")
    downloads = settings.numbers("downloads", int, sets="fedfomo.neighbors")
    varied = {
        "epsilon": [(value, {"fedfomo.epsilon": value}) for value in epsilons],
        "models": [(value, {"fedfomo.neighbors": value - 1}) for value in downloads],
    }
    if not epsilons and not downloads:
        raise FlagError(
            "--epsilons= and --downloads=: nothing to draw; accepted: values in at least one"
        )
    study = Study.start(paper.PAPER, settings)
    panels = {}
    body = []
    study.check()
    for hyperparameter, values in varied.items():
        for value, own in values:
            line = study.curve(
                Row(f"{value:g}", "fedfomo", own), study.out / f"{hyperparameter}-{value:g}"
            )
            panels.setdefault(hyperparameter, []).append(
                line | {"panel": hyperparameter, "value": value, "paper": None}
            )
            body.append([hyperparameter, f"{value:g}", study.shown(line)])
            print(f"{hyperparameter} {value:g} done")
    titles = {
        "epsilon": "epsilon in the first round",
        "models": "models weighed, the client's own included",
    }
    named = {titles[hyperparameter]: lines for hyperparameter, lines in panels.items()}
    report.save(hyperparameter_curves(named, "epochs"), study.out / "figure3.png")
    lines = [line for lines in panels.values() for line in lines]
    heads = ["hyperparameter", "value", "test accuracy, %"]
    tables.write(paper.last_round(study), heads, body, lines, study.out, "figure3.png")
    study.print_differences(Row("fedfomo", "fedfomo", {}), lines[0])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
