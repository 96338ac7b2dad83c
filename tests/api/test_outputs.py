"""What comes out of runs, as users have reported it: scores, losses and predictions, each worked out by hand."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import roc_auc_score

import pfljax as pfl
from pfljax.folder import files

RNG = np.random.default_rng(0)


def uneven(**options):
    """Four clients of 12 to 200 examples, whose classes are numbered differently."""
    client = np.repeat(np.arange(4), [12, 30, 60, 200])
    y = RNG.integers(0, 3, len(client))
    x = RNG.normal(size=(len(client), 5)) + np.eye(5)[(y + client) % 5] * 1.5
    return pfl.Federation.from_arrays(x.astype(np.float32), y, client=client, **options)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(pfl.APFL(), marks=pytest.mark.slow),
        *[
            pytest.param(method, marks=pytest.mark.long)
            for method in (
                pfl.Ditto(),
                pfl.methods.FedEM(components=2),
                pfl.PFedMe(),
                pfl.methods.FedRoD(),
                pfl.methods.FedFomo(),
            )
        ],
    ],
    ids=lambda method: type(method).__name__,
)
def test_the_reported_accuracy_is_that_of_the_personal_model_on_the_client_s_own_examples(method):
    """By hand from `predict`: accuracy is the sum of correct over the sum of n_k, accuracy_mean the plain mean."""
    clients = uneven(validation_fraction=0.2)
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=10)
    result = pfl.Run(method, clients, pfl.models.MLP((8,)), local).train(rounds=4, progress=False)
    right = []
    for k in range(4):
        x, y = clients.examples(k)
        right.append(result.predict(x, client=k).argmax(axis=1) == y)
    assert result.accuracy == pytest.approx(np.concatenate(right).mean(), abs=1e-6)
    assert result.history[-1]["accuracy_mean"] == pytest.approx(
        np.mean([each.mean() for each in right]), abs=1e-6
    )
    np.testing.assert_allclose(
        result.per_client_accuracy, [each.mean() for each in right], atol=1e-6
    )


class Label(nn.Module):
    """A network whose logit is the input."""

    @nn.compact
    def __call__(self, x):
        return x * self.param("w", nn.initializers.ones, (1,))


class TwoClasses(nn.Module):
    """A network whose logits are the input and 0."""

    @nn.compact
    def __call__(self, x):
        return jnp.concatenate([x * self.param("w", nn.initializers.ones, (1,)), 0 * x], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("z", [18.0, pytest.param(30.0, marks=pytest.mark.long), 100.0])
@pytest.mark.parametrize("network", [Label(), TwoClasses()], ids=["label", "class"])
def test_the_test_loss_of_confident_wrong_predictions(network, z):
    """softplus(z) by hand; it was 87.3 where float32 probabilities have become 0."""
    labels = isinstance(network, Label)
    y = np.zeros((12, 1), bool) if labels else np.ones(12, int)
    options = {} if labels else {"num_classes": 2}
    clients = pfl.Federation.from_arrays(
        np.full((12, 1), z), y, client=np.arange(12) % 2, standardize=False, **options
    )
    local = pfl.LocalTraining(optax.sgd(1e-12))
    result = pfl.Run(pfl.FedAvg(), clients, network, local).train(rounds=1, progress=False)
    assert result.loss == pytest.approx(np.logaddexp(0, z), rel=1e-5)


class Squeezed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x).squeeze()


@pytest.mark.slow
def test_a_network_that_squeezes_trains_with_mini_batches_of_one():
    x = RNG.normal(size=(60, 4)).astype(np.float32)
    clients = pfl.Federation.from_arrays(
        x, 2 * x[:, 0], client=np.arange(60) // 15, standardize=False
    )
    local = pfl.LocalTraining(optax.sgd(0.02), batch_size=1)
    result = pfl.Run(pfl.FedAvg(), clients, Squeezed(), local).train(rounds=16, progress=False)
    assert result.loss < 0.1 and result.predict(x[:1], client=0).shape == (1,)


@pytest.mark.slow
def test_a_metric_of_clients_whose_test_examples_have_one_class():
    """The built-in one is NaN there and left out of the mean; a user's own that fails is one line."""
    y = np.arange(120) % 2
    client = np.arange(120) // 30
    y[client == 3] = 0
    x = RNG.normal(size=(120, 3)) + y[:, None]
    clients = pfl.Federation.from_arrays(x, y, client=client)
    network = pfl.models.MLP(hidden=())
    local = pfl.LocalTraining(optax.sgd(0.1))
    result = pfl.Run(pfl.FedAvg(), clients, network, local, metrics=["auroc"]).train(
        rounds=2, progress=False
    )
    expected = []
    for k in range(3):
        own, target = clients.examples(k)
        expected.append(roc_auc_score(target, result.predict(own, client=k)[:, 1]))
    np.testing.assert_allclose(result.results["auroc_test"][-1], [*expected, np.nan], atol=1e-5)
    assert result.history[-1]["auroc"] == pytest.approx(np.mean(expected))

    def own_auroc(outputs, y):
        if len(np.unique(y)) < 2:
            raise ValueError("Only one class present in y_true")
        return roc_auc_score(y, outputs[:, 1])

    run = pfl.Run(pfl.FedAvg(), clients, network, local, metrics={"mine": own_auroc})
    with pytest.raises(
        pfl.ArgumentError, match=r"^metrics=mine: .*ValueError: Only one class present"
    ):
        run.train(rounds=1, progress=False)


