"""Sources: what is loaded, how it is scaled, and what is refused."""

import re
import sys

import numpy as np
import pytest

from pfljax import data
from pfljax.data import sources
from pfljax.types import UsageError

RNG = np.random.default_rng(0)


@pytest.fixture
def npz(tmp_path):
    """Writes arrays to a file and loads it: npz(x=..., y=..., load={...})."""

    def load(load=None, **arrays):
        np.savez(tmp_path / "own.npz", **arrays)
        return sources.load("npz", data_file=str(tmp_path / "own.npz"), **(load or {}))

    return load


def test_digits_are_images_in_the_unit_interval():
    source = sources.load("digits")
    assert source.x.shape == (1797, 8, 8, 1) and source.x.dtype == np.float32
    assert source.x.min() == 0 and source.x.max() == 1
    assert source.y.dtype == np.int32 and source.num_classes == 10 and source.task == "classification"
    assert source.client is None and source.is_test is None


def test_sine_gives_each_client_its_interval():
    source = sources.load("sine", num_clients=8)
    assert source.x.shape == (8 * sources.SINE_EXAMPLES, 1) and source.task == "regression"
    np.testing.assert_array_equal(np.floor((source.x[:, 0] + 1) * 4), source.client)
    noise = source.y - np.sin(np.pi * (source.x[:, 0] + 1))
    assert 0.5 * sources.SINE_NOISE < noise.std() < 1.5 * sources.SINE_NOISE
    np.testing.assert_array_equal(source.distribution, np.arange(8))


@pytest.mark.parametrize("dataset", ["digits", "sine"])
def test_fraction_is_a_subsample_decided_by_the_seed(dataset):
    whole, part, same, other = (
        sources.load(dataset, fraction=fraction, seed=seed)
        for fraction, seed in ((1, 3), (0.25, 3), (0.25, 3), (0.25, 4))
    )
    assert len(part.y) == round(len(whole.y) / 4)
    np.testing.assert_array_equal(part.x, same.x)
    assert not np.array_equal(part.x, other.x)
    rows = {row.tobytes() for row in whole.x}
    assert all(row.tobytes() in rows for row in part.x)


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


X = np.ones((4, 2))
Y = np.arange(4)
HOLE = np.array([[1.0, 1], [1, np.nan], [1, 1], [np.inf, 1]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "lacks y.*found x"),
        ({"images": X, "labels": Y}, "lacks x and y.*found images, labels"),
        ({"x": X, "y": Y[:3]}, r"y \(3,\) does not fit x \(4, 2\)"),
        ({"x": X, "y": np.ones((4, 1))}, r"y \(4, 1\) does not fit"),
        ({"x": X, "y": Y, "client": Y[:2]}, r"client \(2,\) does not fit"),
        ({"x": X[:0], "y": Y[:0]}, "is empty"),
        ({"x": np.array(1.0), "y": np.array(1)}, "is empty"),
        ({"x": HOLE, "y": Y}, "x is NaN or infinite in 2 rows, the first is row 1"),
        ({"x": X * 1e300, "y": Y}, "x is NaN or infinite in 4 rows"),
        ({"x": X, "y": HOLE[:, 1]}, "y is NaN or infinite in 1 rows, the first is row 1"),
        ({"x": X, "y": Y - 2}, "y is -2 in row 0; classes are integers 0..C-1"),
        ({"x": X, "y": Y * 10**6}, "y reaches 3000000 in 4 rows"),
        ({"x": X, "y": Y.astype(str)}, "y is <U.*accepted are integers"),
        ({"x": X.astype(str), "y": Y}, "x is <U.*accepted are numbers"),
        ({"x": X.astype(object), "y": Y}, "no object arrays"),
        ({"x": X, "y": Y, "client": X[:, 0]}, "client is float64; accepted are integers and strings"),
        ({"x": X, "y": Y, "is_test": Y}, "is_test is not boolean"),
        ({"x": X, "y": Y, "is_test": Y >= 0}, "is_test holds for every example"),
    ],
)
def test_malformed_files_are_refused_in_one_line(npz, arrays, message):
    with pytest.raises(UsageError, match=message) as error:
        npz(**arrays)
    assert re.match(r"--data_file=.*own\.npz: ", str(error.value)) and "\n" not in str(error.value)


def test_fractional_classes_are_refused(npz):
    with pytest.raises(UsageError, match=r"y is 0\.5 in row 1"):
        npz({"task": "classification"}, x=X, y=np.array([0, 0.5, 1, 2]))


@pytest.mark.parametrize("content", [b"", b"x,y\n1,2\n", b"PK\x03\x04 torn", b"\x80\x04N."])
def test_files_that_are_no_npz_are_refused(tmp_path, content):
    (tmp_path / "f.npz").write_bytes(content)
    with pytest.raises(UsageError, match=r"--data_file=.*is not an npz"):
        sources.load("npz", data_file=str(tmp_path / "f.npz"))


