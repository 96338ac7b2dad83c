"""A million clients on one machine: their rows are on disk, and each round trains a cohort.

    python examples/a_million_clients.py
    python examples/a_million_clients.py 1000000

The time of a round depends on the cohort, not on the number of clients.
"""

from __future__ import annotations

import logging
import sys

import optax

import pfljax as pfl


def main(
    num_clients: int = 20_000, cohort: int = 200, rounds: int = 20, out: str = "runs/million"
) -> pfl.Result:
    """Trains FedeRiCoFriends with cohorts and scores a sample of all clients, most of which never took part."""
    clients = pfl.data.digits(num_clients, train_examples=15, replacement=True)
    run = pfl.Run(
        pfl.FedeRiCoFriends(candidates=32),
        clients,
        pfl.models.MLP(hidden=(64,)),
        pfl.LocalTraining(optax.adam(1e-2)),
        participation=cohort / num_clients,
        eval_clients=500,
        execution=pfl.Execution(client_store="disk"),
    )
    result = run.train(rounds=rounds, eval_every=rounds, out=out, resume="from_scratch")
    print(result)
    return result


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(message)s")
    main(*map(int, sys.argv[1:2]))
