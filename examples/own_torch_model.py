"""Use your own PyTorch network and data set as they are; needs `pip install 'pfljax[torch]'`.

python examples/own_torch_model.py
pfljax train --model=examples/own_torch_model.py:Network --method=fedem
"""

from __future__ import annotations

import numpy as np
import optax
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pfljax as pfl


class Network(nn.Module):
    """A small network for images (batch, 1, 8, 8), with batch normalization and dropout."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16 * 4 * 4, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(len(x), 1, 8, 8)
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.head(self.drop(x.flatten(1)))


def data_sets(num_clients: int) -> list[TensorDataset]:
    """scikit-learn's digits; each client has five classes of ten."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(y)
    rng = np.random.default_rng(0)
    sets = []
    for client in range(num_clients):
        classes = torch.arange(5) + 5 * (client % 2)
        rows = torch.isin(y, classes).nonzero().flatten()
        rows = rows[rng.choice(len(rows), 80, replace=False)]
        sets.append(TensorDataset(x[rows], y[rows]))
    return sets


def accuracy_in_torch(result: pfl.Result, client: int) -> float:
    """Loads a client's model into the PyTorch module, and returns its accuracy on the client's test examples."""
    _, state = result.export(client=client)
    network = Network()
    network.load_state_dict(state)
    x, y = result.clients.examples(client)
    with torch.no_grad():
        predicted = network.eval()(torch.from_numpy(x)).argmax(dim=1)
    return float(np.mean(predicted.numpy() == y))


def main() -> pfl.Result:
    """Trains Ditto, and prints each client's accuracy, here and in PyTorch."""
    clients = pfl.Federation.from_arrays(data_sets(6), standardize=False, num_classes=10)
    local = pfl.LocalTraining(optax.sgd(0.05, momentum=0.9), batch_size=16)
    result = pfl.Run(pfl.Ditto(), clients, Network, local).train(rounds=20)

    for client, accuracy in enumerate(result.per_client_accuracy):
        in_torch = accuracy_in_torch(result, client)
        print(f"client {client}: accuracy {accuracy:.3f}, in PyTorch {in_torch:.3f}")
    print(result)
    return result


if __name__ == "__main__":
    main()
