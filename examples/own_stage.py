"""Write your own stage: the server leaves out updates that are longer than most of the last round's.

    python examples/own_stage.py

With sums of updates, a server cannot leave out a round's largest ones. So it goes by the round
before: it keeps the length that a tenth of the updates exceeded, and what is longer does not count.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax

import pfljax as pfl
from pfljax.stages import LocalWork, Pipeline, Stage, StageState, lost, with_note


@dataclasses.dataclass(frozen=True)
class WithoutLargest(Stage):
    """Updates do not count that are longer than all but a share of the last round's.

    Attributes:
        share: The share that is left out.
    """

    name = "without_largest"
    share: float = 0.1

    def server_note(self, key, start, clients):
        """The length that is too long: in the first round, none is."""
        return jnp.float32(jnp.inf)

    def after_client(self, work: LocalWork, output: pfl.author.ClientOutput, note: StageState):
        # A client tells the server the length of its update.
        update = output.upload.update
        length = jnp.sqrt(pfl.author.tree.inner(update, update))
        output = with_note(output, self.name, length)
        # Nothing arrives of one that is too long.
        return lost(output, length > note.server), note.client

    def before_server(
        self, key, state: pfl.author.State, aggregate: pfl.author.Aggregate, note: StageState
    ):
        lengths = aggregate.notes[self.name]
        metrics = {"left_out": (lengths > note.server).sum()}
        too_long = jnp.quantile(lengths, 1 - self.share)
        return aggregate, note._replace(server=too_long), metrics


def without_largest(problem: pfl.author.Problem, pipeline: Pipeline) -> WithoutLargest:
    """The stage, for methods whose server averages updates."""
    if not pipeline.method.averages:
        raise pfl.ArgumentError("method", "accepted: methods whose server averages updates")
    return WithoutLargest()


def main() -> pfl.Result:
    """Trains FedAvg on digits, of whose clients some attack, with the stage."""
    clients = pfl.data.digits(num_clients=20, train_examples=15)
    run = pfl.Run(
        pfl.FedAvg(),
        clients,
        pfl.models.MLP(hidden=(32,)),
        pfl.LocalTraining(optax.adam(1e-2)),
        attack=pfl.Attack("scale", attackers=0.1),
        stages=[without_largest],
    )
    result = run.train(rounds=20)
    print(result)
    print("left out in the last round:", result.history[-1]["left_out"])
    return result


if __name__ == "__main__":
    main()
