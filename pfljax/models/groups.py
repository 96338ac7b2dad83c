"""Networks that differ between groups of clients."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array
from pfljax.models.model import Model, module_of


@dataclasses.dataclass(frozen=True)
class Networks:
    """Different networks for groups of clients, in place of one model.

    What travels must have the same shapes in all of them, as prototypes do, or heads over features of one width. A
    model that a server averages beside clients' own, such as FML's, has the first network.

    Attributes:
        networks: Name of each group -> anything that `Run` accepts as a model, without frozen parts; at least two.
        clients: Name of each client's group, (K,); None: clients take the networks in turns.
    """

    networks: Mapping[str, Any] | tuple[tuple[str, Any], ...]
    clients: Sequence[str] | None = None

    def __post_init__(self):
        pairs = self.networks.items() if isinstance(self.networks, Mapping) else self.networks
        if frozen := [
            name for name, model in pairs if isinstance(model, Model) and model.frozen is not None
        ]:
            raise ArgumentError(
                "model", "accepted: networks without frozen parts, if they differ", frozen[0]
            )
        object.__setattr__(
            self, "networks", tuple((str(name), module_of(model)) for name, model in pairs)
        )
        if len(self.networks) < 2:
            raise ArgumentError(
                "model", "accepted: at least two networks by name, or one module", self.names
            )
        if self.clients is not None:
            object.__setattr__(self, "clients", tuple(map(str, self.clients)))
            if unknown := set(self.clients or ()) - set(self.names):
                raise ArgumentError(
                    "model", f"accepted as clients' networks: {', '.join(self.names)}", min(unknown)
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups, in order."""
        return tuple(name for name, _ in self.networks)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={module!r}" for name, module in self.networks)
        digest = hashlib.sha256("\n".join(self.clients or ()).encode()).hexdigest()[:8]
        return f"Networks({given}, clients={digest if self.clients else 'in turns'})"


def modules_of(model: Any) -> Any:
    """The module of a `Model`; `Networks` of several by name; anything else as it is."""
    return Networks(model) if isinstance(model, Mapping) else module_of(model)


@dataclasses.dataclass(frozen=True)
class Groups:
    """`Networks` that are built for data.

    Attributes:
        names: Names of the groups.
        models: The network of each group.
        given: The group of each client, int8 (K,); None: in turns.
    """

    names: tuple[str, ...]
    models: tuple[Model, ...]
    given: np.ndarray | None = None

    def number_of(self, client: Array) -> Array:
        """() int32: the group of a client. Clients unseen in training take the networks in turns."""
        if self.given is None:
            return self.in_turns(client)
        return jnp.asarray(self.given)[client].astype(jnp.int32)

    def in_turns(self, client: Array) -> Array:
        """() int32: the group of a client if clients take the networks in turns."""
        return jnp.asarray(client, jnp.int32) % len(self.models)

    def of_clients(self, num_clients: int, unseen: bool = False) -> list[str]:
        """The name of each client's group; `unseen`: of clients unseen in training."""
        in_turns = np.arange(num_clients) % len(self.models)
        found = in_turns if unseen or self.given is None else self.given
        return [self.names[number] for number in found]

    def described(self, num_clients: int) -> str:
        """Each group's name, number of clients and number of parameters per model, in words."""
        counts = Counter(self.of_clients(num_clients))
        told = zip(self.names, self.models, strict=True)
        return "; ".join(
            f"{name}: {counts[name]} clients, {model.num_parameters:,} parameters"
            for name, model in told
        )


def grouped(networks: Networks, models: Sequence[Model], num_clients: int) -> Groups:
    """The networks, built for data.

    Args:
        networks: The networks as given.
        models: What was built from each.
        num_clients: K.

    Raises:
        ArgumentError: if there is not one name per client.
    """
    given = None
    if networks.clients is not None:
        if len(networks.clients) != num_clients:
            raise ArgumentError(
                "model", f"accepted: the network of each of {num_clients} clients", networks.clients
            )
        given = np.asarray([networks.names.index(name) for name in networks.clients], np.int8)
    return Groups(networks.names, tuple(models), given)
