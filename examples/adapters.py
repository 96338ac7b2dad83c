"""Train LoRA adapters of a frozen network: one backbone for all clients, a small personal part for each.

    python examples/adapters.py

The backbone is trained here, on digits that no client has; use
`pfl.models.weights.Saved("weights.safetensors")` for yours.
"""

from __future__ import annotations

import optax

import pfljax as pfl

GROUPS = pfl.partitions.LabelGroups(groups=2)
VIT = pfl.models.ViT(patch=4, width=24, depth=1, heads=2)


def backbone(rounds: int):
    """Parameters of a small ViT, trained as a single client's model."""
    alone = pfl.data.digits(1, pfl.partitions.IID(), seed=1, train_examples=400)
    run = pfl.Run(pfl.Local(), alone, VIT, pfl.LocalTraining(optax.adam(3e-3), batch_size=20))
    return run.train(rounds=rounds).export(client=0)[1]


def main(rounds: int = 40) -> pfl.Table:
    """Compares methods that train and send adapters and the head only."""
    lora = pfl.adapters.lora(rank=2, where="attention|mlp")
    model = pfl.Model(VIT, frozen=backbone(rounds // 2), trainable=[lora, "head"])
    clients = pfl.data.digits(8, GROUPS, train_examples=20)
    local = pfl.LocalTraining(optax.adam(1e-2), batch_size=10)
    methods = [pfl.Local(), pfl.methods.FedIT(), pfl.methods.FedSALoRA(), pfl.FedeRiCoFriends()]
    table = pfl.compare(
        methods, clients, model, local, rounds=rounds, seeds=(0, 1), reference="local"
    )
    print(table)
    return table


if __name__ == "__main__":
    main()
