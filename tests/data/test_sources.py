"""Sources: loading, scaling and rejected input."""

import importlib
import re
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources
from pfljax.data.sources import builtin, source

RNG = np.random.default_rng(0)


@pytest.fixture
def npz(tmp_path):
    """Writes arrays to a file and loads it: npz(x=..., y=..., load={...})."""

    def load(load=None, **arrays):
        np.savez(tmp_path / "own.npz", **arrays)
        return sources.npz(str(tmp_path / "own.npz"), **(load or {}))

    return load


def test_digits_are_images_in_the_unit_interval():
    source = sources.digits()
    assert source.x.shape == (1797, 8, 8, 1) and source.x.dtype == np.float32
    assert source.x.min() == 0 and source.x.max() == 1
    assert source.y.dtype == np.int32 and source.num_classes == 10 and source.task == "classification"
    assert source.client is None and source.is_test is None


def test_sine_gives_each_client_its_interval():
    source = sources.sine(8)
    assert source.x.shape == (8 * builtin.SINE_EXAMPLES, 1) and source.task == "regression"
    np.testing.assert_array_equal(np.floor((source.x[:, 0] + 1) * 4), source.client)
    noise = source.y - np.sin(np.pi * (source.x[:, 0] + 1))
    assert 0.5 * builtin.SINE_NOISE < noise.std() < 1.5 * builtin.SINE_NOISE
    np.testing.assert_array_equal(source.distribution, np.arange(8))


@pytest.mark.parametrize("load", [sources.digits, sources.sine])
def test_fraction_is_a_subsample_decided_by_the_seed(load):
    whole, part, same, other = (
        load(fraction=fraction, seed=seed) for fraction, seed in ((1, 3), (0.25, 3), (0.25, 3), (0.25, 4))
    )
    assert len(part.y) == round(len(whole.y) / 4)
    np.testing.assert_array_equal(part.x, same.x)
    assert not np.array_equal(part.x, other.x)
    rows = {row.tobytes() for row in whole.x}
    assert all(row.tobytes() in rows for row in part.x)


def test_strings_are_classes_in_sorted_order(npz):
    """Also those of a subsample, whose classes are those of all; NumPy sorts by code points, capitals first."""
    y = np.array(["dog", "cat", "Zebra", "cat", "ox", "dog"])
    source = npz(x=np.arange(6.0)[:, None], y=y)
    assert source.class_names == ("Zebra", "cat", "dog", "ox") and source.num_classes == 4
    assert source.y.dtype == np.int32 and source.y.tolist() == [2, 1, 0, 1, 3, 2] and source.task == "classification"
    part = npz(x=np.arange(6.0)[:, None], y=y, load={"fraction": 0.5, "standardize": False})
    assert part.class_names == source.class_names
    np.testing.assert_array_equal(part.y, source.y[part.x[:, 0].astype(int)])