def test_a_torn_npz_and_a_lone_array_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "f.npz", x=RNG.normal(size=(50, 9)), y=np.arange(50))
    whole = (tmp_path / "f.npz").read_bytes()
    (tmp_path / "f.npz").write_bytes(whole[:500] + bytes(100) + whole[600:])
    with pytest.raises(UsageError, match="is not an npz"):
        sources.load("npz", data_file=str(tmp_path / "f.npz"))
    np.save(tmp_path / "f.npy", X)
    with pytest.raises(UsageError, match="holds a single array"):
        sources.load("npz", data_file=str(tmp_path / "f.npy"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dataset": "digit"},
            "--dataset=digit: unknown; nearest: digits; accepted: digits, sine, npz, tfds:NAME",
        ),
        ({"dataset": "tfds:"}, "--dataset=tfds:: unknown"),
        ({"dataset": "digits:x"}, "--dataset=digits:x: unknown"),
        ({"dataset": "npz"}, "--dataset=npz: needs --data_file"),
        (
            {"dataset": "npz", "data_file": "/nowhere/f.npz"},
            "--data_file=/nowhere/f.npz: cannot be read .No such file",
        ),
        ({"dataset": "npz", "data_file": "/"}, "--data_file=/: cannot be read .Is a directory"),
        ({"dataset": "digits", "data_file": "f.npz"}, "--data_file=f.npz: is read with --dataset=npz only"),
        ({"dataset": "npz", "data_dir": "d"}, "--data_dir=d: is read with --dataset=tfds only"),
        ({"dataset": "digits", "fraction": 0}, "--data_fraction=0: accepted"),
        ({"dataset": "digits", "fraction": 1.5}, "--data_fraction=1.5: accepted"),
        ({"dataset": "digits", "seed": -1}, "--seed=-1: accepted"),
        ({"dataset": "sine", "num_clients": 0}, "--num_clients=0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(UsageError, match=message):
        sources.load(**arguments)


def test_tfds_reads_both_splits_without_tensorflow(tmp_path):
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=6):
        source = sources.load("tfds:mnist", data_dir=str(tmp_path), standardize=False)
        part = sources.load("tfds:mnist", data_dir=str(tmp_path), fraction=0.5)
    assert source.x.shape == (12, 28, 28, 1) and source.x.min() >= 0 and 0.5 < source.x.max() <= 1
    assert source.y.shape == (12,) and source.num_classes == 10  # known to TFDS, whatever the examples hold
    np.testing.assert_array_equal(source.is_test, np.arange(12) >= 6)
    assert len(part.y) == 6
    np.testing.assert_allclose(part.x[~part.is_test].mean(), 0, atol=1e-5)
    assert "tensorflow" not in sys.modules


TOY = """
import numpy as np
import tensorflow_datasets as tfds

class Builder(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        vector = tfds.features.Tensor(shape=(3,), dtype=np.float32)
        label = tfds.features.ClassLabel(num_classes=4)
        features = tfds.features.FeaturesDict({"vector": vector, "label": label})
        return self.dataset_info_from_configs(features=features)

    def _split_generators(self, manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(7):
            yield i, {"vector": np.full(3, i, np.float32), "label": i % 3}
"""


def test_tfds_reads_a_prepared_data_set_that_has_no_test_split(tmp_path, monkeypatch):
    (tmp_path / "toy_vectors").mkdir()
    (tmp_path / "toy_vectors/__init__.py").touch()
    (tmp_path / "toy_vectors/toy_vectors_dataset_builder.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    from toy_vectors.toy_vectors_dataset_builder import Builder

    folder = str(tmp_path / "prepared")
    Builder(file_format="array_record", data_dir=folder).download_and_prepare()
    source = sources.load("tfds:toy_vectors", data_dir=folder, standardize=False)
    assert source.is_test is None and source.num_classes == 4 and source.name == "toy_vectors"
    np.testing.assert_array_equal(np.sort(source.x, axis=0), np.arange(7)[:, None] * np.ones(3))
    np.testing.assert_array_equal(source.y, source.x[:, 0] % 3)


def test_tfds_says_how_to_prepare(tmp_path):
    with pytest.raises(UsageError) as error:
        sources.load("tfds:mnist", data_dir=str(tmp_path))
    message = str(error.value)
    assert message.startswith(f"--dataset=tfds:mnist: not prepared in --data_dir={tmp_path}") and "\n" not in message
    assert "pip install 'pfljax[prepare]'" in message
    assert f"tfds.builder('mnist', file_format='array_record', data_dir='{tmp_path}').download_and_prepare()" in message
    with pytest.raises(UsageError, match=r"--dataset=tfds:minst: TFDS knows no such data set; nearest: .*mnist"):
        sources.load("tfds:minst", data_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"--dataset=tfds:mnist/none: .*BuilderConfig none not found"):
        sources.load("tfds:mnist/none", data_dir=str(tmp_path))


def test_make_picks_the_natural_partition_where_there_is_one(tmp_path):
    np.savez(tmp_path / "own.npz", x=RNG.normal(size=(40, 2)), y=np.arange(40) % 2, client=np.arange(40) % 5)
    own = data.make(dataset="npz", data_file=str(tmp_path / "own.npz"))
    assert own.num_clients == 5 and own.name == "own, natural"
    assert data.make().name == "digits, label_groups" and data.make().num_clients == 16
    assert data.make(dataset="sine", num_clients=8).num_clients == 8
    assert data.make(dataset="npz", data_file=str(tmp_path / "own.npz"), num_clients=3).num_clients == 3
    assert data.make(dataset="sine", partition="iid", num_clients=4).num_clients == 4
