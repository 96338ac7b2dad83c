"""Bytes that a round of each method moves, from its listing: what clients receive, and what they send.

Nothing is sent twice, the number of examples n_k is one number beside a model, and a client without examples sends
nothing.
"""

from typing import Any, NamedTuple

import pytest
import toys
from by_hand import traffic

NUMBER = 4  # bytes of a number in single precision
LINEAR = 4 * NUMBER  # a linear regression on three features
KERNEL = 6 * 3 * NUMBER  # the last layer's of a network with six hidden units and three classes
BODY = (3 * 6 + 6) * NUMBER  # its first layer
HEAD = KERNEL + 3 * NUMBER
NETWORK = BODY + HEAD
CENTROIDS = 3 * 6 * NUMBER  # of three classes
# of examples and their classes, two layers of five, to four
PHI = ((3 + 3) * 5 + 5 + 5 * 5 + 5 + 5 * 4 + 4) * NUMBER
POLICY = (6 * 12 + 12 + 12 + 12) * NUMBER  # FedCP's, from six features to two weights of each
VALVE = (3 * 6 + 2 * (6 * 6 + 6 + 6 + 6)) * NUMBER  # GPFL's, with its embeddings
GAUSSIANS = (3 * 6 + 6 * 6) * NUMBER
# of `toys.Attentive`, without its projections
ATTENTIVE = (4 + 4 + 3 * 4 + 4 * 4 + 3 * 4 * 3 + 3) * NUMBER
PROJECTIONS = 3 * 4 * 4 * NUMBER
ADAPTED = (2 * 6 + 6 * 3 + 3) * NUMBER  # B of rank 2, and the head
EMPTY = (2, 0, 5, 1, 3)  # one of five clients has no examples


class Round(NamedTuple):
    """A round and its traffic.

    Attributes:
        method: The name of the method.
        down: Bytes that all clients receive.
        up: Bytes that all clients send.
        options: As of `by_hand.traffic`; four clients with a linear regression by default.
    """

    method: str
    down: float
    up: float
    options: dict[str, Any] | None = None