def test_standardization_is_measured_on_training_rows_only(npz):
    x = RNG.normal(5, 3, size=(3000, 4)).astype(np.float32)
    x[:, 3] = 0.1  # constant: the guard keeps it from 0 / 0
    is_test = np.arange(3000) % 3 == 0
    x[is_test, :3] += 100
    source = npz(x=x, y=np.arange(3000) % 2, is_test=is_test)
    train = source.x[~is_test]
    np.testing.assert_allclose(train[:, :3].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(train[:, :3].std(axis=0), 1, atol=1e-5)
    np.testing.assert_array_equal(source.x[:, 3], 0)
    assert source.x[is_test, :3].min() > 10
    np.testing.assert_array_equal(source.is_test, is_test)
    np.testing.assert_array_equal(npz({"standardize": False}, x=x, y=np.arange(3000)).x, x)


def test_statistics_are_those_of_the_numbers_as_given(npz):
    """In float32, numbers of 1e9 are multiples of 64, so that most of their noise would be gone."""
    x = 1e9 + 10 * RNG.normal(size=(3000, 2))
    source = npz(x=x, y=np.arange(3000) % 2)
    np.testing.assert_allclose(source.x, (x - x.mean(axis=0)) / x.std(axis=0), atol=1e-5)
    np.testing.assert_allclose(source.scaling(x[:9]), source.x[:9], rtol=1e-6)


def test_a_constant_that_is_no_sum_of_powers_of_2_becomes_0(npz):
    x = np.full((3000, 2), [0.1, 1e9 + 0.1])  # 3000 times 0.1, divided by 3000, is not 0.1
    np.testing.assert_array_equal(npz(x=x, y=np.arange(3000) % 2).x, 0)


def test_likely_mistakes_are_told(npz):
    """Not those of a standardized x, of uint8 pixels (divided by 255), or of numbers that are not whole."""
    y, pixels = np.arange(50) % 3, RNG.integers(0, 256, size=(50, 4, 4)).astype(float)
    raw = {"standardize": False}
    with pytest.warns(UserWarning, match="^x: looks like pixels from 0 to 255 that are not standardized"):
        npz(raw, x=pixels, y=y)
    (
        npz(x=pixels, y=y),
        npz(raw, x=pixels.astype(np.uint8), y=y),
        npz(raw, x=pixels + 0.5, y=y),
        npz(raw, x=-pixels, y=y),
    )
    text = (
        "^y: has labels from 1: classes are counted from 0, so that C is 4 and no example has class 0; subtract 1, or"
    )
    with pytest.warns(UserWarning, match=text):
        assert npz(x=pixels, y=y + 1).num_classes == 4


def test_images_are_standardized_per_channel(npz):
    x = RNG.integers(0, 256, size=(50, 4, 5, 3), dtype=np.uint8)
    x[..., 1] //= 4
    y = np.arange(50) % 2
    np.testing.assert_array_equal(npz({"standardize": False}, x=x, y=y).x, x.astype(np.float32) / 255)
    expected = (x - x.mean(axis=(0, 1, 2))) / x.std(axis=(0, 1, 2))
    np.testing.assert_allclose(npz(x=x, y=y).x, expected, atol=1e-5)
    assert npz(x=x[..., 0], y=y).x.shape == (50, 4, 5, 1)
    assert npz(x=RNG.normal(size=50), y=y).x.shape == (50, 1)


def test_targets_decide_the_task(npz):
    x = np.ones((4, 2))
    classes = npz(x=x, y=np.array([0, 5, 2, 2], np.uint8))
    assert (classes.task, classes.num_classes, classes.y.dtype) == ("classification", 6, np.int32)
    regression = npz(x=x, y=np.array([0.0, 1, 2, 3]))
    assert (regression.task, regression.num_classes, regression.y.dtype) == ("regression", 1, np.float32)
    assert npz({"task": "classification"}, x=x, y=np.array([0.0, 1, 2, 3])).num_classes == 4
    assert npz({"task": "regression"}, x=x, y=np.array([0, 1, 2, 3])).task == "regression"


def test_a_subsample_knows_all_classes(npz):
    source = npz({"fraction": 0.1}, x=np.ones((100, 2)), y=np.arange(100))
    assert len(source.y) == 10 and source.num_classes == 100


@pytest.mark.parametrize("client", [[30, -7, 30, 9], ["m", "a", "m", "b"]])
def test_clients_are_numbered_in_sorted_order(npz, client):
    np.testing.assert_array_equal(npz(x=np.ones((4, 2)), y=np.arange(4), client=client).client, [2, 0, 2, 1])


def test_writers_are_clients_and_coarse_labels_are_kept(npz):
    arrays = {"x": np.ones((40, 2)), "y": np.arange(40), "coarse": np.arange(40, dtype=np.uint8) // 4}
    source = npz({"fraction": 0.5}, **arrays, writer=np.arange(40) // 20)
    assert source.coarse.dtype == np.int32 and source.client.dtype == np.int64
    np.testing.assert_array_equal(source.coarse, source.y // 4)
    np.testing.assert_array_equal(source.client, source.y // 20)
    both = npz(**arrays, writer=np.zeros(40, int), client=np.arange(40) % 3)
    np.testing.assert_array_equal(both.client, np.arange(40) % 3)
    assert npz(x=arrays["x"], y=arrays["y"]).coarse is None


X = np.ones((4, 2))
Y = np.arange(4)
HOLE = np.array([[1.0, 1], [1, np.nan], [1, 1], [np.inf, 1]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "lacks y.*found x"),
        ({"images": X, "labels": Y}, "lacks x and y.*found images, labels"),
        ({"x": X, "y": Y[:3]}, r"y has shape \(3,\), but x has \(4, 2\); accepted: one value"),
        ({"x": X, "y": np.ones((3, 1))}, r"y has shape \(3, 1\), but x has"),
        ({"x": X, "y": Y, "client": Y[:2]}, r"client has shape \(2,\)"),
        ({"x": X[:0], "y": Y[:0]}, "x is empty"),
        ({"x": np.array(1.0), "y": np.array(1)}, "x is empty"),
        ({"x": HOLE, "y": Y}, "x is NaN or infinite in 2 rows; the first is row 1"),
        ({"x": X * 1e300, "y": Y}, "x is NaN or infinite in 4 rows"),
        ({"x": X, "y": HOLE[:, 1]}, "y is NaN or infinite in 1 rows; the first is row 1"),
        ({"x": X, "y": Y - 2}, "y is -2 in row 0; classes are integers 0..C-1"),
        ({"x": X, "y": Y * 10**6}, "y reaches 3000000 in 4 rows"),
        ({"x": X, "y": Y.astype(bytes)}, r"y is \|S.*accepted: integers or strings.*y\.astype\(str\) converts it"),
        ({"x": X.astype(str), "y": Y}, "x is <U.*accepted: numbers"),
        ({"x": X.astype(object), "y": Y}, "no object arrays"),
        ({"x": X, "y": Y, "client": X[:, 0]}, "client is float64; accepted: integers or strings"),
        ({"x": X, "y": Y, "writer": X[:, 0]}, "writer is float64; accepted: integers or strings"),
        ({"x": X, "y": Y, "writer": Y[:2]}, r"writer has shape \(2,\)"),
        ({"x": X, "y": Y, "coarse": X[:, 0]}, "coarse is float64; accepted: integers"),
        ({"x": X, "y": Y, "coarse": Y[:2]}, r"coarse has shape \(2,\)"),
        ({"x": X, "y": Y, "is_test": Y}, "is_test is not boolean"),
        ({"x": X, "y": Y, "clients": Y}, "has an unknown array clients; did you mean client. accepted: x, y, client, "),
        ({"x": X, "y": Y, "istest": Y > 1}, "has an unknown array istest; did you mean is_test. accepted: .*is_test$"),
        ({"x": X, "y": Y, "zzz": Y}, "has an unknown array zzz; accepted: x, y, client, writer, coarse, is_test$"),
        ({"x": X, "y": Y, "is_test": Y >= 0}, "is_test is true for every example"),
    ],
)
def test_malformed_files_are_refused_in_one_line(npz, arrays, message):
    with pytest.raises(ArgumentError, match=message) as error:
        npz(**arrays)
    assert re.match(r"file=.*own\.npz: ", str(error.value)) and "\n" not in str(error.value)


def test_fractional_classes_are_refused(npz):
    with pytest.raises(ArgumentError, match=r"y is 0\.5 in row 1"):
        npz({"task": "classification"}, x=X, y=np.array([0, 0.5, 1, 2]))


@pytest.mark.parametrize("content", [b"", b"x,y\n1,2\n", b"PK\x03\x04 torn", b"\x80\x04N."])
def test_files_that_are_no_npz_are_refused(tmp_path, content):
    (tmp_path / "f.npz").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"file=.*is not an npz"):
        sources.npz(str(tmp_path / "f.npz"))


def test_a_torn_npz_and_a_lone_array_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "f.npz", x=RNG.normal(size=(50, 9)), y=np.arange(50))
    whole = (tmp_path / "f.npz").read_bytes()
    (tmp_path / "f.npz").write_bytes(whole[:500] + bytes(100) + whole[600:])
    with pytest.raises(ArgumentError, match="is not an npz"):
        sources.npz(str(tmp_path / "f.npz"))
    np.save(tmp_path / "f.npy", X)
    with pytest.raises(ArgumentError, match="contains a single array"):
        sources.npz(str(tmp_path / "f.npy"))


@pytest.mark.parametrize(
    ("load", "arguments", "message"),
    [
        (sources.npz, {"file": None}, "file: accepted: an npz"),
        (sources.npz, {"file": "/nowhere/f.npz"}, "file=/nowhere/f.npz: cannot be read .No such file"),
        (sources.npz, {"file": "/"}, "file=/: cannot be read .Is a directory"),
        (sources.digits, {"fraction": 0}, r"fraction=0: accepted: above 0, at most 1"),
        (sources.digits, {"fraction": 1.5}, r"fraction=1\.5: accepted"),
        (sources.digits, {"seed": -1}, "seed=-1: accepted"),
        (sources.sine, {"num_clients": 0}, "num_clients=0: accepted: 1 or more"),
        (sources.synthetic, {"num_clients": 0}, "num_clients=0: accepted: 1 or more"),
        (sources.synthetic, {"components": 0}, "components=0: accepted: 1 or more"),
        (sources.synthetic, {"alpha": 0}, "alpha=0: accepted"),
        (
            sources.synthetic,
            {"alpha": 0.001, "labels": "published"},
            "alpha=0.001: accepted for the published data: 0.01",
        ),
        (
            sources.synthetic,
            {"labels": "publishd"},
            "labels=publishd: accepted: mixture, published; did you mean published?",
        ),
        (sources.synthetic, {"test_examples": -1}, "test_examples=-1: accepted: 0 or more"),
        (sources.text, {"file": ""}, "file=: cannot be read"),
        (sources.text, {"file": "/nowhere/f.txt"}, r"file=/nowhere/f\.txt: cannot be read .No such file"),
        (sources.text, {"file": "f.txt", "stride": 0}, "stride=0: accepted"),
        (sources.get, {"name": "digit"}, "dataset=digit: unknown; did you mean digits?"),
    ],
)
def test_wrong_arguments_are_refused_by_name(load, arguments, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        load(**arguments)


def test_an_unknown_task_is_refused(npz):
    with pytest.raises(ArgumentError, match=r"^task=classes: accepted: auto, classification, regression, multilabel$"):
        npz({"task": "classes"}, x=X, y=Y)


def test_tfds_reads_both_splits_without_tensorflow(tmp_path):
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=6):
        source = sources.tfds("mnist", data_dir=str(tmp_path), standardize=False)
        part = sources.tfds("mnist", data_dir=str(tmp_path), fraction=0.5)
    assert source.x.shape == (12, 28, 28, 1) and source.x.min() >= 0 and 0.5 < source.x.max() <= 1
    assert source.y.shape == (12,) and source.num_classes == 10  # known to TFDS, whatever the examples hold
    np.testing.assert_array_equal(source.is_test, np.arange(12) >= 6)
    assert len(part.y) == 6
    np.testing.assert_allclose(part.x[~part.is_test].mean(), 0, atol=1e-5)
    assert "tensorflow" not in sys.modules


def test_without_tfds_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ArgumentError, match=r"mnist: needs tensorflow-datasets: pip install 'pfljax\[tfds\]'"):
        sources.tfds("mnist")


def test_tfds_reads_coarse_labels(tmp_path):
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=6):
        source = sources.tfds("cifar100", data_dir=str(tmp_path))
    assert source.coarse.shape == (12,) and source.coarse.dtype == np.int32 and source.client is None
    assert set(source.coarse) <= set(range(20)) and len(set(source.coarse)) > 1


