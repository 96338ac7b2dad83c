"""FedBABU: rounds and tuning by hand."""

import jax
import networks
import pytest
import toys
from by_hand import by_hand, entry, play
from networks import BODY, HEAD, descend

OPTIONS = {"hidden": (3,), "rounds": 2, "epochs": 3}


def tuned(rounds, k, start, layers, steps):
    """Client k's model, some layers of which it has tuned."""
    return descend(start, *rounds.examples(k), rounds.rate, steps, layers)


def fedbabu(rounds):
    """Clients train the body under the head that everyone has from the start, and tune both before they predict."""
    phi = networks.row(rounds.start("server.state"), 0)[HEAD]
    theta = networks.row(rounds.start("models"), 0)[BODY]
    for _ in rounds:
        start = {BODY: theta, HEAD: phi}
        trained = [tuned(rounds, k, start, [BODY], rounds.epochs) for k in rounds.clients]
        theta = rounds.mean([params[BODY] for params in trained])
        start = {BODY: theta, HEAD: phi}
        yield {
            f"models.{BODY}": [theta],
            f"models.{HEAD}": {"kernel": None, "bias": None},
            f"server.state.{HEAD}": [phi],
            "predictions": [[tuned(rounds, k, start, [BODY, HEAD], 4)] for k in rounds.clients],
        }


def test_rounds_by_hand():
    by_hand("fedbabu", fedbabu, hyperparameters={"tune_epochs": 4}, **OPTIONS)


@pytest.mark.parametrize(
    ("part", "layers", "steps"),
    [("head", [HEAD], 4), ("body", [BODY], 4), pytest.param("all", [], 0, marks=pytest.mark.slow)],
)
def test_a_part_is_tuned_or_nothing(part, layers, steps):
    rounds = play("fedbabu", hyperparameters={"tune_epochs": 4}, **OPTIONS)
    algorithm = toys.make_algorithm("fedbabu", rounds.problem, tuned=part, tune_epochs=steps)
    state = rounds.states[-1]
    clients = rounds.federation.client_data
    found = toys.predict(algorithm, rounds.problem, jax.random.key(4), state, clients).models
    start = {BODY: entry(state, f"models.{BODY}"), HEAD: entry(state, f"server.state.{HEAD}")}
    start = networks.row(start, 0)
    for k in rounds.clients:
        own = jax.tree.map(lambda leaf, k=k: leaf[k], found)
        networks.assert_row_close(own, tuned(rounds, k, start, layers, steps))


@pytest.mark.slow
def test_the_head_stays_where_all_models_start_alike():
    federation = toys.make_federation((2, 5, 1, 3))
    problem = toys.make_problem(federation, hidden=(3,), batch_size=2)._replace(common_init=True)
    algorithm = toys.make_algorithm("fedbabu", problem)
    states, _ = toys.train(algorithm, problem, federation.client_data, 2)
    toys.assert_trees_close(states[-1].server.state[HEAD], states[0].server.state[HEAD])
