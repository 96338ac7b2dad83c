"""ArrayRecord files, written by TFDS's own serializer: the same federation as the arrays, read as clients take part."""

import io
import json
import sys

import jax
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.contract.errors import ArgumentError
from pfljax.contract.pooled import Pooled
from pfljax.data import digest, preparation, sources
from pfljax.stores import stacks

grain = pytest.importorskip(
    "grain.sources", reason="needs grain, which has no wheels for some systems"
)
tfds = pytest.importorskip("tensorflow_datasets")

RNG = np.random.default_rng(0)
# reach 127: there is a warning of larger ones
X = RNG.integers(128, size=(60, 4, 5, 3), dtype=np.uint8)
Y = RNG.integers(3, size=60)
CLIENT = np.array(["b", "c", "a"])[np.arange(60) % 3]
IS_TEST = np.arange(60) >= 50
NAMES = ("zebra", "ant", "cow")  # which are not sorted
OF = tfds.features
TENSOR = {
    how: OF.Tensor(shape=X.shape[1:], dtype=np.uint8, encoding=how)
    for how in ("none", "bytes", "zlib")
}
PNG = OF.Image(shape=X.shape[1:], encoding_format="png")


def png(pixels):
    file = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(pixels).save(file, "png")
    file.seek(0)
    return file


