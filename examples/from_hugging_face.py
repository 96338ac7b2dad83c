"""Train on a data set of Hugging Face's Hub by its name, or on a folder that `datasets` saved.

    python examples/from_hugging_face.py uoft-cs/cifar10
    python examples/from_hugging_face.py

Without a name, this program saves scikit-learn's handwritten digits as a folder of `datasets`, with images, named
classes and official test images, and reads that. Needs `pip install 'pfljax[hf]'`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import optax

import pfljax as pfl

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def save_digits(folder: Path) -> None:
    """Saves 1,797 images of 8 x 8 gray pixels as `datasets.load_dataset` would return them."""
    import datasets
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = [Image.fromarray(pixels) for pixels in (digits.images * 15).astype("uint8")]
    columns = {"image": images, "label": digits.target.tolist()}
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    )
    whole = datasets.Dataset.from_dict(columns, features=features)
    whole.train_test_split(test_size=0.25, seed=0).save_to_disk(folder)


def main(name: str = "", rounds: int = 60, num_clients: int = 10) -> pfl.Table:
    """Compares three methods on clients with their own mixes of classes (Dirichlet, alpha 0.3)."""
    partition = pfl.partitions.Dirichlet(alpha=0.3)
    with tempfile.TemporaryDirectory() as temporary:
        if not name:
            folder = Path(temporary) / "digits"
            save_digits(folder)
            name = str(folder)
        clients = pfl.data.huggingface(name, num_clients, partition, official_test=True)

    print(clients)
    methods = [pfl.Local(), pfl.FedAvg(), pfl.Ditto()]
    model = pfl.models.MLP(hidden=(64,))
    local = pfl.LocalTraining(optax.adam(1e-2), batch_size=20)
    table = pfl.compare(methods, clients, model, local, rounds=rounds, reference="local")
    print(table)
    return table


if __name__ == "__main__":
    main(*sys.argv[1:])
