"""What the engine keeps for every method: clients' optimizers of shared models, and batch statistics."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import staged
import toys
from toys import ADAPTERS, METHODS, VARIED

SIZES = (5, 1, 3, 4)
# All that these clients train is their own, with an optimizer in their row or at the model's owner.
OWN_OPTIMIZERS = {
    "apple",
    "fedamp",
    "fedcac",
    "federico",
    "federico_centralized",
    "federico_friends",
    "fedgh",
    "fedproto",
    "l2sgd",
    "local",
    "mocha",
    "pfedgraph",
}


def only_once():
    """SGD whose state has an array like each parameter, and which moves a parameter only in its first step."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None, **extra):
        moved = jax.tree.map(
            lambda gradient, done: jnp.where(done == 0, -0.1 * gradient, 0), updates, state
        )
        return moved, jax.tree.map(jnp.ones_like, state)

    return optax.GradientTransformationExtraArgs(init, update)


@toys.each_method(fast=("fedavg_plus",), slow=VARIED)
def test_optimizers_of_shared_models_last_if_the_run_says_so(name):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(
        federation, only_once(), batch_size=2, rounds=2, **toys.network(name)
    )
    problem = problem._replace(keep_optimizer=True)
    algorithm = toys.make_algorithm(name, problem)
    algorithm = staged.staged(problem, algorithm, federation)
    states, _ = toys.train(algorithm, problem, federation.client_data, 2)
    notes = states[-1].rows.notes
    assert ("optimizers" in notes) == (name not in OWN_OPTIMIZERS)
    if name in OWN_OPTIMIZERS:
        return

    kept = notes["optimizers"]
    assert np.asarray(kept.started).all()
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(kept.state))  # of a step taken


class Normalized(nn.Module):
    """A hidden layer with batch statistics."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(5)(x.reshape(x.shape[0], -1))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7)(x)
        return nn.Dense(self.num_classes)(nn.relu(x))


def statistics_after_a_round(name, optimizer):
    """All batch statistics in the state after a round, of models that the optimizer does not move."""
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optimizer, batch_size=2, rounds=1, model=Normalized)
    algorithm = toys.make_algorithm(name, problem)
    states, _ = toys.train(algorithm, problem, federation.client_data, 1)

    def found(state):
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in leaves
            if "batch_stats" in jax.tree_util.keystr(path)
        }

    return found(states[0]), found(states[1])


@toys.each_method(
    [name for name in METHODS if name not in ADAPTERS and name != "fedtp"],
    fast=("fedper",),
    slow=VARIED,
)
def test_batch_statistics_are_no_parameters(name):
    # No norm of gradients, no decay and no rate reaches them: they are what forward passes write.
    still = optax.sgd(0.0)
    clipped = optax.chain(optax.clip_by_global_norm(1e-30), optax.sgd(1.0))
    first, expected = statistics_after_a_round(name, still)
    _, found = statistics_after_a_round(name, clipped)
    assert expected.keys() == found.keys()
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], rtol=1e-5, atol=1e-6, err_msg=path)
    variances = [values for path, values in found.items() if "'var'" in path]
    assert all((values >= 0).all() for values in variances)
    if expected:
        assert any(not np.array_equal(first[path], expected[path]) for path in expected)
