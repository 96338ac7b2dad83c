"""A study of six hospitals, from a CSV file to the tables of a paper, with AUROC as the score.

    python examples/hospital_study.py

The hospitals have 30 to 2,000 patients. The table has numbers, words and missing values, and a column
that says who is a test patient. On the command line, the same study is

    pfljax compare --dataset=csv --data_file=patients.csv --data_label=died --data_client=hospital \
      --data_test=is_test --data_categorical=ward --fill=mean --validation_fraction=0.25 --splits=0 \
      --methods=local,fedavg,ditto,fedper --model=mlp --hidden=16 --optimizer=sgd --batch_size=32 \
      --tune=0.03,0.1,0.3 --score=auroc --rounds=30 --seeds=0,1,2,3,4 --reference=local --out=runs/hospitals

Tables are read by pyarrow: `pip install 'pfljax[tables]'`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import optax

import pfljax as pfl

PATIENTS = {"Ash": 30, "Birch": 75, "Cedar": 160, "Elm": 400, "Fir": 900, "Oak": 2000}


def write_patients(path: Path, seed: int = 0) -> None:
    """Writes a table of patients. In half of the hospitals, a high marker is a bad sign; in the others a good one."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["hospital", "age", "ward", "marker", "pressure", "is_test", "died"])
        for number, (hospital, count) in enumerate(PATIENTS.items()):
            age = rng.normal(62, 14, count).round()
            marker = rng.normal(0, 1, count).round(3)
            pressure = rng.normal(120, 18, count).round(1)
            emergency = rng.random(count) < 0.4
            sign = 1 if number % 2 else -1
            logit = -2.6 + 0.05 * (age - 62) + 1.5 * sign * marker + 0.8 * emergency
            died = rng.random(count) < 1 / (1 + np.exp(-logit))
            for patient in range(count):
                is_missing = rng.random() < 0.05
                writer.writerow(
                    [
                        hospital,
                        int(age[patient]),
                        "emergency" if emergency[patient] else "planned",
                        marker[patient],
                        "" if is_missing else pressure[patient],
                        int(rng.random() < 0.3),
                        "yes" if died[patient] else "no",
                    ]
                )


def study(
    table: Path,
    out: Path,
    rounds: int = 30,
    seeds: range = range(5),
    rates: tuple = (0.03, 0.1, 0.3),
) -> pfl.Table:
    """Compares four tuned methods and writes tables by method and by hospital, and a figure."""
    columns = {"label": "died", "client": "hospital", "test": "is_test", "categorical": "ward"}
    # A quarter of the training examples chooses the learning rates.
    clients = pfl.data.read(table, **columns, fill="mean", validation_fraction=0.25)
    model = pfl.models.MLP(hidden=(16,))
    local = pfl.LocalTraining(optax.sgd, 0.1, batch_size=32)
    methods = ["local", "fedavg", "ditto", "fedper"]
    trials = {"rounds": rounds, "seeds": seeds, "tune": rates}
    # Writes table.tex, by_client.tex, report.html and more.
    results = pfl.compare(
        methods, clients, model, local, **trials, score="auroc", reference="local", out=out
    )
    results.save_figures(out / "figures")
    return results


def main(folder: str = "runs/hospital-study") -> pfl.Table:
    """Writes the file, trains, and prints the tables."""
    out = Path(folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    table = out.parent / "patients.csv"
    write_patients(table)
    results = study(table, out)
    print(results)
    print(results.by_client())
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
