"""The left picture of FedeRiCo's Figure 1: noisy points of a sine curve, personal models and one global model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from absl import flags

from experiments import common
from pfljax.evaluation import metrics as evaluation
from pfljax.training import files, loop

FLAGS = flags.FLAGS
GRID = 400  # points at which curves are drawn


def write(setup: loop.Setup, result: loop.Result, out: Path, seed: int) -> None:
    """Writes curve.npz: the training points, the curve, every client's prediction on its interval, and FedAvg's.

    For any method but FedAvg itself it trains FedAvg on the same data, in out/fedavg-RATE, for comparison.
    """
    federation = setup.federation
    train = federation.train
    real = np.arange(train.y.shape[1]) < train.size[:, None]
    client = np.nonzero(real)[0]
    # x is the angle mapped to [-1, 1]; back to [0, 2 pi].
    angle = np.pi * (train.x[real][:, 0] + 1)
    grid = np.linspace(-1, 1, GRID, dtype=np.float32)
    predicted = np.asarray(_predict(setup, result, grid))
    num_intervals = int(federation.distribution.max()) + 1
    interval = np.minimum((grid + 1) / 2 * num_intervals, num_intervals - 1).astype(int)
    arrays = {
        "x": angle,
        "y": train.y[real],
        "client": client,
        "grid": np.pi * (grid + 1),
        "truth": np.sin(np.pi * (grid + 1)),
        "prediction": np.where(interval == federation.distribution[:, None], predicted, np.nan),
    }
    if setup.name != "fedavg":
        reference = best_fedavg(setup, out)
        arrays |= {"reference": np.asarray(_predict(setup, reference, grid))[0], "reference_name": "FedAvg"}
        mine, theirs = result.summary["last"]["loss"], reference.summary["last"]["loss"]
        print(
            f"mean squared error on test points: {setup.name} {mine:.4f}, FedAvg {theirs:.4f} ({mine / theirs:.2f} x)"
        )
    files.write_npz(out / "curve.npz", arrays)


def best_fedavg(setup: loop.Setup, out: Path) -> loop.Result:
    """FedAvg on the same data, at the better (by training loss) of the run's rate and a tenth of it."""
    results = []
    chosen = FLAGS.learning_rate
    for rate in (chosen, chosen / 10):
        FLAGS.learning_rate = rate
        make = common.maker("fedavg", setup.model, setup.federation)
        flags_used = setup.config["flags"] | {"algorithm": "fedavg", "learning_rate": rate}
        config = setup.config | {"flags": flags_used}
        other = dataclasses.replace(setup, name="fedavg", make=make, unseen=None, config=config)
        folder = out / f"fedavg-{rate:g}"
        results.append(loop.run(other, folder, resume=folder.exists(), say=lambda line: None))
    FLAGS.learning_rate = chosen
    return min(results, key=lambda result: result.summary["last"]["train_loss"])


def _predict(setup: loop.Setup, result: loop.Result, grid: np.ndarray) -> np.ndarray:
    return evaluation.predictions(result.plan, setup.model, result.predictor(), grid[:, None])
