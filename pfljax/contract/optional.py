"""Importing packages that pfljax does not install by default."""

from __future__ import annotations

import importlib
from typing import Any

from pfljax.contract.errors import ArgumentError

EXTRA_OF = {  # package -> the extra that installs it
    "cvxpy": "mixing",
    "jax_privacy": "privacy",
    "pandas": "pandas",
    "submitit": "cluster",
    "tensorboardX": "tensorboard",
    "tensorflow_datasets": "tfds",
}


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
        text = f"needs {package.replace('_', '-')}: pip install 'pfljax[{EXTRA_OF[package]}]'"
        raise ArgumentError(argument, text, value) from error
