"""A Flower grid in one process: real messages and contexts, real apps, no network."""

import contextlib
import itertools


class LocalGrid:
    """Hands messages to a `ClientApp`, each node with a context of its own.

    Attributes:
        contexts: Node -> its context.
        gone: Nodes that do not answer.
    """

    def __init__(self, client_app, node_configs, run_id=1):
        from flwr.app import Context, RecordDict

        identify(run_id)
        self.client_app = client_app
        self.numbers = itertools.count(1)
        self.run_id = run_id
        self.gone = set()
        self.seen = []
        self.contexts = {}
        for node, config in enumerate(node_configs, start=100):
            self.contexts[node] = Context(
                run_id=run_id, node_id=node, node_config=config, state=RecordDict(), run_config={}
            )

    def get_node_ids(self):
        return [node for node in self.contexts if node not in self.gone]

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"message {next(self.numbers)}"
            self.seen.append((node, message))
            if node not in self.gone:
                reply = self.client_app(message, self.contexts[node])
                replies.append(reply)
        return replies


def identify(run_id):
    """Says which task this process is, as newer versions of Flower want to know before a message is made."""
    with contextlib.suppress(ImportError):
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = 1
        TaskIdentity.run_id = run_id
        TaskIdentity.node_id = 1