TOY = """
import numpy as np
import tensorflow_datasets as tfds

class Builder(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        vector = tfds.features.Tensor(shape=(3,), dtype=np.float32)
        label = tfds.features.ClassLabel(num_classes=4)
        features = tfds.features.FeaturesDict({"vector": vector, "label": label, **OWNER})
        return self.dataset_info_from_configs(features=features)

    def _split_generators(self, manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(7):
            owner = {field: OWNERS[i % 2] for field in OWNER}
            yield i, {"vector": np.full(3, i, np.float32), "label": i % 3, **owner}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Prepares TOY under a name, with more code at its end, and loads it: toy(name, code)."""

    def load(name, code):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").touch()
        (package / f"{name}_dataset_builder.py").write_text(TOY + code)
        monkeypatch.syspath_prepend(tmp_path)
        builder = importlib.import_module(f"{name}.{name}_dataset_builder").Builder
        folder = str(tmp_path / "prepared")
        builder(file_format="array_record", data_dir=folder).download_and_prepare()
        return sources.tfds(name, data_dir=folder, standardize=False)

    return load


@pytest.mark.parametrize(
    ("name", "field", "owners"),
    [("toy_users", '"user": tfds.features.Text()', ["b", "a"]), ("toy_writers", '"writer": np.int64', [9, -3])],
)
def test_tfds_clients_are_those_that_a_field_names(toy, name, field, owners):
    source = toy(name, f"OWNER, OWNERS = {{{field}}}, {owners}")
    assert source.client.dtype == np.int64
    np.testing.assert_array_equal(source.client, 1 - source.x[:, 0] % 2)  # sorted: the second owner is client 0


