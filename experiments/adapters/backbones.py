"""Backbones for `experiments.adapters.table`: a small ViT of CIFAR-100's images, a decoder of half of a play's roles.

    python -m experiments.adapters.backbones vit --data_file=CIFAR100.npz
    python -m experiments.adapters.backbones decoder --data_file=PLAY.txt

Each is trained as a single client's model and written to the cache folder as NAME.safetensors, with its recipe and its
test accuracy in NAME.json. A backbone whose file is there is not trained again.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax

import pfljax as pfl
from pfljax.contract.host import cache_folder
from pfljax.data.sources import plays
from pfljax.folder import files

STRIDE = 80  # characters between the starts of a play's windows
WINDOWS = 20  # a role with fewer windows is left out


class Recipe(NamedTuple):
    """How a backbone is trained, with AdamW and a cosine schedule.

    Attributes:
        model: The network.
        clients: File -> its data, all at one client.
        epochs: Number of passes over the data; the rate rises in the first tenth of them.
        rate: Largest learning rate.
        batch_size: B.
        augment: As in `LocalTraining`.
    """

    model: Any
    clients: Callable[[Path], pfl.Federation]
    epochs: int
    rate: float
    batch_size: int
    augment: str


def images(file: Path) -> pfl.Federation:
    """All images, a tenth of them for testing."""
    found = files.read_npz(file)
    client = np.zeros(len(found["y"]), np.int32)
    return pfl.Federation.from_arrays(found["x"], found["y"], client, test_fraction=0.1)


def roles(
    file: Path, half: int, *, together: bool = False, most: int | None = None, **options: Any
) -> pfl.Federation:
    """Every other role of a play as a client, or all of them as one.

    Args:
        file: The play.
        half: 0 or 1, which roles.
        together: Whether all roles are one client.
        most: Number of roles, those with most text; None: all with at least `WINDOWS` windows.
        **options: As in `Federation.from_arrays`.
    """
    source = plays.text(str(file), stride=STRIDE)
    sizes = np.bincount(source.client)
    kept = np.flatnonzero(sizes >= WINDOWS)[half::2]
    kept = kept if most is None else kept[np.argsort(-sizes[kept], kind="stable")[:most]]
    rows = np.isin(source.client, kept)
    client = (
        np.zeros(rows.sum(), np.int32)
        if together
        else np.array(source.client_names)[source.client[rows]]
    )
    x, y = (np.asarray(part[rows], np.int32) for part in (source.x, source.y))
    options |= {"is_test": source.is_test[rows], "num_classes": source.num_classes}
    return pfl.Federation.from_arrays(x, y, client, **options)


RECIPES = {
    "vit": Recipe(pfl.models.ViT(width=64, depth=4, heads=4), images, 60, 1e-3, 100, "crop_flip"),
    "decoder": Recipe(
        pfl.models.Transformer(width=64, depth=3, heads=4, length=80),
        lambda file: roles(file, 0, together=True),
        15,
        2e-3,
        50,
        "none",
    ),
}


def backbone(name: str, data_file: Path) -> Path:
    """The file of a backbone, which is trained if it is not there."""
    recipe = RECIPES[name]
    file = cache_folder() / "backbones" / f"{name}.safetensors"
    if file.exists():
        return file
    clients = recipe.clients(data_file)
    steps = recipe.epochs * -(-int(clients.train.size[0]) // recipe.batch_size)
    rate = optax.warmup_cosine_decay_schedule(0.0, recipe.rate, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.05))
    local = pfl.LocalTraining(
        optimizer, batch_size=recipe.batch_size, augment=recipe.augment, keep_optimizer=True
    )
    run = pfl.Run(pfl.Local(), clients, recipe.model, local)
    result = run.train(rounds=recipe.epochs, eval_every=5)
    told = {
        "data": clients.name,
        "examples": int(clients.train.size[0]),
        "model": repr(recipe.model),
    }
    told |= {
        "epochs": recipe.epochs,
        "rate": recipe.rate,
        "batch_size": recipe.batch_size,
        "augment": recipe.augment,
    }
    files.write_json(file.with_suffix(".json"), told | {"test_accuracy": result.accuracy})
    result.save_model(file, client=0)
    return file


def main() -> None:
    """The command."""
    logging.basicConfig(level="INFO", format="%(message)s")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--data_file", type=Path, required=True)
    args = parser.parse_args()
    print(backbone(args.name, args.data_file))


if __name__ == "__main__":
    main()
