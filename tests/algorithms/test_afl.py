"""AFL's traffic."""

import toys
from quadratics import SIZES


def test_a_client_reads_one_weight():
    federation, model = toys.make_federation(SIZES, "regression"), 4 * 4
    problem = toys.make_problem(federation)
    (record,) = toys.train(toys.make_algorithm("afl", problem), problem, federation.client_data, 1)[1]
    assert record.down == 4 * model and record.up == 4 * (model + 4)
