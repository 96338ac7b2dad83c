"""Folders of npy files: the same federation as the arrays themselves, read from the file as clients take part."""

import jax
import numpy as np
import optax
import pytest

import pfljax as pfl
from pfljax.contract.errors import ArgumentError
from pfljax.contract.mapped import mapping, release
from pfljax.data import digest

RNG = np.random.default_rng(0)
X = RNG.integers(256, size=(60, 4, 4, 1), dtype=np.uint8)
Y = RNG.integers(3, size=60)
CLIENT = np.repeat(["a", "b", "c"], 20)


def saved(folder, **arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def test_a_view_knows_its_file_and_gives_pages_back_without_losing_anything(tmp_path):
    saved(tmp_path, x=X)
    found = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert mapping(found[3:, 0]) is mapping(np.asarray(found)) is not None
    release(found)
    np.testing.assert_array_equal(found, X)
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")  # whose changes exist in memory alone
    changed[0] = 7
    release(changed)
    assert mapping(changed) is mapping(X) is None and (changed[0] == 7).all()


@pytest.mark.slow
def test_pixels_stay_in_the_file_and_are_scaled_in_the_mini_batch(tmp_path):
    """Against the same arrays in memory, which are scaled at once: the same models, scores and predictions."""
    folder = saved(tmp_path, x=X, y=Y, client=CLIENT, is_test=np.arange(60) % 5 == 0)
    there = pfl.data.read(folder)
    here = pfl.Federation.from_arrays(X, Y, client=CLIENT, is_test=np.arange(60) % 5 == 0)
    assert there.official_test and list(there.client_names) == ["a", "b", "c"]
    assert there.train.x.dtype == np.uint8 and mapping(there.train.x.pool) is not None
    np.testing.assert_allclose(there.scaling.mean, here.scaling.mean)
    rows = X[np.arange(60) % 5 != 0].astype(float)
    np.testing.assert_allclose(
        [there.scaling.mean, there.scaling.std], [[rows.mean()], [rows.std()]]
    )
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=4)
    for store in ("device", "disk"):
        execution = pfl.Execution(client_store=store, devices=1)
        runs = [
            pfl.Run(pfl.FedAvg(), clients, pfl.models.CNN((4,)), local, execution=execution)
            for clients in (there, here)
        ]
        mapped, held = (run.train(rounds=3) for run in runs)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            mapped.state.models,
            held.state.models,
        )
        np.testing.assert_allclose(
            mapped.predict(X[:2], client=0), held.predict(X[:2], client=0), rtol=1e-4
        )


def test_the_file_s_content_is_part_of_a_run_s_identity(tmp_path):
    first = digest(pfl.data.read(saved(tmp_path, x=X, y=Y, client=CLIENT)))
    assert digest(pfl.data.read(tmp_path)) == first
    other = X.copy()
    other[-1, 0, 0, 0] ^= 1
    assert digest(pfl.data.read(saved(tmp_path, x=other))) != first


def test_floats_stay_in_the_file_and_must_be_finite(tmp_path):
    floats = RNG.normal(size=(60, 5)).astype(np.float32)
    folder = saved(tmp_path, x=floats, y=Y)
    assert mapping(pfl.data.read(folder, 3, standardize=False).train.x.pool) is not None
    scaled = pfl.data.read(folder, 3)
    assert (
        mapping(scaled.train.x.pool) is not None
        and mapping(scaled.standardized.train.x.pool) is not None
    )
    expected = (floats - scaled.scaling.mean) / scaled.scaling.std
    rows = scaled.train.x.index[0, :4]
    np.testing.assert_allclose(
        scaled.standardized.train.x[0, :4], expected[rows], rtol=1e-5, atol=1e-6
    )
    floats[41, 2] = np.nan
    with pytest.raises(ArgumentError, match=r"x is NaN or infinite in 1 rows; the first is row 41"):
        pfl.data.read(saved(tmp_path, x=floats), 3)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not an npy file with an array of numbers"),
        (b"\x93NUMPY\x01\x00", "is not an npy file"),
        (b"not an array at all", "is not an npy file"),
    ],
)
def test_damaged_files_are_one_line(tmp_path, content, text):
    saved(tmp_path, x=X, y=Y)
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ArgumentError, match=text):
        pfl.data.read(tmp_path)


def test_a_file_that_is_shorter_than_its_header_says_is_one_line(tmp_path):
    saved(tmp_path, x=X, y=Y)
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-100])
    with pytest.raises(ArgumentError, match="is not an npy file"):
        pfl.data.read(tmp_path)
    (tmp_path / "y.npy").unlink()
    (tmp_path / "x.npy").write_bytes(whole)
    with pytest.raises(ArgumentError, match=r"y\.npy"):
        pfl.data.read(tmp_path)
