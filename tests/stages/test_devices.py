"""How long clients take and when they are available: the drawn devices' distributions, and files of measured ones."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfljax.contract.errors import ArgumentError
from pfljax.stages.devices import Clock

CLIENTS = jnp.arange(4000)


def each(clock, gradients=1.0, num_bytes=0.0, examples=1):
    """Seconds of many clients."""
    seconds = jax.vmap(lambda client: clock.seconds(client, gradients, examples, num_bytes))
    return np.asarray(jax.jit(seconds)(CLIENTS))


def available(clock, now, clients=CLIENTS):
    at_once = jax.vmap(lambda client: clock.available(client, jnp.float32(now)))
    return np.asarray(jax.jit(at_once)(clients))


def test_seconds_are_those_of_computing_and_sending():
    clock = Clock(compute="constant:2", bandwidth="constant:8")  # a megabyte a second
    np.testing.assert_allclose(each(clock, gradients=3.0, num_bytes=5e5), 6.5, rtol=1e-6)


def test_lognormal_devices_have_their_median_and_spread():
    computing = np.log(each(Clock(compute="lognormal:0.5:0.7")))
    sending = np.log(each(Clock(bandwidth="lognormal:4:1.2"), gradients=0.0, num_bytes=1e6 / 8))
    # Standard errors: sigma / sqrt(n) of means, sigma / sqrt(2 n) of deviations.
    for found, middle, sigma in ((computing, 0.5, 0.7), (sending, 1 / 4, 1.2)):
        assert abs(found.mean() - np.log(middle)) < 4 * sigma / np.sqrt(4000)
        assert abs(found.std() - sigma) < 4 * sigma / np.sqrt(8000)
    assert abs(np.corrcoef(computing, sending)[0, 1]) < 4 / np.sqrt(4000)


def test_of_two_classes_a_share_is_slower():
    computing = each(Clock(compute="two_class:0.5:0.2:10"))
    sending = each(Clock(bandwidth="two_class:8:0.2:10"), gradients=0.0, num_bytes=1e6)
    for found, fast in ((computing, 0.5), (sending, 1.0)):
        slow = np.isclose(found, 10 * fast)
        assert (slow | np.isclose(found, fast)).all()
        assert abs(slow.mean() - 0.2) < 4 * np.sqrt(0.16 / 4000)


def test_another_seed_draws_other_devices():
    assert (each(Clock()) == each(Clock())).all() and (each(Clock()) != each(Clock(seed=1))).all()


@pytest.mark.parametrize("kind", ["json", "pickle"])
def test_devices_of_a_file(tmp_path, kind):
    """FedScale's layout: milliseconds of an example's inference and kilobits a second, by id."""
    devices = {
        2: {"computation": 100.0, "communication": 4000.0},
        1: {"computation": 50.0, "communication": 8000.0},
    }
    path = tmp_path / f"devices.{kind}"
    path.write_bytes(json.dumps(devices).encode() if kind == "json" else pickle.dumps(devices))
    found = each(Clock(devices=str(path)), gradients=2.0, num_bytes=1e6, examples=5)[:4]
    # Three inferences of 5 examples, twice; 8 megabits.
    np.testing.assert_allclose(found, [2 * 3 * 5 * 0.05 + 1, 2 * 3 * 5 * 0.1 + 2] * 2, rtol=1e-6)


def test_daily_clients_are_available_for_their_share_of_a_day():
    clock = Clock(availability="daily:0.25")
    hours = np.arange(0, 72, dtype=np.float32) * 3600
    at_hour = jax.vmap(clock.available, in_axes=(0, None))
    found = np.asarray(jax.jit(jax.vmap(at_hour, in_axes=(None, 0)))(CLIENTS[:500], hours))
    # In each three days, for 18 of 72 hours, give or take one at both ends of each stretch.
    assert (np.abs(found.sum(axis=0) - 18) <= 3).all()
    assert (found[:24] == found[24:48]).all()
    assert np.ptp(found.mean(axis=1)) < 0.1  # at every hour, about as many


def test_times_of_a_file_repeat(tmp_path):
    times = [
        {"active": [0, 50], "inactive": [10, 60], "finish_time": 100},
        {"active": [20], "inactive": [90]},
    ]
    times[1]["finish_time"] = 200
    path = tmp_path / "times.pickle"
    path.write_bytes(pickle.dumps(times))
    clock = Clock(availability=str(path))
    for now, expected in (
        (5, [1, 0]),
        (30, [0, 1]),
        (55, [1, 1]),
        (105, [1, 0]),
        (150, [1, 0]),
        (199, [0, 0]),
    ):
        assert (
            available(clock, now, jnp.arange(4)).tolist() == [bool(part) for part in expected] * 2
        ), now


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"compute": "normal:1:2"},
            r"^compute=normal:1:2: accepted: constant:VALUE, lognormal:MEDIAN:SIGMA",
        ),
        ({"compute": "lognormal:0:1"}, "^compute=lognormal:0:1"),
        ({"bandwidth": "two_class:5:1.5:2"}, "a SHARE is at most 1, a FACTOR at least 1$"),
        ({"bandwidth": "constant"}, "^bandwidth=constant"),
        (
            {"availability": "daily:0"},
            r"^availability=daily:0: accepted: always, daily:SHARE, or the path",
        ),
        ({"availability": "nowhere.pkl"}, "^availability=nowhere.pkl"),
        ({"devices": "nowhere.pkl"}, r"^devices=nowhere.pkl: cannot be read: .*No such file"),
        ({"deadline": 0.0}, "^deadline=0.0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields, said):
    with pytest.raises(ArgumentError, match=said):
        Clock(**fields)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            pickle.dumps({1: {"computation": 1.0}}),
            "a positive computation and communication of each device",
        ),
        (pickle.dumps({1: {"computation": 1.0, "communication": 0.0}}), "a value is not above 0"),
        (pickle.dumps(np.float64), "not only numbers, lists and dicts"),
        (b"damaged", "cannot be read"),
        (pickle.dumps({}), "it has no devices"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, said):
    path = tmp_path / f"devices-{hash(said)}.pickle"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=said):
        Clock(devices=str(path))
    if b"computation" not in content:
        with pytest.raises(ArgumentError):
            Clock(availability=str(path))


def test_what_a_file_has_is_not_given_twice(tmp_path):
    path = tmp_path / "devices.json"
    path.write_text(json.dumps([{"computation": 1.0, "communication": 1.0}]))
    with pytest.raises(
        ArgumentError,
        match=r"^compute=constant:1: accepted with devices, whose file has them: logn",
    ):
        Clock(devices=str(path), compute="constant:1")
