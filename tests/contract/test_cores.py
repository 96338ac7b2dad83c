"""CPU devices from Python, in processes of their own: one for each core, unless the user or JAX has settled it."""

import os
import subprocess
import sys

import pytest

import pfljax as pfl
from pfljax.contract.host import num_cores

COUNT = "import jax, pfljax as pfl; pfl.use_cores({}); print(jax.local_device_count())"
TOO_LATE = """
import jax, pfljax as pfl
jax.devices()
pfl.use_cores(1)
try:
    pfl.use_cores(64)
except pfl.ArgumentError as error:
    print(error)
"""
LATE = """
import warnings, jax
jax.local_devices()
import pfljax as pfl
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    plans = [pfl.Execution().make_plan() for _ in range(2)]
print(plans[0].num_devices, len(told), *(str(warning.message) for warning in told))
"""

IN_FOLDER = """
import sys, jax, pfljax as pfl
clients = pfl.data.digits(num_clients=2, train_examples=4)
def stop():
    print(jax.local_device_count())
    sys.exit()
pfl.compare([pfl.Local()], clients, pfl.models.MLP((4,)), rounds=1, seeds=[0], out={!r}, ready=stop)
"""


def run(code, **variables):
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    env |= {"JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_python_has_a_device_for_each_core():
    assert run(COUNT.format("")) == str(num_cores())


@pytest.mark.slow
def test_a_comparison_with_a_folder_has_a_device_for_each_core(tmp_path):
    assert run(IN_FOLDER.format(str(tmp_path / "study"))) == str(num_cores())


@pytest.mark.slow
def test_a_number_of_devices_is_set_before_jax_starts_or_refused():
    assert run(COUNT.format(3)) == "3"
    line = run(TOO_LATE, JAX_NUM_CPU_DEVICES="1")
    assert line == "devices=64: accepted: 0 to 1, the number of devices found"


def test_numbers_of_devices_are_checked():
    with pytest.raises(pfl.ArgumentError, match=r"^devices=-1: accepted: a number from 0$"):
        pfl.use_cores(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [{"JAX_NUM_CPU_DEVICES": "3"}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}],
)
def test_the_user_s_number_of_devices_is_kept(variables):
    assert run(COUNT.format(""), **variables) == "3"


@pytest.mark.slow
@pytest.mark.skipif(num_cores() == 1, reason="one core is all there is")
def test_one_line_says_what_is_lost_if_jax_started_before():
    devices, warnings, text = run(LATE).split(maxsplit=2)
    assert (devices, warnings) == ("1", "1")
    assert (
        f"1 of {num_cores()} CPU cores" in text and "pfl.use_cores()" in text and "\n" not in text
    )
    assert run(LATE, JAX_NUM_CPU_DEVICES="1") == "1 0"