def test_tfds_reads_a_prepared_data_set_that_has_no_test_split(toy):
    source = toy("toy_vectors", "OWNER, OWNERS = {}, [0, 0]")
    assert source.is_test is None and source.num_classes == 4 and source.name == "toy_vectors"
    assert source.client is None and source.coarse is None
    np.testing.assert_array_equal(np.sort(source.x, axis=0), np.arange(7)[:, None] * np.ones(3))
    np.testing.assert_array_equal(source.y, source.x[:, 0] % 3)


def test_tfds_says_how_to_prepare(tmp_path):
    with pytest.raises(ArgumentError) as error:
        sources.tfds("mnist", data_dir=str(tmp_path))
    message = str(error.value)
    assert message.startswith(f"dataset=tfds:mnist: not prepared in data_dir={tmp_path}") and "\n" not in message
    assert "pip install 'pfljax[prepare]'" in message
    assert f"tfds.builder('mnist', file_format='array_record', data_dir='{tmp_path}').download_and_prepare()" in message
    with pytest.raises(ArgumentError, match=r"dataset=tfds:minst: TFDS has no such data set; nearest: .*mnist"):
        sources.tfds("minst", data_dir=str(tmp_path))
    with pytest.raises(ArgumentError, match=r"dataset=tfds:mnist/none: .*BuilderConfig none not found"):
        sources.tfds("mnist/none", data_dir=str(tmp_path))


