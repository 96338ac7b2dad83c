"""Score clients by your own metric, beside one that is known by name, and stop when the validation score is best.

    python examples/own_metric.py
    pfljax compare --methods=local,fedavg --metrics=f1,examples/own_metric.py:worst_recall --patience=20

A metric is computed for each client, from its own examples; tables have the mean over the clients. If low values are
good, pass `pfl.metrics.metric(function, higher_is_better=False)`.
"""

from __future__ import annotations

import numpy as np
import optax

import pfljax as pfl


def worst_recall(outputs: np.ndarray, y: np.ndarray) -> float:
    """The recall of a client's worst class, from probabilities (n, C) and classes (n,) of its examples."""
    right = outputs.argmax(axis=-1) == y
    return min(right[y == each].mean() for each in np.unique(y))


def main() -> pfl.Table:
    """Compares two methods on digits by both metrics and prints the table."""
    clients = pfl.data.digits(num_clients=8, train_examples=20, validation_fraction=0.25)
    local = pfl.LocalTraining(optax.adam(1e-2))
    table = pfl.compare(
        [pfl.Local(), pfl.FedAvg()],
        clients,
        pfl.models.MLP(hidden=(32,)),
        local,
        rounds=100,
        metrics={"f1": "f1", "worst_recall": worst_recall},
        stop=pfl.patience(20),
    )
    print(table)
    return table


if __name__ == "__main__":
    main()