ROUNDS = [
    Round("fedavg", down=4 * LINEAR, up=4 * (LINEAR + NUMBER)),
    # c and the change of c_k beside the model
    Round("scaffold", down=4 * 2 * LINEAR, up=4 * (2 * LINEAR + NUMBER)),
    # h stays at the server, and g_k with its client
    Round("feddyn", down=5 * LINEAR, up=4 * (LINEAR + NUMBER), options={"sizes": EMPTY}),
    # Branches; up, each times its weight beside the weights, without n_k
    Round(
        "pfedmb",
        down=4 * 3 * LINEAR,
        up=4 * 3 * (LINEAR + NUMBER),
        options={"hyperparameters": {"branches": 3}},
    ),
    # Two others' models down, one up
    Round(
        "fedfomo", down=4 * 2 * LINEAR, up=4 * LINEAR, options={"hyperparameters": {"neighbors": 2}}
    ),
    # And three candidates of the server: two clusters' means and theirs; up, who gained how much from five models
    Round(
        "fedfomo",
        down=4 * (2 + 3) * LINEAR,
        up=4 * (LINEAR + 2 * (1 + 2 + 3) * NUMBER),
        options={"hyperparameters": {"neighbors": 2, "clusters": 2}},
    ),
    # The mean and its own leave-one-out mean beside the two others' ones
    Round(
        "fedfomo_average",
        down=4 * (2 + 2) * LINEAR,
        up=4 * LINEAR,
        options={"hyperparameters": {"neighbors": 2}},
    ),
    # lambda_k in place of n_k; a client receives only its own entry of lambda
    Round("afl", down=4 * LINEAR, up=4 * (LINEAR + NUMBER)),
    # Ten shared examples of three features and a target, once in the R = 2 rounds
    Round(
        "fedavg_data",
        down=4 * (LINEAR + 10 * (3 + 1) * NUMBER / 2),
        up=4 * (LINEAR + NUMBER),
        options={"sizes": (5, 5, 5, 5), "hyperparameters": {"share": 0.5}},
    ),
    # A model of whatever age
    Round("fedbuff", down=5 * LINEAR, up=4 * (LINEAR + NUMBER), options={"sizes": EMPTY}),
    # A mixture for each client
    Round("fedcac", down=4 * LINEAR, up=4 * (LINEAR + NUMBER)),
    # The head is common from the start
    Round("fedbabu", down=4 * BODY, up=4 * (BODY + NUMBER), options={"hidden": (6,)}),
    # Normalization stays
    Round("fedbn", down=4 * LINEAR, up=4 * (LINEAR + NUMBER), options={"model": toys.Normalized}),
    # Three components to and from each of three neighbors
    Round(
        "dfedem",
        down=4 * 3 * 3 * LINEAR,
        up=4 * 3 * 3 * LINEAR,
        options={"hyperparameters": {"graph": "complete"}},
    ),
    # The meme
    Round("fml", down=4 * NETWORK, up=4 * (NETWORK + NUMBER), options={"hidden": (6,)}),
    # A row of the precision of four tasks down
    Round("mocha", down=4 * (4 + 1) * NUMBER, up=4 * LINEAR),
    # Mean features of three classes with their counts; a client without examples sends none
    Round(
        "fedproto",
        down=5 * (CENTROIDS + 3 * NUMBER),
        up=4 * (CENTROIDS + 3 * NUMBER),
        options={"sizes": EMPTY, "hidden": (6,)},
    ),
    # Every client has a mixture of all models, and sends its own, unweighted
    Round("fedamp", down=4 * LINEAR, up=4 * LINEAR),
    Round(
        "ifca",
        down=4 * 3 * LINEAR,
        up=4 * (LINEAR + NUMBER),
        options={"hyperparameters": {"clusters": 3}},
    ),
    # All models in the round's first exchange, then the chosen one; its gradient goes back in both
    Round(
        "ifca",
        down=4 * (3 + 1) * LINEAR,
        up=4 * 2 * LINEAR,
        options={"hyperparameters": {"clusters": 3, "averaging": "gradients"}, "epochs": 2},
    ),
    Round("fedala", down=4 * LINEAR, up=4 * (LINEAR + NUMBER)),
    # The direction beside the model
    Round("mofedsam", down=4 * 2 * LINEAR, up=4 * (2 * LINEAR + NUMBER)),
    # What a client trained before stays with it
    Round("moon", down=4 * LINEAR, up=4 * (LINEAR + NUMBER)),
    # For each class the number of its examples, the sum of their features, and that of the products
    Round(
        "ccvr",
        down=5 * NETWORK,
        up=4 * (NETWORK + NUMBER + 3 * NUMBER * (1 + 6 + 6**2)),
        options={"sizes": EMPTY, "hidden": (6,)},
    ),
    Round("fedah", down=4 * NETWORK, up=4 * (NETWORK + NUMBER), options={"hidden": (6,)}),
    # The head stays
    Round("flute", down=4 * BODY, up=4 * (BODY + NUMBER), options={"hidden": (6,)}),
    # The policy beside the model: its weights, biases, gains and offsets
    Round(
        "fedcp",
        down=4 * (NETWORK + POLICY),
        up=4 * (NETWORK + POLICY + NUMBER),
        options={"hidden": (6,)},
    ),
    # The head stays; the embeddings of three classes and the valve
    Round(
        "gpfl", down=4 * (BODY + VALVE), up=4 * (BODY + VALVE + NUMBER), options={"hidden": (6,)}
    ),
    # The server has its examples, and computes the logits of what it receives
    Round(
        "perada",
        down=4 * NETWORK,
        up=4 * (NETWORK + NUMBER),
        options={"hidden": (6,), "hyperparameters": {"share": 0.3}},
    ),
    # Means of the classes, and a covariance
    Round(
        "pfedfda",
        down=4 * (BODY + GAUSSIANS),
        up=4 * (BODY + GAUSSIANS + NUMBER),
        options={"hidden": (6,)},
    ),
    # Two further kernels of the last layer, and a client's own point down
    Round(
        "floco",
        down=4 * (NETWORK + 2 * KERNEL + 3 * NUMBER),
        up=4 * (NETWORK + 2 * KERNEL + NUMBER),
        options={"hidden": (6,), "hyperparameters": {"endpoints": 3}},
    ),
    # A client gets its projections and sends their change, which a client without examples does, too
    Round(
        "fedtp",
        down=5 * (ATTENTIVE + PROJECTIONS),
        up=4 * (ATTENTIVE + NUMBER) + 5 * PROJECTIONS,
        options={"sizes": EMPTY, "hidden": (), "model": toys.Attentive},
    ),
    # A stays as it is, and with it its part of the adapters
    Round(
        "ffa_lora",
        down=4 * ADAPTED,
        up=4 * (ADAPTED + NUMBER),
        options={"hidden": (), "model": toys.adapted()},
    ),
    # d_k, a_k and n_k
    Round("fednova", down=5 * LINEAR, up=4 * (LINEAR + 2 * NUMBER), options={"sizes": EMPTY}),
    # The norm of an update is a scalar, and the second-to-last model stays at the server
    Round("fedexp", down=5 * LINEAR, up=4 * (LINEAR + NUMBER), options={"sizes": EMPTY}),
    Round("pfedgraph", down=4 * LINEAR, up=4 * (LINEAR + NUMBER)),
    # A generated model each way
    Round("pfedhn", down=4 * LINEAR, up=4 * LINEAR),
    # Three others' cores; the four shares are spread over the R = 2 rounds
    Round("apple", down=4 * (3 * LINEAR + 4 * NUMBER / 2), up=4 * LINEAR),
    # One core, and two further first copies and four shares, spread over the R = 2 rounds
    Round(
        "apple",
        down=4 * (LINEAR + (2 * LINEAR + 4 * NUMBER) / 2),
        up=4 * LINEAR,
        options={"hyperparameters": {"neighbors": 1}},
    ),
    Round("fedper", down=4 * BODY, up=4 * (BODY + NUMBER), options={"hidden": (6,)}),
    Round("fedrep", down=4 * BODY, up=4 * (BODY + NUMBER), options={"hidden": (6,)}),
    Round("lg_fedavg", down=4 * HEAD, up=4 * (HEAD + NUMBER), options={"hidden": (6,)}),
    # F_k beside the body
    Round("fedas", down=4 * BODY, up=4 * (BODY + NUMBER), options={"hidden": (6,)}),
    # The personal head stays
    Round("fedrod", down=4 * NETWORK, up=4 * (NETWORK + NUMBER), options={"hidden": (6,)}),
    # Vectors stay, and the mean of the features travels
    Round(
        "feddbe",
        down=5 * (NETWORK + 6 * NUMBER),
        up=4 * (NETWORK + NUMBER + 6 * NUMBER),
        options={"sizes": EMPTY, "hidden": (6,)},
    ),
    # Mean features of three classes, and which of them a client has, a byte each
    Round("fedgh", down=5 * HEAD, up=5 * (CENTROIDS + 3), options={"sizes": EMPTY, "hidden": (6,)}),
    # Centroids with the number of their examples; up, the means that weights are worked out from, too
    Round(
        "fedpac",
        down=4 * (NETWORK + CENTROIDS + 3 * NUMBER),
        up=4 * (NETWORK + NUMBER + CENTROIDS + 3 * NUMBER + CENTROIDS),
        options={"hidden": (6,)},
    ),
    Round(
        "fedpac",
        down=4 * (BODY + CENTROIDS + 3 * NUMBER),
        up=4 * (BODY + NUMBER + CENTROIDS + 3 * NUMBER),
        options={"hidden": (6,), "hyperparameters": {"heads": "own"}},
    ),
    # Both ways phi, a descriptor and a model; of a client without examples, there is no gradient of phi
    Round(
        "pefll",
        down=5 * (PHI + 4 * NUMBER + NETWORK),
        up=4 * PHI + 5 * (4 * NUMBER + NETWORK),
        options={
            "sizes": EMPTY,
            "hidden": (6,),
            "hyperparameters": {"hidden": 5, "layers": 1, "embedding": 4},
        },
    ),
]


@pytest.mark.parametrize("row", ROUNDS, ids=[row.method for row in ROUNDS])
def test_what_a_round_moves(row):
    assert traffic(row.method, **(row.options or {})) == (row.down, row.up)
