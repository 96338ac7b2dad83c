"""Weights that nobody trained stay as they are, to the last bit, whatever lies between clients and server.

An input that is always 0 has weights without a gradient. n theta - n theta is not exactly 0 once compiled, so that a
rule that reads signs, or a server that divides by lengths, would move them as far as trained ones.
"""

import numpy as np
import pytest
import toys
from quadratics import OPTIMIZER
from staged import staged

from pfljax.stages.attacks import Attack
from pfljax.stages.compression import Compression
from pfljax.stages.server import Server

pytestmark = pytest.mark.slow

SIZES = (3, 5, 2, 7, 1)
ATTACKER = np.array([False, False, True, False, False])
SERVERS = [
    ("fedavgm", {}),
    ("fedadam", {"tau": 1e-12}),
    ("fedadam", {"server_optimizer": "adagrad", "tau": 1e-12}),
    ("fedexp", {"predict": "last"}),
]


def named(stage):
    """What a stage does, if it is one."""
    kind = {Server: "aggregator", Compression: "upload", Attack: "kind"}.get(type(stage))
    return (
        f"{getattr(stage, kind)}{'' if getattr(stage, 'error_feedback', True) else ' alone'}"
        if kind
        else None
    )


def blind_federation():
    """Five clients of uneven sizes, none of whose examples has the second feature."""
    federation = toys.make_federation(SIZES)
    federation.train.x[..., 1] = 0
    return federation


FEDERATION = blind_federation()
PROBLEM = toys.make_problem(FEDERATION, OPTIMIZER)


def weights(models):
    """(3, C) those of the features."""
    return np.asarray(models["Dense_0"]["kernel"])[0]


def with_stage(plain, stage):
    """The method with a server's rule, or compressed messages."""
    name = "server" if isinstance(stage, Server) else "compression"
    return staged(PROBLEM, plain, FEDERATION, **{name: stage})


def check_untouched(algorithm, clients=FEDERATION.client_data, rounds=3):
    """The weights of the second feature are the initial ones; the others have moved."""
    states, _ = toys.train(algorithm, PROBLEM, clients, rounds)
    begun, last = (weights(states[number].models) for number in (0, -1))
    np.testing.assert_array_equal(last[1], begun[1])
    assert (last[[0, 2]] != begun[[0, 2]]).any()


@pytest.mark.parametrize(
    "stage",
    [
        Compression("sign"),
        Compression("sign", error_feedback=False),
        Compression("quantize:8"),
        Compression("topk:0.5"),
        Compression("lowrank:1"),
        *(
            Server(aggregator=rule)
            for rule in ("sign_majority", "mean", "median", "flame", "geometric_median", "dnc")
        ),
    ],
    ids=named,
)
def test_under_rules_and_compression(stage):
    """Sign rules: weights that nobody trained moved by 0.087 under sign_majority and by 0.0044 under compress=sign."""
    plain = toys.make_algorithm("fedavg", PROBLEM)
    check_untouched(with_stage(plain, stage))


@pytest.mark.parametrize(
    "stage", [Server(aggregator="sign_majority"), Compression("sign")], ids=named
)
@pytest.mark.parametrize("name", ["scaffold", "fedprox", "fednova", "feddyn", "fedper"])
def test_of_methods_that_average(name, stage):
    plain = toys.make_algorithm(
        name, PROBLEM, **({"personal_layers": 0} if name == "fedper" else {})
    )
    check_untouched(with_stage(plain, stage))


@pytest.mark.parametrize(
    "attack", [Attack(kind) for kind in ("sign_flip", "scale", "free_ride", "ipm")], ids=named
)
@pytest.mark.parametrize("rule", ["mean", "sign_majority"])
def test_under_attacks(attack, rule):
    plain = toys.make_algorithm("fedavg", PROBLEM)
    served = staged(PROBLEM, plain, FEDERATION, attack=attack, server=Server(aggregator=rule))
    check_untouched(served, FEDERATION.client_data._replace(attacker=ATTACKER))


@pytest.mark.parametrize(
    ("name", "hyperparameters"),
    SERVERS,
    ids=["fedavgm", "fedadam", "fedadagrad", "fedexp"],
)
def test_under_a_server_s_optimizer(name, hyperparameters):
    """Adam divides a weight's mean update by its length: what is only rounding would move as far as the others."""
    check_untouched(toys.make_algorithm(name, PROBLEM, **hyperparameters))