MIXTURE = {"num_clients": 12, "test_examples": 2000}


@pytest.fixture(scope="module")
def mixture():
    return sources.synthetic(**MIXTURE)


def test_synthetic_sizes_are_as_published(mixture):
    many = sources.synthetic(200, test_examples=3)
    assert many.x.shape == (len(many.y), 150) and many.x.dtype == np.float32 and many.y.dtype == np.int32
    assert many.num_classes == 2 and many.task == "classification" and many.name == "synthetic"
    train = np.bincount(many.client[~many.is_test])
    assert train.min() >= 50 and train.max() == 1000 and 80 < np.median(train) < 140  # 50 + e^4 = 105
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
    np.testing.assert_array_equal(mixture.distribution, share.argmax(axis=1))
    for k in range(12):  # E[target | x] = shares x rules, so that least squares finds the shares
        own = (mixture.client == k) & mixture.is_test
        found = np.linalg.lstsq(rules[own], targets[own], rcond=None)[0]
        np.testing.assert_allclose(found, share[k], atol=0.1)
    # The components are shuffled: both halves of a client's test part have the same shares.
    k = np.argmin(share.max(axis=1))
    own = np.flatnonzero((mixture.client == k) & mixture.is_test)
    halves = [np.linalg.lstsq(rules[half], targets[half], rcond=None)[0] for half in np.split(own, 2)]
    np.testing.assert_allclose(*halves, atol=0.2)


def test_a_synthetic_client_of_one_component_is_linearly_separable():
    from sklearn.linear_model import LogisticRegression

    source = sources.synthetic(20, components=2, alpha=1e-3, test_examples=500)
    of = source.distribution[source.client]
    assert set(of) == {0, 1}
    learned, tested = (of == 0) & ~source.is_test, source.is_test
    model = LogisticRegression().fit(source.x[learned], source.y[learned])
    assert model.score(source.x[tested & (of == 0)], source.y[tested & (of == 0)]) > 0.9
    assert model.score(source.x[tested & (of == 1)], source.y[tested & (of == 1)]) < 0.75


