"""Built-in sources: digits, sine, and the synthetic data of FedEM with the published ones."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from pfljax import data
from pfljax.data import sources
from pfljax.data.sources import builtin, source


def test_digits_are_images_in_the_unit_interval():
    source = sources.digits()
    assert source.x.shape == (1797, 8, 8, 1) and source.x.dtype == np.float32
    assert source.x.min() == 0 and source.x.max() == 1
    assert (
        source.y.dtype == np.int32 and source.num_classes == 10 and source.task == "classification"
    )
    assert source.client is None and source.is_test is None


def test_sine_gives_each_client_its_interval():
    source = sources.sine(8)
    assert source.x.shape == (8 * builtin.SINE_EXAMPLES, 1) and source.task == "regression"
    np.testing.assert_array_equal(np.floor((source.x[:, 0] + 1) * 4), source.client)
    noise = source.y - np.sin(np.pi * (source.x[:, 0] + 1))
    assert 0.5 * builtin.SINE_NOISE < noise.std() < 1.5 * builtin.SINE_NOISE
    np.testing.assert_array_equal(source.group, np.arange(8))


@pytest.mark.parametrize("load", [sources.digits, sources.sine])
def test_fraction_is_a_subsample_decided_by_the_seed(load):
    whole, part, same, other = (
        load(fraction=fraction, seed=seed)
        for fraction, seed in ((1, 3), (0.25, 3), (0.25, 3), (0.25, 4))
    )
    assert len(part.y) == round(len(whole.y) / 4)
    np.testing.assert_array_equal(part.x, same.x)
    assert not np.array_equal(part.x, other.x)
    rows = {row.tobytes() for row in whole.x}
    assert all(row.tobytes() in rows for row in part.x)


MIXTURE = {"num_clients": 12, "test_examples": 2000}


@pytest.fixture(scope="module")
def mixture():
    return sources.synthetic(**MIXTURE)


def test_synthetic_sizes_are_as_published(mixture):
    many = sources.synthetic(200, test_examples=3)
    assert (
        many.x.shape == (len(many.y), 150)
        and many.x.dtype == np.float32
        and many.y.dtype == np.int32
    )
    assert many.num_classes == 2 and many.task == "classification" and many.name == "synthetic"
    train = np.bincount(many.client[~many.is_test])
    # 50 + e^4 = 105
    assert train.min() >= 50 and train.max() == 1000 and 80 < np.median(train) < 140
    np.testing.assert_array_equal(np.bincount(many.client[many.is_test]), 3)
    np.testing.assert_array_equal(np.bincount(mixture.client[mixture.is_test]), 2000)
    one = sources.synthetic(1)
    assert one.is_test.sum() == builtin.SYNTHETIC_TEST == 5000
    assert mixture.x.min() < -0.999 and mixture.x.max() > 0.999 and abs(mixture.x.mean()) < 0.01
    assert 0.45 < mixture.y.mean() < 0.55


def test_synthetic_labels_are_a_mixture_of_linear_rules_in_the_clients_shares(mixture):
    rng = source.generator(0, "load")
    theta = rng.uniform(-1, 1, (3, 150))
    share = source.dirichlet_draws(rng, 12, 3, 0.4)
    rules = np.sign(mixture.x @ theta.T)
    targets = 2 * mixture.y - 1
    assert (rules == targets[:, None]).any(axis=1).mean() > 0.98  # guesses would make it 0.875
    np.testing.assert_array_equal(mixture.group, share.argmax(axis=1))
    for k in range(12):  # E[target | x] = shares x rules, so that least squares finds the shares
        own = (mixture.client == k) & mixture.is_test
        found = np.linalg.lstsq(rules[own], targets[own], rcond=None)[0]
        np.testing.assert_allclose(found, share[k], atol=0.1)
    # The components are shuffled: both halves of a client's test part have the same shares.
    k = np.argmin(share.max(axis=1))
    own = np.flatnonzero((mixture.client == k) & mixture.is_test)
    halves = [
        np.linalg.lstsq(rules[half], targets[half], rcond=None)[0] for half in np.split(own, 2)
    ]
    np.testing.assert_allclose(*halves, atol=0.2)


def test_synthetic_is_decided_by_the_seed_and_can_be_subsampled(mixture):
    small = {"num_clients": 4, "test_examples": 20}
    first, again, other = (sources.synthetic(seed=seed, **small) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.x, again.x)
    np.testing.assert_array_equal(first.y, again.y)
    assert not np.array_equal(first.x[:50], other.x[:50])
    part = sources.synthetic(fraction=0.25, **MIXTURE)
    assert (
        len(part.y)
        == round(len(mixture.y) / 4)
        == len(part.x)
        == len(part.client)
        == len(part.is_test)
    )
    rows = {row.tobytes(): i for i, row in enumerate(mixture.x)}
    ids = [rows[row.tobytes()] for row in part.x]
    np.testing.assert_array_equal(part.client, mixture.client[ids])
    federation = data.synthetic(**small)
    assert federation.num_clients == 4 and federation.name == "synthetic, natural"
    np.testing.assert_array_equal(federation.test.size, 20)


def test_synthetic_training_data_do_not_depend_on_the_number_of_test_examples():
    few, many = (
        data.synthetic(5, test_examples=count, train_examples=20, validation_fraction=0.3)
        for count in (7, 9)
    )
    for part in ("train", "validation"):
        for one, other in zip(getattr(few, part), getattr(many, part), strict=True):
            np.testing.assert_array_equal(one, other)
    assert few.test.y.shape == (5, 7) and many.test.y.shape == (5, 9)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_synthetic_parts_have_random_streams_of_their_own(monkeypatch, fraction):
    one, more_tests = (
        sources.synthetic(5, test_examples=count, fraction=fraction) for count in (40, 90)
    )
    monkeypatch.setattr(builtin, "SYNTHETIC_TRAIN", (50, 60))
    less_training = sources.synthetic(5, test_examples=40, fraction=fraction)
    assert (
        less_training.is_test.sum()
        == one.is_test.sum()
        == 200 * fraction
        < more_tests.is_test.sum()
    )
    assert (~less_training.is_test).sum() < (~one.is_test).sum()
    for other, part in ((more_tests, False), (less_training, True)):
        for field in ("x", "y", "client"):
            found, expected = (
                getattr(source, field)[source.is_test == part] for source in (other, one)
            )
            np.testing.assert_array_equal(found, expected)


def published(num_clients, num_test, components=3, alpha=0.4):
    """The published synthetic data as facts about its generator have it: (x, y, sizes), and which labels are constant.

    The component number m of a client's examples writes labels from the first example on, whatever m is.
    """
    from sklearn.utils import shuffle

    rng = np.random.RandomState(12345)
    sizes = [min(int(size) + 50, 1000) for size in rng.lognormal(4, 2, num_clients)]
    shares = [rng.dirichlet([alpha] * components) for _ in range(num_clients)]
    thetas = rng.uniform(-1, 1, (components, 150))
    xs = []
    ys = []
    constants = []
    for size, share in zip(sizes, shares, strict=True):
        for number in (size, num_test):
            count = rng.multinomial(number, share)
            written = np.zeros(number, bool)
            x = rng.uniform(-1, 1, (number, 150))
            y = np.zeros(number)
            for m in range(components):
                first = slice(count[m])
                logits = x[first] @ thetas[m] + rng.normal(0, 0.1, count[m])
                y[first] = np.round(1 / (1 + np.exp(-logits)))
                written[first] = True
            x, y, written = shuffle(x, y, written, random_state=rng)
            xs = [*xs, x]
            ys = [*ys, y]
            constants = [*constants, ~written]
    return np.concatenate(xs), np.concatenate(ys), sizes, np.concatenate(constants)


def test_published_synthetic_data_are_the_authors_own_slip_included():
    found = sources.synthetic(300, labels="published", test_examples=60)
    x, y, sizes, constant = published(300, 60)
    np.testing.assert_array_equal(found.x, x.astype(np.float32))
    np.testing.assert_array_equal(found.y, y)
    np.testing.assert_array_equal(np.bincount(found.client[~found.is_test]), sizes)
    np.testing.assert_array_equal(np.bincount(found.client[found.is_test]), 60)
    assert not found.y[constant].any()
    # Of the published files, with 5,000 test examples a client, 26.6 % are constant and 37.1 % of class 1.
    assert constant[found.is_test].mean() == pytest.approx(0.266, abs=0.005)
    assert found.y.mean() == pytest.approx(0.371, abs=0.005)
    assert found.name != sources.synthetic(1, test_examples=1).name


def test_digits_are_scikit_learn_s():
    """They are read from its file, without importing it; where the file is elsewhere, scikit-learn reads it."""
    for found, expected in zip(builtin.read_digits(), load_digits(return_X_y=True), strict=True):
        np.testing.assert_array_equal(found, expected)