def prepared(folder, kinds, columns, train=50, shards=1):
    """Writes columns as TFDS prepares a data set with these features: `train` rows, and the others as its part test."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    folder.mkdir()
    features = OF.FeaturesDict(kinds)
    features.save_config(folder)
    serializer = ExampleSerializer(features.get_serialized_info())
    num = len(columns["label"])
    parts = {"train": np.array_split(np.arange(train), shards), "test": [np.arange(train, num)]}
    for part, files in parts.items():
        for number, rows in enumerate(files):
            path = folder / f"toy-{part}.array_record-{number:05}-of-{len(files):05}"
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for row in rows:
                example = {name: values[row] for name, values in columns.items()}
                writer.write(serializer.serialize_example(features.encode_example(example)))
            writer.close()
    return folder


@pytest.fixture
def toy(tmp_path):
    """Prepares X with its labels and clients, written in a way: toy(way, ...)."""

    def make(how="bytes", name="toy", **options):
        kinds = {
            "image": TENSOR.get(how, PNG),
            "label": OF.ClassLabel(names=NAMES),
            "who": OF.Text(),
        }
        columns = {"image": list(map(png, X)) if how == "png" else X, "label": Y, "who": CLIENT}
        return prepared(tmp_path / name, kinds, columns, **options)

    return make


@pytest.mark.parametrize("how", [*TENSOR, "png"])
def test_examples_are_those_that_were_written_in_each_way(toy, how):
    folder = toy(how, shards=3)
    source = sources.arrayrecord(folder, client="who", standardize=False)
    assert (
        source.x.dtype == np.uint8 and not isinstance(source.x, np.ndarray) and source.name == "toy"
    )
    np.testing.assert_array_equal(np.asarray(source.x), X)
    np.testing.assert_array_equal(source.y, Y)
    np.testing.assert_array_equal(source.client_names[source.client], CLIENT)
    np.testing.assert_array_equal(source.is_test, IS_TEST)
    assert source.class_names == NAMES and source.num_classes == 3
    assert sources.detect_format(folder) == "arrayrecord" and sources.has_tests(
        "arrayrecord", folder
    )


def test_other_types_are_read_as_features_json_describes_them(tmp_path):
    gray = X[:12, :, :, 0]
    weight = RNG.normal(size=(12, 2)).astype(np.float32)
    big = np.arange(12) + 2**40
    kinds = {
        "gray": OF.Tensor(shape=(4, 5), dtype=np.uint8),
        "weight": OF.Tensor(shape=(2,), dtype=np.float32, encoding="bytes"),
        "label": np.float32,
        "writer": np.int64,
        "seen": np.bool_,
        "boxes": OF.Sequence(OF.BBoxFeature()),  # a type that is not read
    }
    columns = {
        "gray": gray,
        "weight": weight,
        "label": weight[:, 0],
        "writer": big,
        "seen": big % 2 == 0,
    }
    folder = prepared(tmp_path / "other", kinds, {**columns, "boxes": [[]] * 12}, train=12)
    (folder / "toy-test.array_record-00000-of-00001").unlink()

    def read(**options):
        return sources.arrayrecord(folder, **options)

    plain = read(client="writer", standardize=False)  # of two arrays, the first one
    assert (
        plain.is_test is None
        and plain.task == "regression"
        and plain.client.tolist() == list(range(12))
    )
    np.testing.assert_array_equal(plain.x[:4], gray[:4])
    np.testing.assert_array_equal(plain.client_names, big)
    np.testing.assert_allclose(plain.y, weight[:, 0], rtol=1e-6)
    np.testing.assert_array_equal(
        read(image="weight", label="seen", standardize=False).x[[3, 1]], weight[[3, 1]]
    )
    scaled = preparation.prepared(read(image="weight", label="seen")).x
    np.testing.assert_allclose(
        scaled, (weight - weight.mean(0)) / weight.std(0), rtol=1e-5, atol=1e-6
    )
    assert read(label="seen", fraction=0.5).x.shape == (6, 4, 5)


def test_an_index_reads_what_it_names_once_as_an_array_would(toy):
    x = sources.arrayrecord(toy("none"), standardize=False).x
    assert x[:] is x and (x.shape, x.ndim, x.size, len(x)) == (X.shape, X.ndim, X.size, 60)
    for index in (
        3,
        slice(50, 58),
        np.array([7, 7, 2]),
        np.arange(60) % 9 == 0,
        np.array([[4, -1], [0, 4]]),
    ):
        np.testing.assert_array_equal(x[index], X[index])
        if not isinstance(index, slice):
            np.testing.assert_array_equal(np.take(x, np.arange(60)[index], axis=0), X[index])
    stacked = Pooled(x, np.array([[5, 6], [9, -1], [1, 2]], np.int32))
    expected = np.where((stacked.index < 0)[..., None, None, None], 0, X[stacked.index])
    np.testing.assert_array_equal(stacked[np.array([1, 0])][...], expected[[1, 0]])


class Spy:
    """A source that notes which records are read."""

    def __init__(self, source):
        self.source = source
        self.read = []

    def __len__(self):
        return len(self.source)

    def __getitems__(self, rows):
        self.read += rows
        return self.source.__getitems__(rows)


def test_only_the_cohort_s_examples_are_read(toy):
    clients = pfl.data.read(toy(), client="who", test_fraction=0.2)
    x = clients.train.x
    spy = Spy(x.pool.examples.source)
    x.pool.examples = x.pool.examples._replace(source=spy)
    found = stacks.read(clients.train, np.array([2, 0]))
    rows = x.index[[2, 0]]
    np.testing.assert_array_equal(found.x, X[rows])
    assert sorted(spy.read) == sorted(rows.ravel().tolist()) and {*CLIENT[spy.read]} == {"a", "c"}


@pytest.mark.parametrize(
    ("method", "store"),  # the last one's server begins with examples
    [
        pytest.param(pfl.FedAvg(), "disk", marks=pytest.mark.slow),
        pytest.param(pfl.FedAvg(), "device", marks=pytest.mark.long),
        pytest.param(pfl.methods.FedAvgData(), "disk", marks=pytest.mark.long),
    ],
)
def test_a_run_from_the_file_is_a_run_from_memory(toy, method, store):
    there = pfl.data.read(toy(), client="who")
    here = pfl.Federation.from_arrays(X, Y, client=CLIENT, is_test=IS_TEST)
    assert there.official_test and list(there.client_names) == ["a", "b", "c"]
    np.testing.assert_allclose([there.scaling.mean, there.scaling.std], here.scaling)
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=4)
    execution = pfl.Execution(client_store=store, devices=1)
    runs = [
        pfl.Run(method, each, pfl.models.MLP((4,)), local, execution=execution)
        for each in (there, here)
    ]
    filed, held = (run.train(rounds=2, progress=False) for run in runs)

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    jax.tree.map(close, filed.state.models, held.state.models)
    np.testing.assert_allclose(filed.per_client_accuracy, held.per_client_accuracy)


def test_the_identity_of_a_run_is_that_of_the_same_arrays_in_another_file(toy, tmp_path):
    arrays = {"x": X, "y": Y, "client": CLIENT, "is_test": IS_TEST}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    there = [
        pfl.data.read(toy(how, how), client="who", standardize=False) for how in ("zlib", "png")
    ]
    assert len({digest(each) for each in (*there, pfl.data.read(tmp_path, standardize=False))}) == 1
    X[-1, 0, 0, 0] ^= 1
    other = digest(pfl.data.read(toy("bytes", "other"), client="who", standardize=False))
    X[-1, 0, 0, 0] ^= 1
    assert other != digest(there[0])


def test_damage_is_one_line_or_in_bytes_that_hold_nothing(toy):
    """Records have checksums: at worst, a damaged file is found when the run reads all examples for its identity."""
    folder = toy()
    path = folder / "toy-train.array_record-00000-of-00001"
    whole = path.read_bytes()

    def read():
        return digest(pfl.data.read(folder, client="who", standardize=False))

    right = read()
    refused = 0
    for _ in range(30):
        damaged = bytearray(whole[: RNG.integers(len(whole))] if RNG.random() < 0.3 else whole)
        for place in RNG.integers(max(len(damaged), 1), size=RNG.choice([1, 20])) * bool(damaged):
            damaged[place : place + 1] = RNG.bytes(1)
        path.write_bytes(damaged)
        try:
            assert read() == right
        except ArgumentError as error:
            refused += 1
            assert str(error).startswith(f"file={folder}: has a damaged ") and "\n" not in str(
                error
            )
    assert refused > 10


def test_other_folders_are_refused_in_a_line(toy, tmp_path, monkeypatch):
    folder, lost, torn, strange, sizes = (
        toy("png", name) for name in ("toy", "lost", "torn", "strange", "sizes")
    )
    (lost / "toy-test.array_record-00000-of-00001").rename(
        lost / "toy-test.array_record-00000-of-00002"
    )
    (torn / "features.json").write_text((torn / "features.json").read_text()[:-20])
    (strange / "toy-train.array_record-00000-of-00001").rename(
        strange / "toy-some.array_record-00000-of-00001"
    )
    described = json.loads((sizes / "features.json").read_text())
    shape = described["featuresDict"]["features"]["image"]["image"]["shape"]
    shape["dimensions"] = ["-1", "-1", "3"]
    (sizes / "features.json").write_text(json.dumps(described))
    wrong = toy("bytes", "wrong")
    (wrong / "features.json").write_text(
        (wrong / "features.json").read_text().replace('"4"', '"7"')
    )
    cases = [
        (tmp_path / "nowhere", {}, r"file=.*features\.json: cannot be read \(No such file"),
        (lost, {}, r"file=.*lost: has 1 of the 2 files of test"),
        (
            torn,
            {},
            r"file=.*features\.json: is not the features\.json of a data set that TFDS prepared",
        ),
        (strange, {}, r"file=.*strange: has no split train \(some, test\)"),
        (sizes, {}, r"image=image: accepted: a feature whose examples are arrays of one shape"),
        (folder, {"label": "lab"}, "label=lab: toy has no such column; did you mean label?"),
        (folder, {"client": "me"}, "client=me: toy has no such column"),
        (folder, {"image": "who"}, "image=who: accepted: a feature whose examples are arrays"),
        (
            folder,
            {"label": "image"},
            r"file=.*toy: needs a label and another array; found image, label, who",
        ),
        (
            wrong,
            {"image": "image"},
            r"file=.*wrong: has a damaged record from 0 to 59 \(cannot reshape",
        ),
    ]
    for path, options, said in cases:
        with pytest.raises(ArgumentError, match=f"^{said}") as caught:
            digest(pfl.data.read(path, format="arrayrecord", standardize=False, **options))
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "grain.sources", None)
    with pytest.raises(
        ArgumentError, match=r"^file=.*: needs grain: pip install 'pfljax\[arrayrecord\]'"
    ):
        sources.arrayrecord(folder)