def test_synthetic_is_decided_by_the_seed_and_can_be_subsampled(mixture):
    small = {"num_clients": 4, "test_examples": 20}
    first, again, other = (sources.synthetic(seed=seed, **small) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.x, again.x)
    np.testing.assert_array_equal(first.y, again.y)
    assert not np.array_equal(first.x[:50], other.x[:50])
    part = sources.synthetic(fraction=0.25, **MIXTURE)
    assert len(part.y) == round(len(mixture.y) / 4) == len(part.x) == len(part.client) == len(part.is_test)
    rows = {row.tobytes(): i for i, row in enumerate(mixture.x)}
    ids = [rows[row.tobytes()] for row in part.x]
    np.testing.assert_array_equal(part.client, mixture.client[ids])
    federation = data.synthetic(**small)
    assert federation.num_clients == 4 and federation.name == "synthetic, natural"
    np.testing.assert_array_equal(federation.test.size, 20)


def test_synthetic_training_data_do_not_depend_on_the_number_of_test_examples():
    few, many = (data.synthetic(5, test_examples=count, train_examples=20, validation_fraction=0.3) for count in (7, 9))
    for part in ("train", "validation"):
        for one, other in zip(getattr(few, part), getattr(many, part), strict=True):
            np.testing.assert_array_equal(one, other)
    assert few.test.y.shape == (5, 7) and many.test.y.shape == (5, 9)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_synthetic_parts_have_random_streams_of_their_own(monkeypatch, fraction):
    one, more_tests = (sources.synthetic(5, test_examples=count, fraction=fraction) for count in (40, 90))
    monkeypatch.setattr(builtin, "SYNTHETIC_TRAIN", (50, 60))
    less_training = sources.synthetic(5, test_examples=40, fraction=fraction)
    assert less_training.is_test.sum() == one.is_test.sum() == 200 * fraction < more_tests.is_test.sum()
    assert (~less_training.is_test).sum() < (~one.is_test).sum()
    for other, part in ((more_tests, False), (less_training, True)):
        for field in ("x", "y", "client"):
            found, expected = (getattr(source, field)[source.is_test == part] for source in (other, one))
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
    xs, ys, constants = [], [], []
    for size, share in zip(sizes, shares, strict=True):
        for number in (size, num_test):
            count, written = rng.multinomial(number, share), np.zeros(number, bool)
            x, y = rng.uniform(-1, 1, (number, 150)), np.zeros(number)
            for m in range(components):
                for i, noise in enumerate(rng.normal(0, 0.1, count[m])):
                    y[i] = round(1 / (1 + np.exp(-(x[i] @ thetas[m] + noise))))
                    written[i] = True
            x, y, written = shuffle(x, y, written, random_state=rng)
            xs, ys, constants = [*xs, x], [*ys, y], [*constants, ~written]
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


@pytest.mark.parametrize(("alpha", "ones"), [(0.02, 1 / 2), (1e6, 1 / 6)])
def test_the_slip_costs_labels_where_components_share_a_client(alpha, ones):
    """With equal shares, only a third of the examples gets a label, from the last component."""
    found = sources.synthetic(40, labels="published", alpha=alpha, test_examples=300)
    assert found.y.mean() == pytest.approx(ones, abs=0.03)
    assert sources.synthetic(40, alpha=alpha, test_examples=300).y.mean() == pytest.approx(1 / 2, abs=0.02)


@pytest.fixture
def text(tmp_path):
    """Writes a text to a file and loads it: text(content, **load)."""

    def load(content, **arguments):
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "play.txt").write_bytes(content)
        return sources.text(str(tmp_path / "play.txt"), **arguments)

    return load


LINES = [f"{letter * 40}{letter.upper() * 20}" for letter in "abcde"]
PLAY = f"""Nobody says this.

Ann:
{LINES[0]}
{LINES[1]}

{LINES[2]}
{LINES[3]}

Bob:
one
two

Mute:

Once:
just this

Ann:
{LINES[4]}
"""


def test_a_text_is_its_roles_windows_with_targets_one_on(text):
    source = text(PLAY)
    spoken = "\n".join(LINES[:4]), LINES[4]  # four fifths of Ann's lines, and the last
    letters = sorted(set("".join(LINES) + "onetw\n"))
    assert source.num_classes == len(letters) and source.task == "classification" and source.name == "play"
    assert source.x.dtype == source.y.dtype == np.uint8
    windows = len(spoken[0]) - 80
    assert source.x.shape == source.y.shape == (windows + 8 + 4, 80)
    np.testing.assert_array_equal(source.client, [0] * (windows + 8) + [1] * 4)  # Once has a single line
    assert source.client_names.tolist() == ["Ann", "Bob"]
    tests = [*range(windows, windows + 8), windows + 10, windows + 11]
    np.testing.assert_array_equal(np.flatnonzero(source.is_test), tests)
    assert source.distribution is None  # nobody knows whose lines are alike
    for i in range(windows):
        assert "".join(letters[c] for c in source.x[i]) == spoken[0][i : i + 80]
        assert "".join(letters[c] for c in source.y[i]) == spoken[0][i + 1 : i + 81]


