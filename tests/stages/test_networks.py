"""Clients whose networks differ."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import pfljax as pfl
from pfljax.models import networks
from pfljax.stages.networks import Packing

LOCAL = pfl.LocalTraining(optax.adam, 0.02, batch_size=3)
METHODS = {
    "local": pfl.Local(),
    "fedproto": pfl.methods.FedProto(),
    "fml": pfl.methods.FML(),
    "fedkd": pfl.methods.FedKD(),
    "fedgh": pfl.methods.FedGH(),
    "lg_fedavg": pfl.methods.LGFedAvg(shared_layers=1),
}
WIDTHS = {"a": (5,), "b": (4, 5), "c": (7, 6, 5), "d": (9, 5)}
FOUR = {name: networks.MLP(hidden) for name, hidden in WIDTHS.items()}


def clients_of(num, sizes=(6, 3, 5, 4), seed=0):
    """Clients with 6 inputs, 3 classes and different numbers of examples."""
    return dataclasses.replace(
        toys.make_federation([sizes[k % 4] for k in range(num)], seed=seed, features=6)
    )


def trained(method, model, num=8, rounds=3, **options):
    """The result of a few rounds; further options are those of `Run` and `train`."""
    to_train = {
        name: options.pop(name)
        for name in ("out", "resume", "eval_every", "say")
        if name in options
    }
    run = pfl.Run(method, options.pop("clients", clients_of(num)), model, LOCAL, **options)
    return run.train(rounds, progress=False, **to_train)


def test_trees_of_several_shapes_are_packed_and_unpacked():
    first = {"x": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(4)}
    second = [jnp.ones((2,), bool), (jnp.arange(4.0), jnp.arange(3))]
    packing = Packing.from_shapes([first, second])
    assert packing.sizes == {"float32": 6, "int32": 3, "bool": 2}
    for number, each in enumerate((first, second)):
        packed = packing.pack(number, each)
        assert {name: leaf.shape for name, leaf in packed.items()} == {
            "float32": (6,),
            "int32": (3,),
            "bool": (2,),
        }
        assert toys.same_trees(packing.unpack(number, packed), each)
    np.testing.assert_array_equal(packing.pack(1, second)["float32"], [0, 1, 2, 3, 0, 0])
    with pytest.raises(TypeError, match="expected"):
        packing.pack(0, second)


def suites(slow):
    """The methods; all but those that are slow tests are long ones."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in slow else pytest.mark.long)
        for name in METHODS
    ]


