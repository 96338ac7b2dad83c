"""FedeRiCo's Figure 1 (left): noisy points of a sine curve, personal models and one global model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pfljax import api
from pfljax.cli import build
from pfljax.cli.settings import Settings
from pfljax.folder import files

GRID = 400  # number of points per curve


def write(settings: Settings, clients: build.Clients, result: api.Result, out: Path) -> None:
    """Writes curve.npz: the training points, the curve, each client's prediction on its interval, and FedAvg's.

    For methods other than FedAvg, trains FedAvg on the same data in out/fedavg-RATE for comparison.
    """
    federation = clients[0]
    name = settings.method
    train = federation.train
    own_interval = np.asarray(federation.group)
    real = np.arange(train.y.shape[1]) < train.size[:, None]
    grid = np.linspace(-1, 1, GRID, dtype=np.float32)
    num_intervals = int(own_interval.max()) + 1
    interval = np.minimum((grid + 1) / 2 * num_intervals, num_intervals - 1).astype(int)
    predicted = result.predict(grid[:, None])
    arrays = {
        "x": np.pi * (train.x[real][:, 0] + 1),  # the angle in [0, 2 pi] was mapped to [-1, 1]
        "y": train.y[real],
        "client": np.nonzero(real)[0],
        "grid": np.pi * (grid + 1),
        "truth": np.sin(np.pi * (grid + 1)),
        "prediction": np.where(interval == own_interval[:, None], predicted, np.nan),
    }
    if name != "fedavg":
        reference = best_fedavg(settings, clients, out)
        arrays |= {"reference": reference.predict(grid[:, None])[0], "reference_name": "FedAvg"}
        mine = result.loss
        theirs = reference.loss
        print(
            f"mean squared error on test points: {name} {mine:.4f}, FedAvg {theirs:.4f} ({mine / theirs:.2f} x)"
        )
    files.write_npz(out / "curve.npz", arrays)


def best_fedavg(settings: Settings, clients: build.Clients, out: Path) -> api.Result:
    """Trains FedAvg on the same data at the run's rate and a tenth of it. Returns the result with the lower loss."""
    results = []
    for rate in (settings.learning_rate, settings.learning_rate / 10):
        folder = out / f"fedavg-{rate:g}"
        trial = build.Trial(settings.seed, settings.split)
        run = build.build_run(
            settings.pinned(learning_rate=rate), "fedavg", (clients[0], None), trial
        )
        every = {"eval_every": settings.eval_every, "checkpoint_every": settings.checkpoint_every}
        results.append(
            run.train(settings.rounds, out=folder, resume=folder.exists(), progress=False, **every)
        )
    return min(results, key=lambda result: result.summary["last"]["train_loss"])
