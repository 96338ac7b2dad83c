"""Let clients have different networks, which share class prototypes, heads or a small model of their own.

    python examples/different_networks.py
    pfljax train --model=examples/different_networks.py:NETWORKS --method=fedproto

Clients take the networks in turns. `pfl.models.Networks(NETWORKS, clients=[...])` gives each client's network by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import optax

import pfljax as pfl

# Their last hidden layers are equally wide, so that features can be compared and heads be shared.
NETWORKS = {
    "small": pfl.models.MLP((32,)),
    "wide": pfl.models.MLP((128, 32)),
    "deep": pfl.models.MLP((64, 64, 32)),
    "deeper": pfl.models.MLP((64, 64, 64, 32)),
}
METHODS = [
    pfl.Local(),
    pfl.methods.FedProto(),
    pfl.methods.FedGH(),
    pfl.methods.FML(),
    pfl.methods.LGFedAvg(shared_layers=1),
]


def main(rounds: int = 60, seeds: Sequence[int] = (0, 1, 2)) -> pfl.Table:
    """Compares methods on digits, and exports one client's network."""

    def clients(seed):
        return pfl.data.digits(20, pfl.partitions.LabelGroups(2), train_examples=15, seed=seed)

    local = pfl.LocalTraining(optax.sgd, 0.1, batch_size=5)
    table = pfl.compare(
        METHODS, clients, NETWORKS, local, rounds=rounds, seeds=seeds, reference="local"
    )
    print(table)
    result = pfl.Run(pfl.methods.FML(), clients(0), NETWORKS, local).train(rounds=5, progress=False)
    network, variables = result.export(client=2)
    print(
        network,
        sum(leaf.size for layer in variables["params"].values() for leaf in layer.values()),
        "parameters",
    )
    return table


if __name__ == "__main__":
    main()