@pytest.mark.parametrize("name", suites(slow=["lg_fedavg", "fml"]))
def test_the_same_network_twice_is_one_network(name, said):
    """LG-FedAvg's clients have a body of their own and share a head."""
    module = networks.MLP((5,))
    x = np.asarray(clients_of(1).test.x[0])
    one = trained(METHODS[name], module, 4, rounds=2)
    twice = trained(METHODS[name], {"a": module, "b": networks.MLP((5,))}, 4, rounds=2)
    np.testing.assert_allclose(twice.predict(x), one.predict(x), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(twice.results["loss_test"], one.results["loss_test"], rtol=1e-4)
    assert any("a: 2 clients, " in line and "; b: 2 clients, " in line for line in said)


@pytest.mark.slow
def test_a_client_alone_trains_as_in_a_federation_of_its_network():
    given = ["d", "a", "a", "d", "a", "d"]
    pair = {name: FOUR[name] for name in "ad"}
    mixed = trained(pfl.Local(), pfl.models.Networks(pair, clients=given), 6)
    alone = {name: trained(pfl.Local(), module, 6) for name, module in pair.items()}
    x = np.asarray(clients_of(6).test.x[0])
    for client, name in enumerate(given):
        np.testing.assert_allclose(
            mixed.predict(x, client), alone[name].predict(x, client), rtol=1e-5, atol=1e-6
        )
        module, variables = mixed.export(client)
        assert tuple(module.hidden) == WIDTHS[name]
        np.testing.assert_allclose(
            jax.nn.softmax(module.apply(variables, x)),
            mixed.predict(x, client),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.slow
def test_rows_have_the_size_of_the_largest_network(said):
    pfl.Run(pfl.Local(), clients_of(4), FOUR, pfl.LocalTraining(optax.sgd)).train(1, progress=False)

    def count(widths):
        return sum(a * b + b for a, b in itertools.pairwise(widths))

    parameters = {name: count((6, *hidden, 3)) for name, hidden in WIDTHS.items()}
    report = "; ".join(
        f"{name}: 1 clients, {number} parameters" for name, number in parameters.items()
    )
    assert any(report in line for line in said)
    largest = max(parameters.values())
    assert any(line.split() == ["models", f"{4 * 4 * largest / 1024:.1f}", "KiB"] for line in said)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedproto", "fml"])
def test_four_networks_on_twenty_clients_are_the_same_everywhere(name, tmp_path):
    method = METHODS[name]
    clients = clients_of(20)
    options = {"clients": clients, "participation": 0.5, "rounds": 4}
    whole = trained(method, FOUR, **options)
    scores = whole.results["loss_test"]
    assert np.isfinite(scores).all() and (scores[-1] != scores[0]).mean() > 0.5
    for execution in (
        pfl.Execution(plan="vmap"),
        pfl.Execution(plan="chunk", chunk=3, devices=1),
        pfl.Execution(client_store="host"),
        pfl.Execution(client_store="disk"),
        pfl.Execution(plan="python", devices=1),
    ):
        other = trained(method, FOUR, execution=execution, **options)
        losses = other.results["loss_test"]  # plan=python leaves the initial models out
        np.testing.assert_allclose(
            losses, scores[-len(losses) :], rtol=1e-3, atol=1e-5, err_msg=str(execution)
        )
    trained(method, FOUR, out=tmp_path / "run", **options | {"rounds": 2})
    resumed = trained(method, FOUR, out=tmp_path / "run", resume=True, **options)
    assert toys.same_trees(resumed.state, whole.state)
    assert "networks" in dict(map(tuple, resumed.summary["plan"]))
    assert [row["network"] for row in resumed.summary["per_client"]] == 5 * [name for name in FOUR]
    assert "parameters" in resumed.write_report().read_text()
    loaded = pfl.load(tmp_path / "run", clients=clients)
    x = np.asarray(clients.test.x[0])
    np.testing.assert_array_equal(loaded.predict(x), resumed.predict(x))


@pytest.mark.parametrize("name", suites(slow=["fedproto"]))
def test_newcomers_and_fine_tuning_work_with_networks_that_differ(name):
    result = trained(METHODS[name], FOUR, unseen=clients_of(4, seed=1), fine_tune_epochs=1)
    assert np.isfinite(result.summary["unseen"]["loss"])
    assert np.isfinite(result.results["loss_test"]).all()


class Tracked(nn.Module):
    """A network with batch statistics and dropout."""

    outputs: int | None = None

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7)(nn.Dense(5)(x))
        return nn.Dense(self.outputs)(nn.Dropout(0.1, deterministic=not train)(nn.relu(x)))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        pytest.param(
            name,
            first,
            marks=pytest.mark.slow if (name, first) == ("fml", True) else pytest.mark.long,
        )
        for name in ("local", "fedproto", "fml")
        for first in (True, False)
    ],
)
def test_one_of_the_networks_may_have_batch_statistics_and_dropout(name, first):
    both = [("own", Tracked()), ("mlp", networks.MLP((4, 5)))]
    result = trained(METHODS[name], dict(both if first else both[::-1]), 4)
    assert np.isfinite(result.results["loss_test"]).all()
    if name != "fedproto":  # which predicts with prototypes
        _, variables = result.export(int(not first))
        assert np.abs(variables["batch_stats"]["BatchNorm_0"]["mean"]).max() > 0


@pytest.mark.parametrize(
    ("method", "model", "text"),
    [
        (pfl.FedAvg(), FOUR, "other shapes in some of a, b, c, d"),
        (
            pfl.methods.FedProto(),
            {"a": networks.MLP((4,)), "b": networks.MLP((5,))},
            "other shapes in some of a, b",
        ),
        (pfl.FedeRiCo(), FOUR, "receive each other's models"),
        (pfl.Local(), {"a": FOUR["a"]}, "at least two networks"),
    ],
)
def test_what_cannot_be_shared_is_refused(method, model, text):
    with pytest.raises(pfl.ArgumentError, match=text):
        trained(method, model, 4)


def test_clients_of_unknown_networks_are_refused():
    with pytest.raises(pfl.ArgumentError, match="accepted as clients' networks: a, b, c, d"):
        pfl.models.Networks(FOUR, clients=["a", "e"])
    with pytest.raises(pfl.ArgumentError, match="the network of each of 4 clients"):
        trained(pfl.Local(), pfl.models.Networks(FOUR, clients=["a"] * 3), 4)
