"""Data sets that TFDS has prepared: what is read, and what is said where nothing is prepared."""

import importlib
import sys

import numpy as np
import pytest

from pfljax.contract.errors import ArgumentError
from pfljax.data import sources
from pfljax.data.preparation import prepared


def test_tfds_reads_both_splits_without_tensorflow(tmp_path):
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=6):
        source = sources.tfds("mnist", data_dir=str(tmp_path), standardize=False)
        part = sources.tfds("mnist", data_dir=str(tmp_path), fraction=0.5)
    assert (
        source.x.shape == (12, 28, 28, 1)
        and source.x.dtype == np.float32
        and 0.5 < source.x.max() <= 1
    )
    # known to TFDS, whatever the examples hold
    assert source.y.shape == (12,) and source.num_classes == 10
    np.testing.assert_array_equal(source.is_test, np.arange(12) >= 6)
    assert len(part.y) == 6
    np.testing.assert_allclose(prepared(part).x[~part.is_test].mean(), 0, atol=1e-5)
    assert "tensorflow" not in sys.modules


def test_without_tfds_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(
        ArgumentError, match=r"mnist: needs tensorflow-datasets: pip install 'pfljax\[tfds\]'"
    ):
        sources.tfds("mnist")


def test_tfds_reads_coarse_labels(tmp_path):
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=6):
        source = sources.tfds("cifar100", data_dir=str(tmp_path))
    assert (
        source.coarse.shape == (12,) and source.coarse.dtype == np.int32 and source.client is None
    )
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
    [
        ("toy_users", '"user": tfds.features.Text()', ["b", "a"]),
        ("toy_writers", '"writer": np.int64', [9, -3]),
    ],
)
def test_tfds_clients_are_those_that_a_field_names(toy, name, field, owners):
    source = toy(name, f"OWNER, OWNERS = {{{field}}}, {owners}")
    assert source.client.dtype == np.int64
    # sorted: the second owner is client 0
    np.testing.assert_array_equal(source.client, 1 - source.x[:, 0] % 2)


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
    assert (
        message.startswith(f"dataset=tfds:mnist: not prepared in data_dir={tmp_path}")
        and "\n" not in message
    )
    assert "pip install 'pfljax[prepare]'" in message
    assert (
        f"tfds.builder('mnist', file_format='array_record', data_dir='{tmp_path}').download_and_prepare()"
        in message
    )
    with pytest.raises(
        ArgumentError, match=r"dataset=tfds:minst: TFDS has no such data set; nearest: .*mnist"
    ):
        sources.tfds("minst", data_dir=str(tmp_path))
    with pytest.raises(
        ArgumentError, match=r"dataset=tfds:mnist/none: .*BuilderConfig none not found"
    ):
        sources.tfds("mnist/none", data_dir=str(tmp_path))
