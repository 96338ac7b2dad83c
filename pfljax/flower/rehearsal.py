"""Both apps in one process: Flower's messages and contexts, without a network."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pfljax.contract import optional

FIRST_NODE = 100


def rehearse(
    client_app: Any,
    server_app: Any,
    nodes: Sequence[Mapping[str, Any]],
    *,
    run_config: Mapping[str, Any] | None = None,
    before: Callable[[LocalGrid, Any], None] | None = None,
) -> LocalGrid:
    """Plays a run's two apps in this process, message by message, before they go to machines of their own.

    Args:
        client_app: What `client_app` returned.
        server_app: What `server_app` returned.
        nodes: The configuration of each node.
        run_config: The app's run configuration.
        before: (grid, message), called before each message; a test may take nodes away or bring them back.

    Returns:
        The grid, with the nodes' contexts.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=3, train_examples=8)
        >>> run = pfl.Run(pfl.Ditto(), clients, pfl.models.MLP(hidden=(4,)))
        >>> nodes = [{"partition-id": number} for number in range(3)]
        >>> outcomes = []
        >>> client_app = pfl.flower.client_app(run)  # doctest: +SKIP
        >>> server_app = pfl.flower.server_app(run, rounds=2, finished=outcomes.append)  # doctest: +SKIP
        >>> grid = pfl.flower.rehearse(client_app, server_app, nodes)  # doctest: +SKIP
        >>> outcomes[0].history[-1]["round"]  # doctest: +SKIP
        2
    """
    records = optional.load("flwr.app", "flower")
    grid = LocalGrid(client_app, nodes, before)
    context = records.Context(
        run_id=grid.run_id,
        node_id=0,
        node_config={},
        state=records.RecordDict(),
        run_config=dict(run_config or {}),
    )
    server_app(grid, context)
    return grid


class LocalGrid:
    """Hands a server's messages to nodes in this process.

    Attributes:
        contexts: Node -> its context, which has what the node remembers.
        gone: Nodes that are not connected.
        messages: All messages so far.
    """

    def __init__(
        self,
        client_app: Any,
        nodes: Sequence[Mapping[str, Any]],
        before: Callable[[LocalGrid, Any], None] | None = None,
        run_id: int = 1,
    ):
        self.client_app = client_app
        self.before = before
        self.run_id = run_id
        self.numbers = itertools.count(1)
        self.gone: set[int] = set()
        self.messages: list[Any] = []
        self.contexts: dict[int, Any] = {}
        identify(run_id)
        for config in nodes:
            self.connect(config)

    def connect(self, config: Mapping[str, Any]) -> int:
        """Adds a node; returns its number."""
        records = optional.load("flwr.app", "flower")
        node = FIRST_NODE + len(self.contexts)
        self.contexts[node] = records.Context(
            run_id=self.run_id,
            node_id=node,
            node_config=dict(config),
            state=records.RecordDict(),
            run_config={},
        )
        return node

    def get_node_ids(self) -> list[int]:
        """The nodes that are connected."""
        return [node for node in self.contexts if node not in self.gone]

    def send_and_receive(
        self, messages: Iterable[Any], *, timeout: float | None = None
    ) -> list[Any]:
        """The replies of the nodes that are connected."""
        del timeout
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            with contextlib.suppress(AttributeError, ValueError):
                message.metadata.message_id = f"message {next(self.numbers)}"
            self.messages.append(message)
            if self.before is not None:
                self.before(self, message)
            if node not in self.gone:
                replies.append(self.client_app(message, self.contexts[node]))
        return replies


def identify(run_id: int) -> None:
    """Tells newer versions of Flower which task this process is; they ask when a message is made."""
    with contextlib.suppress(ImportError):
        from flwr.supercore.task_identity import TaskIdentity  # pyright: ignore

        TaskIdentity.task_id = 1
        TaskIdentity.run_id = run_id
        TaskIdentity.node_id = 1