def test_windows_of_short_parts_run_past_their_ends(text):
    source = text(PLAY)
    letters = sorted(set("".join(LINES) + "onetw\n"))
    ends = [(-12 + start, LINES[4][start:]) for start in range(8)]
    for row, content in [*ends, (-4, "one"), (-3, "ne"), (-2, "two"), (-1, "wo")]:
        known = len(content) - 1
        assert "".join(letters[c] for c in source.x[row, :known]) == content[:-1]
        assert "".join(letters[c] for c in source.y[row, :known]) == content[1:]
        assert (source.y[row, known:] == sources.PAD_TOKEN).all()


@pytest.mark.parametrize(
    ("length", "stride", "starts"),
    [
        (100, 1, range(20)),
        (81, 1, range(8)),
        (2, 1, [0]),
        (5, 80, range(4)),
        (800, 80, range(0, 720, 80)),
        (151, 80, range(0, 71, 10)),
    ],
)
def test_every_part_has_eight_windows_if_it_has_the_characters(text, length, stride, starts):
    line = "".join(chr(ord("a") + i % 26) if i % 7 else chr(ord("A") + i // 7 % 26) for i in range(length))
    source = text(f"A:\n{line}\nxy\n", stride=stride)
    letters = sorted(set(line + "xy\n"))
    found = ["".join(letters[c] for c in row if c != sources.PAD_TOKEN) for row in source.y[~source.is_test]]
    assert found == [line[start + 1 : start + 81] for start in starts]


def test_windows_can_be_apart_and_subsampled(text):
    every, third = text(PLAY), text(PLAY, stride=3)
    train = ~every.is_test & (every.client == 0)
    np.testing.assert_array_equal(third.x[~third.is_test & (third.client == 0)], every.x[train][::3])
    part = text(PLAY, fraction=0.25)
    assert len(part.x) == len(part.y) == len(part.client) == len(part.is_test) == round(len(every.x) / 4)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 10])
def test_four_fifths_of_the_lines_train(text, count):
    play = "A:\nxx\nyy\n\nB:\n" + "\n".join(chr(ord("a") + i) * 2 for i in range(count))
    source = text(play)
    held = [set(source.y[(source.client == 1) & (source.is_test == test)].ravel()) - {0, 255} for test in (0, 1)]
    expected = {1: (0, 0), 2: (1, 1), 3: (2, 1), 5: (4, 1), 9: (7, 2), 10: (8, 2)}[count]
    assert tuple(map(len, held)) == expected and not held[0] & held[1]


LETTERS = "".join(map(chr, range(256, 507)))


def test_a_text_may_have_254_characters(text):
    source = text(f"A:\n{LETTERS}\nxy\n")
    assert source.num_classes == 254 and source.x.max() < sources.PAD_TOKEN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no roles; accepted: blocks"),
        ("Only prose.\nMore: of it.\n", "has no roles; accepted: blocks"),
        ("A:\none line\n\nB:\none line\n", "no role has two lines"),
        ("A:\n\nB:\n", "no role has two lines"),
        (b"A:\n\xff\xfe\n", "is not UTF-8 text .byte 3"),
        (f"A:\n{LETTERS}\nxyz\n", "has 255 different characters; accepted: at most 254"),
    ],
)
def test_malformed_texts_are_refused_in_one_line(text, content, message):
    with pytest.raises(ArgumentError, match=message) as error:
        text(content)
    assert re.match(r"file=.*play\.txt: ", str(error.value)) and "\n" not in str(error.value)


def test_digits_are_scikit_learn_s():
    """They are read from its file, without importing it; where the file is elsewhere, scikit-learn reads it."""
    for found, expected in zip(builtin.read_digits(), load_digits(return_X_y=True), strict=True):
        np.testing.assert_array_equal(found, expected)
