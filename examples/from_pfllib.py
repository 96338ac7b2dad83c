"""Train on data that PFLlib has divided among clients: the same clients, and the same test examples.

    python examples/from_pfllib.py Cifar10

Cifar10 is the folder that PFLlib's generate_Cifar10.py wrote. If there is no such folder, this program writes a small
one in PFLlib's format, with random images of two colors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import optax

import pfljax as pfl


def write_folder(folder: Path, num_clients: int = 6, seed: int = 0) -> None:
    """Writes clients of unequal sizes as PFLlib does: a pickled dict with x and y in train/K.npz and test/K.npz."""
    rng = np.random.default_rng(seed)
    for split, examples in {"train": 12, "test": 4}.items():
        (folder / split).mkdir(parents=True)
        for client in range(num_clients):
            y = rng.integers(2, size=examples + client)
            x = rng.uniform(-1, 1, size=(len(y), 3, 16, 16))
            x[:, 0] += y[:, None, None]  # one class is redder
            content = {"x": np.clip(x, -1, 1).astype(np.float32), "y": y}
            np.savez_compressed(folder / split / f"{client}.npz", data=content)
    config = {"num_clients": num_clients, "num_classes": 2}
    (folder / "config.json").write_text(json.dumps(config))


def main(folder: Path = Path("Cifar10"), rounds: int = 20) -> pfl.Result:
    """Trains FedAvg with PFLlib's network and settings, and prints the accuracy of each client."""
    if not folder.exists():
        write_folder(folder)
    # PFLlib's images are in [-1, 1], and stay so.
    clients = pfl.data.read(folder, standardize=False)
    local = pfl.LocalTraining(optax.sgd(0.005), batch_size=10, epochs=1)
    run = pfl.Run(pfl.FedAvg(), clients, pfl.models.PFLlibCNN(), local)
    result = run.train(rounds=rounds)
    print(clients)
    print(result.per_client_accuracy)
    return result


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
