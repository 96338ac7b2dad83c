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
from pfljax.models.torch_modules import has_frozen


@dataclasses.dataclass(frozen=True)
class Networks:
    """Different networks for groups of clients, in place of one model.

    What travels must have the same shapes in all of them, as prototypes do, or heads over features of one width. An
    additional model that the server averages, such as FML's, has the first network.

    Attributes:
        networks: Name of each group -> anything that `Run` accepts as a model, without frozen parts; at least two.
        clients: Name of each client's group, (K,); None: clients take the networks in turns.

    Raises:
        ArgumentError: for fewer than two networks, one with frozen parts, or an unknown name in `clients`.

    Examples:
        >>> import pfljax as pfl
        >>> networks = {"small": pfl.models.MLP((8,)), "wide": pfl.models.MLP((32,))}
        >>> pfl.models.Networks(networks, clients=["small", "small", "wide"]).names
        ('small', 'wide')
    """

    networks: Mapping[str, Any] | tuple[tuple[str, Any], ...]
    clients: Sequence[str] | None = None

    def __post_init__(self):
        pairs = self.networks.items() if isinstance(self.networks, Mapping) else self.networks
        networks = []
        for name, model in pairs:
            module = module_of(model)
            is_frozen = isinstance(model, Model) and model.frozen is not None
            if is_frozen or has_frozen(module):
                text = "accepted: networks without frozen parts, if they differ"
                raise ArgumentError("model", text, name)
            networks.append((str(name), module))
        object.__setattr__(self, "networks", tuple(networks))
        if len(self.networks) < 2:
            text = "accepted: at least two networks by name, or one module"
            raise ArgumentError("model", text, self.names)
        if self.clients is None:
            return
        object.__setattr__(self, "clients", tuple(map(str, self.clients)))
        unknown = set(self.clients or ()) - set(self.names)
        if unknown:
            text = f"accepted as clients' networks: {', '.join(self.names)}"
            raise ArgumentError("model", text, min(unknown))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups, in order."""
        return tuple(name for name, _ in self.networks)

    def __repr__(self) -> str:
        networks = ", ".join(f"{name}={module!r}" for name, module in self.networks)
        clients = "in turns"
        if self.clients:
            names = "\n".join(self.clients)
            clients = hashlib.sha256(names.encode()).hexdigest()[:8]
        return f"Networks({networks}, clients={clients})"


def modules_of(model: Any) -> Any:
    """The module of a `Model`; `Networks` of several by name; anything else as it is."""
    return Networks(model) if isinstance(model, Mapping) else module_of(model)


@dataclasses.dataclass(frozen=True)
class Groups:
    """`Networks` that are built for data.

    Attributes:
        names: Names of the groups.
        models: The network of each group.
        numbers: The group of each client, int8 (K,); None: in turns.
    """

    names: tuple[str, ...]
    models: tuple[Model, ...]
    numbers: np.ndarray | None = None

    def number_of(self, client: Array) -> Array:
        """() int32: the group of a client. Clients unseen in training take the networks in turns."""
        if self.numbers is None:
            return self.in_turns(client)
        return jnp.asarray(self.numbers)[client].astype(jnp.int32)

    def in_turns(self, client: Array) -> Array:
        """() int32: the group of a client if clients take the networks in turns."""
        return jnp.asarray(client, jnp.int32) % len(self.models)

    def clients_groups(self, num_clients: int, unseen: bool = False) -> list[str]:
        """The name of each client's group; `unseen`: of clients unseen in training."""
        numbers = self.numbers
        if unseen or numbers is None:
            numbers = np.arange(num_clients) % len(self.models)
        return [self.names[number] for number in numbers]

    def described(self, num_clients: int) -> str:
        """Each group's name, number of clients and number of parameters per model, in words."""
        counts = Counter(self.clients_groups(num_clients))
        groups = []
        for name, model in zip(self.names, self.models, strict=True):
            groups.append(f"{name}: {counts[name]} clients, {model.num_parameters:,} parameters")
        return "; ".join(groups)


def grouped(networks: Networks, models: Sequence[Model], num_clients: int) -> Groups:
    """The networks, built for data.

    Args:
        networks: The networks.
        models: What was built from each.
        num_clients: K.

    Raises:
        ArgumentError: if there is not one name per client.
    """
    numbers = None
    if networks.clients is not None:
        if len(networks.clients) != num_clients:
            text = f"accepted: the network of each of {num_clients} clients"
            raise ArgumentError("model", text, networks.clients)
        numbers = np.asarray([networks.names.index(name) for name in networks.clients], np.int8)
    return Groups(networks.names, tuple(models), numbers)
