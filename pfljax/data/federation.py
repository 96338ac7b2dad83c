"""All clients' data on the host."""

from __future__ import annotations

import dataclasses

import numpy as np

from pfljax.core.types import ClientData, Split, Task


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """All clients' data on the host, and what is known about it.

    Attributes:
        train: Stacked training splits, K clients.
        validation: Stacked validation splits (n_max may be 0).
        test: Stacked test splits; only evaluation reads them.
        distribution: (K,) int32, the true distribution of each client: for colors and reports, never for training.
        task: "classification" or "regression".
        num_classes: Classes C; 1 for a regression.
        name: Data set and partition, for titles.
        target: (K,) int32, the distribution of each client's validation and test data; None: as `distribution`.
        own: The clients whose x and y are on this process; None: all. Everything else is of all clients.
        index_digest: A fingerprint of who has which examples, known without their content.
    """

    train: Split
    validation: Split
    test: Split
    distribution: np.ndarray
    task: Task
    num_classes: int
    name: str
    target: np.ndarray | None = None
    own: slice | None = None
    index_digest: str = ""

    @property
    def num_clients(self) -> int:
        return int(self.train.size.shape[0])

    @property
    def client_data(self) -> ClientData:
        """What methods may see: everything but the test data."""
        return ClientData(self.train, self.validation)

    def __repr__(self) -> str:
        kind = "regression" if self.task == "regression" else f"{self.num_classes} classes"
        parts = ((int(getattr(self, part).size.sum()), part) for part in ("train", "validation", "test"))
        counts = ", ".join(f"{count:,} {part}" for count, part in parts if count)
        return f"<{self.name}: {self.num_clients:,} clients, {kind}, x {self.train.x.shape[2:]}; {counts}>"
