"""What peers in PyTorch share: their imports, dense layers between Flax and PyTorch, the network, and its accuracy."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import torch
import torch.utils.data
from torch import nn

from experiments.parity.shared import BATCH, CLASSES, HIDDEN, Task
from pfljax.contract.types import Params

Loader = torch.utils.data.DataLoader


def in_order(*arguments: Any, shuffle: bool = False, **options: Any) -> Loader:
    """Takes the place of `DataLoader`, without shuffling."""
    return Loader(*arguments, **options)


@contextlib.contextmanager
def at_home(folder: Path, absent: Sequence[str] = ()) -> Iterator[None]:
    """Runs a checkout's code: its modules can be imported, its loaders do not shuffle, and it leaves no traces.

    It prints to nowhere, and its files go to a temporary folder. What it imports stays: a process has one peer.

    Args:
        folder: Where its modules import each other from.
        absent: Packages that it imports for what the comparison does not use, such as logging.
    """
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    for name in absent:
        sys.modules.setdefault(name, mock.MagicMock())
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of old forms of calls
        enter(contextlib.chdir(enter(tempfile.TemporaryDirectory())))
        nowhere = io.StringIO()
        enter(contextlib.redirect_stdout(nowhere))
        enter(contextlib.redirect_stderr(nowhere))
        enter(mock.patch.object(torch.utils.data, "DataLoader", in_order))
        yield


def stand_in(name: str, **contents: Any) -> None:
    """Puts a module with these names in the place of a peer's module."""
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


def converted(parameters: Iterable[torch.Tensor], first: int = 0) -> Params:
    """Dense layers' weights and biases in turn, named as in a Flax MLP, from layer `first` on."""
    found = [tensor.detach().numpy().copy() for tensor in parameters]
    layers = zip(found[::2], found[1::2], strict=True)
    return {
        f"Dense_{number}": {"kernel": w.T, "bias": b} for number, (w, b) in enumerate(layers, first)
    }


def stacked(modules: Iterable[nn.Module], first: int = 0) -> Params:
    """Several modules' dense layers, with a leading axis."""
    return jax.tree.map(
        lambda *leaves: np.stack(leaves), *[converted(each.parameters(), first) for each in modules]
    )


def load(module: nn.Module, params: Params) -> None:
    """Sets a module's dense layers to a Flax MLP's parameters."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for number, layer in enumerate(layers):
            layer.weight.copy_(torch.from_numpy(params[f"Dense_{number}"]["kernel"].T.copy()))
            layer.bias.copy_(torch.from_numpy(params[f"Dense_{number}"]["bias"]))


class TwoLayers(nn.Module):
    """The MLP: a body and a head.

    Args:
        start: Its parameters.
        body: The peer's name of the body.
        head: The peer's name of the head.
        outputs: (features, logits) -> what it returns.
        attributes: Further attributes that the peer reads.
    """

    def __init__(
        self,
        start: Params,
        body: str = "base",
        head: str = "head",
        outputs: Callable[..., Any] = lambda features, logits: logits,
        **attributes: Any,
    ):
        super().__init__()
        width = start["Dense_0"]["kernel"].shape[0]
        self.add_module(body, nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU()))
        self.add_module(head, nn.Linear(HIDDEN, CLASSES))
        self.outputs = outputs
        for name, value in attributes.items():
            setattr(self, name, value)
        load(self, start)

    @property
    def parts(self) -> list[nn.Module]:
        """The body and the head."""
        return list(self.children())

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        body, head = self.children()
        features = body(x)
        return self.outputs(features, head(features), **options)


def bodies(networks: Iterable[TwoLayers]) -> Params:
    """The networks' bodies, with a leading axis."""
    return stacked(network.parts[0] for network in networks)


def heads(networks: Iterable[TwoLayers]) -> Params:
    """The networks' heads, with a leading axis."""
    return stacked((network.parts[1] for network in networks), first=1)


def accuracy(task: Task, networks: Iterable[TwoLayers]) -> float:
    """Share of all clients' test examples that their networks predict correctly."""
    right = []
    for number, network in enumerate(networks):
        x, y = task.arrays(number)["test"]
        body, head = network.children()
        with torch.no_grad():
            right.append(head(body(torch.from_numpy(x))).argmax(dim=1).numpy() == y)
    return float(np.concatenate(right).mean())


def examples(task: Task, split: str, client: int) -> torch.utils.data.TensorDataset:
    """A client's examples."""
    x, y = task.arrays(client)[split]
    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def loaders(task: Task, split: str) -> list[Loader]:
    """The clients' mini-batches, in order."""
    return [
        Loader(examples(task, split, client), BATCH) for client in range(task.clients.num_clients)
    ]


def united(task: Task, split: str) -> tuple[torch.utils.data.ConcatDataset, dict[int, np.ndarray]]:
    """All clients' examples as one data set, and the numbers of each client's."""
    parts = [examples(task, split, client) for client in range(task.clients.num_clients)]
    ends = np.cumsum([len(part) for part in parts])
    numbers = {client: np.arange(end - len(parts[client]), end) for client, end in enumerate(ends)}
    return torch.utils.data.ConcatDataset(parts), numbers
