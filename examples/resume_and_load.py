"""Resume a run, load it later, and export a client's model as plain Flax.

python examples/resume_and_load.py
"""

from __future__ import annotations

import numpy as np
import optax

import pfljax as pfl


def main(out: str = "runs/resumed", rounds: int = 40) -> pfl.Result:
    """Trains in two parts, reads the run from its folder, and applies client 3's model without pfljax."""
    clients = pfl.data.digits(8, train_examples=20)
    model = pfl.models.MLP(hidden=(32,))
    local = pfl.LocalTraining(optax.sgd, 0.3)

    def make():
        return pfl.Run(pfl.Ditto(), clients, model, local, seed=0)

    make().train(rounds=rounds // 2, out=out, resume="from_scratch")
    make().train(rounds=rounds, out=out, resume=True)  # the same figures as in one go, bit for bit
    result = pfl.load(out)
    print(result)
    module, variables = result.export(client=3)
    x, _ = clients.examples(3)
    logits = np.asarray(module.apply(variables, x))
    assert (logits.argmax(axis=-1) == result.predict(x, client=3).argmax(axis=-1)).all()
    return result


if __name__ == "__main__":
    main()
