"""Importing packages that pfljax does not install by default."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

from pfljax.contract.errors import ArgumentError

EXTRA_OF = {  # package -> the extra that installs it
    "PIL": "images",
    "cvxpy": "mixing",
    "datasets": "hf",
    "flatbuffers": "device",
    "flwr": "flower",
    "dp_accounting": "privacy",
    "grain": "arrayrecord",
    "h5py": "hdf5",
    "jax_cuda12_plugin": "gpu-target",
    "jax_privacy": "privacy",
    "libtpu": "tpu-target",
    "mlflow": "mlflow",
    "pandas": "pandas",
    "pyarrow": "tables",
    "safetensors": "weights",
    "submitit": "cluster",
    "tensorboardX": "tensorboard",
    "tensorflow_datasets": "tfds",
    "torch": "torch",
    "torchax": "torch",
    "wandb": "wandb",
}

NAME_OF = {"PIL": "Pillow"}  # package -> what installs it, if it has another name


@contextlib.contextmanager
def quiet(level: int = logging.ERROR) -> Iterator[None]:
    """Silences what libraries log with absl below a level. Errors are still raised."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def load(name: str, argument: str, value: object = None) -> Any:
    """Imports and returns a module of an optional package.

    Args:
        name: The module's name, starting with a package in `EXTRA_OF`.
        argument: The argument that needs the package.
        value: The argument's value, or None if it is not informative.

    Raises:
        ArgumentError: if the package is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        text = f"needs {NAME_OF.get(package, package.replace('_', '-'))}: pip install 'pfljax[{EXTRA_OF[package]}]'"
        raise ArgumentError(argument, text, value) from error