class Line(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, use_bias=False)(x)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, pytest.param(None, marks=pytest.mark.long)])
def test_a_loss_of_one_s_own_does_not_broadcast_outputs_against_targets(columns):
    """Outputs (B, 1) minus targets (B,) would be (B, B), whose least squares have the weight 0; right is 2."""
    x = RNG.normal(size=(60, 1)).astype(np.float32)
    y = 2 * x if columns else 2 * x[:, 0]
    clients = pfl.Federation.from_arrays(x, y, client=np.arange(60) % 3, standardize=False)

    def squares(outputs, targets):
        return jnp.square(outputs - targets).reshape(outputs.shape[0], -1).mean(axis=-1)

    local = pfl.LocalTraining(optax.sgd(0.2), loss=squares)
    result = pfl.Run(pfl.FedAvg(), clients, Line(), local).train(rounds=30, progress=False)
    assert np.ravel(result.predict(np.ones((1, 1)), client=0)) == pytest.approx(2, abs=0.05)


@pytest.mark.slow
def test_the_table_of_a_regression_names_its_score_and_its_direction(tmp_path):
    """accuracy_mean held losses."""
    x = RNG.normal(size=(60, 2))
    clients = pfl.Federation.from_arrays(x, x[:, 0], client=np.arange(60) % 3)
    options = {"rounds": 1, "seeds": [0], "out": tmp_path}
    table = pfl.compare([pfl.Local(), pfl.FedAvg()], clients, pfl.models.MLP(hidden=()), **options)
    for row in table.rows:
        assert row["score"] == "loss" and "accuracy_mean" not in row
        assert row["score_mean"] == pytest.approx(row["seeds"][0]["loss"])
    assert (table.score, table.higher_is_better) == ("loss", False)
    assert table.to_pandas(by="method").higher_is_better.tolist() == [False, False]
    assert str(table).count("lower is better") == 1
    assert "lower is better" in (tmp_path / "report.html").read_text()
    summary = files.read_json(tmp_path / "fedavg" / "seed-0" / "summary.json")
    assert (summary["score"], summary["higher_is_better"]) == ("loss", False)


@pytest.mark.slow
def test_replicates_have_the_scaling_of_their_own_data():
    x = RNG.normal(size=(40, 3)) * 5
    y = np.arange(40) % 2
    federations = [
        pfl.Federation.from_arrays(each, y, client=np.arange(40) % 4) for each in (x, 10 * x + 3)
    ]
    local = pfl.LocalTraining(optax.sgd(0.1))

    def make(clients):
        return pfl.Run(pfl.Local(), clients, pfl.models.MLP(hidden=()), local)

    together = pfl.train_replicates([make(clients) for clients in federations], 2)
    for result, clients in zip(together, federations, strict=True):
        alone = make(clients).train(rounds=2, progress=False)
        own, _ = clients.examples(1)
        np.testing.assert_allclose(
            result.predict(own, client=1), alone.predict(own, client=1), rtol=1e-5
        )
