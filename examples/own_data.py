"""Use your own arrays: make a federation from NumPy arrays, train a method, and get one client's predictions.

    python examples/own_data.py

Twelve sensors measure the same two kinds of events, each with its own gain.
"""

from __future__ import annotations

import numpy as np
import optax

import pfljax as pfl


def measurements(
    num_sensors: int = 12, events: int = 60, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns events x (n, 8), their kinds y (n,) and the names of the sensors that measured them (n,)."""
    rng = np.random.default_rng(seed)
    sensor = np.repeat(np.arange(num_sensors), events)
    kind = rng.integers(2, size=len(sensor))
    gain = np.where(sensor % 2 == 0, 1.0, -1.0)  # half of the sensors are mounted upside down
    x = rng.normal(size=(len(sensor), 8)) + (gain * (2.0 * kind - 1))[:, None] * np.linspace(
        0, 1, 8
    )
    return x.astype(np.float32), kind, np.array([f"sensor-{number:02d}" for number in sensor])


def main() -> pfl.Result:
    """Trains FedeRiCoFriends on the sensors and prints the result."""
    x, y, sensor = measurements()
    clients = pfl.Federation.from_arrays(x, y, client=sensor, train_examples=20)
    model = pfl.models.MLP(hidden=(16,))
    run = pfl.Run(
        pfl.FedeRiCoFriends(neighbors=2), clients, model, pfl.LocalTraining(optax.adam(1e-2))
    )
    result = run.train(rounds=60)
    print(result)
    print("client 0 on its first two events:", result.predict(x[:2], client=0).round(3))
    return result


if __name__ == "__main__":
    main()
