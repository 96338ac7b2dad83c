"""Federated data sets of TensorFlow Federated and FedJAX, written in their layouts."""

import sqlite3
import struct
import sys
import zlib

import flax.serialization
import msgpack
import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources

RNG = np.random.default_rng(0)
DIGITS = {  # by part and client, as in EMNIST
    part: {
        client: {
            "pixels": RNG.random((n, 28, 28)).astype(np.float32),
            "label": np.arange(n, dtype=np.int32),
        }
        for client, n in sizes.items()
    }
    for part, sizes in {"train": {"f1": 4, "f0": 3}, "test": {"f0": 2, "f1": 1}}.items()
}
SAID = {
    "train": {"LEAR": [b"abab", b"ba"], "FOOL": [b"bb"]},
    "test": {"LEAR": [b"ca"], "FOOL": [b"ac"]},
}


def write_hdf5(path, clients):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for client, arrays in clients.items():
            for name, values in arrays.items():
                kind = h5py.string_dtype() if isinstance(values, list) else None
                file.create_dataset(f"examples/{client}/{name}", data=values, dtype=kind)


def varint(number):
    """Protobuf's encoding of a number: 7 bits a byte, the lowest first."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def message(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def example(features):
    """A tf.train.Example by its wire format: kinds of lists are 1 (bytes), 2 (float) and 3 (int64)."""
    found = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            kind = 1
            packed = message(1, value)
        elif np.asarray(value).dtype.kind == "f":
            kind = 2
            packed = message(1, struct.pack(f"<{np.size(value)}f", *np.ravel(value)))
        else:
            kind = 3
            packed = message(1, b"".join(varint(int(each)) for each in np.ravel(value)))
        found += message(1, message(1, name.encode()) + message(2, message(kind, packed)))
    return message(1, found)


def write_tff(path, parts):
    base = sqlite3.connect(path)
    base.execute(
        "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
    )
    for part, clients in parts.items():
        for client, arrays in clients.items():
            for row in range(len(next(iter(arrays.values())))):
                features = {name: values[row] for name, values in arrays.items()}
                base.execute(
                    "INSERT INTO examples VALUES (?, ?, ?)", (part, client, example(features))
                )
    base.commit()
    base.close()


def write_fedjax(path, clients):
    base = sqlite3.connect(path)
    base.execute(
        "CREATE TABLE federated_data (client_id BLOB PRIMARY KEY, data BLOB, num_examples INTEGER)"
    )
    for client, arrays in clients.items():
        packed = zlib.compress(flax.serialization.msgpack_serialize(arrays))
        base.execute("INSERT INTO federated_data VALUES (?, ?, ?)", (client.encode(), packed, 1))
    base.commit()
    base.close()


@pytest.fixture(params=["hdf5", "tff", "fedjax"])
def emnist(request, tmp_path):
    """The path of a data set in one of the formats: its training file, or its only one."""
    if request.param == "tff":
        write_tff(tmp_path / "emnist.sqlite", DIGITS)
        return tmp_path / "emnist.sqlite"
    end, write = {"hdf5": (".h5", write_hdf5), "fedjax": (".sqlite", write_fedjax)}[request.param]
    for part, clients in DIGITS.items():
        write(tmp_path / f"emnist_{part}{end}", clients)
    return tmp_path / f"emnist_train{end}"


def test_clients_and_the_test_part_are_those_of_the_files(emnist):
    source = sources.tff(emnist, standardize=False)
    assert source.x.shape == (10, 28, 28, 1) and source.client_names.tolist() == ["f0", "f1"]
    for part, clients in DIGITS.items():
        for client, arrays in clients.items():
            rows = (source.client == int(client[1])) & (source.is_test == (part == "test"))
            np.testing.assert_array_equal(source.x[rows][..., 0], arrays["pixels"])
            np.testing.assert_array_equal(source.y[rows], arrays["label"])
    assert sources.has_tests(sources.detect_format(emnist), emnist)


def test_a_file_becomes_a_federation_the_same_each_time(emnist):
    first = data.read(emnist)
    again = data.read(str(emnist))
    assert data.digest(first) == data.digest(again) and first.official_test is True
    assert (first.train.size.tolist(), first.test.size.tolist()) == ([3, 4], [2, 1])
    if "_train" in emnist.name:  # either file names both
        other = emnist.with_name(emnist.name.replace("_train", "_test"))
        assert data.digest(data.read(other)) == data.digest(first)
        other.unlink()
        assert data.read(emnist, test_fraction=0.5).official_test is None
        assert not sources.has_tests(sources.detect_format(emnist), emnist)


def test_colors_stay_bytes(tmp_path):
    """CIFAR-100 of TFF stores colors as 64-bit lists, and FedJAX as bytes with a shape."""
    colors = RNG.integers(256, size=(4, 32, 32, 3))
    arrays = {
        "image": colors,
        "label": np.array([0, 1, 2, 1]),
        "coarse_label": np.array([0, 1, 1, 1]),
    }
    write_tff(tmp_path / "tff.sqlite", {"train": {"7": arrays}})
    write_fedjax(tmp_path / "fedjax.sqlite", {"7": arrays | {"image": colors.astype(np.uint8)}})
    for name in ("tff", "fedjax"):
        source = sources.tff(tmp_path / f"{name}.sqlite", standardize=False)
        np.testing.assert_allclose(source.x, colors / 255, rtol=1e-6)
        assert source.coarse.tolist() == [0, 1, 1, 1] and source.is_test is None
    source = sources.tff(tmp_path / "tff.sqlite", shape=(3, 1024), standardize=False)
    np.testing.assert_allclose(source.x, colors.reshape(4, 3, 1024) / 255, rtol=1e-6)


@pytest.mark.parametrize("format", ["hdf5", "tff", "fedjax"])
def test_snippets_are_what_roles_of_a_play_say(tmp_path, format):
    parts = {
        part: {name: {"snippets": said} for name, said in roles.items()}
        for part, roles in SAID.items()
    }
    if format == "tff":
        write_tff(path := tmp_path / "plays.sqlite", parts)
    elif format == "hdf5":
        for part, roles in parts.items():
            write_hdf5(tmp_path / f"plays_{part}.h5", roles)
        path = tmp_path / "plays_test.h5"
    else:  # arrays of bytes are FedJAX's own extension of msgpack

        def packed(said):
            return msgpack.ExtType(4, msgpack.packb(((len(said),), said), use_bin_type=True))

        for part, roles in SAID.items():
            base = sqlite3.connect(path := tmp_path / f"plays_{part}.sqlite")
            base.execute(
                "CREATE TABLE federated_data (client_id BLOB PRIMARY KEY, data BLOB, num_examples INTEGER)"
            )
            for name, said in roles.items():
                blob = zlib.compress(msgpack.packb({"snippets": packed(said)}))
                base.execute(
                    "INSERT INTO federated_data VALUES (?, ?, ?)", (name.encode(), blob, len(said))
                )
            base.commit()
            base.close()
    source = sources.tff(path)
    assert source.client_names.tolist() == ["FOOL", "LEAR"]
    assert source.tokens and source.num_classes == 4  # a line's end, a, b, c
    own = {
        (int(k), bool(test)): source.y[(source.client == k) & (source.is_test == test)]
        for k in (0, 1)
        for test in (0, 1)
    }
    # FOOL trains on "bb", with a window that predicts its second b, and is tested on "ac".
    assert own[0, False][0, 0] == 2 and own[0, True][0, 0] == 3 and own[1, True][0, 0] == 1
    # "abab\nba" from its second character
    np.testing.assert_array_equal(own[1, False][0][:6], [2, 1, 2, 0, 2, 1])


def test_without_a_test_part_the_last_lines_are_for_testing(tmp_path):
    write_tff(tmp_path / "p.sqlite", {"train": {"LEAR": {"snippets": [b"ab"] * 4 + [b"cd"]}}})
    source = sources.tff(tmp_path / "p.sqlite")

    def real(y):
        return {*y[y < 255].tolist()}

    assert real(source.y[~source.is_test]) == {0, 1, 2} and real(source.y[source.is_test]) == {4}


def test_other_files_are_refused_in_a_line(tmp_path):
    pixels = DIGITS["train"]["f0"]["pixels"]
    write_tff(tmp_path / "words.sqlite", {"train": {"a": {"tokens": np.ones((2, 3), int)}}})
    write_fedjax(
        tmp_path / "two.sqlite", {"a": {"x": pixels, "y": np.arange(3)}, "b": {"x": pixels}}
    )
    write_fedjax(tmp_path / "torn.sqlite", DIGITS["train"])
    base = sqlite3.connect(tmp_path / "torn.sqlite")
    base.execute("UPDATE federated_data SET data = substr(data, 1, 100)")
    base.execute("CREATE TABLE other (a INTEGER)")
    base.commit()
    base.close()
    sqlite3.connect(tmp_path / "none.sqlite").executescript(
        "CREATE TABLE other (a INTEGER)"
    ).connection.close()
    (tmp_path / "text.h5").write_text("hello")
    (tmp_path / "head.sqlite").write_bytes((tmp_path / "two.sqlite").read_bytes()[:3000])
    cases = {
        "words.sqlite": r"has tokens of clients; accepted: pixels, image or x, and label or y; or snippets",
        "two.sqlite": "has clients with different arrays",
        "torn.sqlite": "is not a federated data set in SQLite .ValueError: a client's data end early",
        "none.sqlite": r"has tables other; accepted: examples \(TFF\) or federated_data \(FedJAX\)",
        "text.h5": "is neither HDF5 nor SQLite",
        "head.sqlite": "is not a federated data set in SQLite",
        "nowhere.h5": "cannot be read .No such file",
    }
    for name, said in cases.items():
        with pytest.raises(ArgumentError, match=f"^file=.*{name}: {said}") as caught:
            data.read(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ArgumentError, match=r"^shape=9,9: examples have 784 numbers"):
        write_tff(tmp_path / "emnist.sqlite", DIGITS)
        sources.tff(tmp_path / "emnist.sqlite", shape=(9, 9))


def test_other_hdf5_files_are_refused_in_a_line(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["clients"] = np.arange(3)
    write_hdf5(tmp_path / "torn.h5", DIGITS["train"])
    whole = (tmp_path / "torn.h5").read_bytes()
    (tmp_path / "torn.h5").write_bytes(whole[: len(whole) // 2])
    for name, said in {
        "other.h5": "has no group examples",
        "torn.h5": "is a damaged HDF5 file",
    }.items():
        with pytest.raises(ArgumentError, match=f"^file=.*{name}: {said}") as caught:
            sources.tff(tmp_path / name)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ArgumentError, match=r"^file=.*: needs h5py: pip install 'pfljax\[hdf5\]'"):
        sources.tff(tmp_path / "other.h5")
