"""Setting up JAX: CPU devices, one per core, and the cache of compiled programs.

JAX has only one CPU device unless asked for more before it starts.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax

from pfljax.contract import compile_cache
from pfljax.contract.errors import ArgumentError, warn_caller
from pfljax.contract.host import num_cores

# the older way to ask for CPU devices, in XLA_FLAGS
BY_XLA = "xla_force_host_platform_device_count"


class _Start:
    """Whether this process has been set up; see `start`."""

    done = False


def chosen() -> bool:
    """Whether the user has set the number of CPU devices."""
    num_devices = getattr(jax.config, "jax_num_cpu_devices", -1)
    return num_devices >= 0 or BY_XLA in os.environ.get("XLA_FLAGS", "")


def start(devices: int = 0, keep_compiled: bool = True) -> None:
    """Sets up JAX before a process computes for the first time; later calls do nothing.

    `import pfljax` changes no setting of JAX: the first run calls this.

    Args:
        devices: Number of CPU devices; 0: what the user has set (`JAX_NUM_CPU_DEVICES`), otherwise one per core.
        keep_compiled: Whether JAX stores compiled programs for later processes; see `compile_cache`.
    """
    if _Start.done:
        return
    _Start.done = True
    set_devices(devices)
    if keep_compiled:
        compile_cache.use()


def set_devices(devices: int) -> bool:
    """Asks JAX for CPU devices; see `start`. Returns False if JAX has started and has its devices already."""
    try:
        if devices or not chosen():
            jax.config.update("jax_num_cpu_devices", devices or num_cores())
        # CPU devices of one process share a thread pool, so collectives can starve if several dispatches are in flight.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    except RuntimeError:
        return False
    return True


def use_cores(devices: int = 0) -> None:
    """Spreads clients over CPU cores: JAX gets one CPU device per core.

    The first `Run` does so by itself. Call this first if a script computes with JAX before its first run, since JAX
    cannot change the number of devices once it has started.

    Args:
        devices: Number of CPU devices; 0: what `JAX_NUM_CPU_DEVICES` says, otherwise one per core.

    Raises:
        ArgumentError: if JAX has started with fewer devices.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.use_cores()
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 0:
        raise ArgumentError("devices", "accepted: a number from 0", devices)
    start(devices)
    if devices and not set_devices(devices):
        check(devices)


def check_settings(compiled: bool = True) -> None:
    """Raises `ArgumentError` for a setting of JAX that nothing can be trained with; it names the setting.

    Args:
        compiled: Whether functions are to be compiled.
    """
    start()
    config: Any = jax.config
    if config.jax_numpy_dtype_promotion == "strict":
        text = "networks, optimizers and methods mix types; accepted: standard"
        raise ArgumentError("JAX_NUMPY_DTYPE_PROMOTION", text, "strict")
    if config.jax_numpy_rank_promotion == "raise":
        text = "networks and methods broadcast arrays of fewer axes; accepted: allow or warn"
        raise ArgumentError("JAX_NUMPY_RANK_PROMOTION", text, "raise")
    if config.jax_enable_x64:
        text = "models and what methods keep are float32 and int32; accepted: False"
        raise ArgumentError("JAX_ENABLE_X64", text, True)
    if config.jax_check_tracer_leaks:
        text = "networks and methods remember what they have traced; accepted: False"
        raise ArgumentError("JAX_CHECK_TRACER_LEAKS", text, True)
    if compiled and config.jax_disable_jit:
        text = "rounds are compiled; accepted: False, or plan=python, which calls functions as they are"
        raise ArgumentError("JAX_DISABLE_JIT", text, True)
    for direction in ("host_to_device", "device_to_device", "device_to_host"):
        guard = getattr(config, f"jax_transfer_guard_{direction}")
        if (guard or "").startswith("disallow"):
            text = "arrays are moved to devices and back; accepted: allow or log"
            raise ArgumentError(f"JAX_TRANSFER_GUARD_{direction.upper()}", text, guard)
    try:
        jax.local_devices()
    # a plugin that is not installed fails an assertion
    except (RuntimeError, AssertionError) as error:
        name = "JAX_PLATFORMS" if config.jax_platforms else "JAX_NUM_CPU_DEVICES"
        value = config.jax_platforms or getattr(config, "jax_num_cpu_devices", None)
        why = str(error).partition("\n")[0] or "its plugin is not installed, or finds no device"
        raise ArgumentError(name, f"JAX has no such device: {why}", value) from error


def on_cpu() -> bool:
    """Whether clients run on CPU devices."""
    return jax.local_devices()[0].platform == "cpu"


def check(devices: int) -> None:
    """Raises `ArgumentError` if this process has fewer devices."""
    available = len(jax.local_devices())
    if devices > available:
        text = f"accepted: 0 to {available}, the number of devices found"
        raise ArgumentError("devices", text, devices)


@functools.cache
def warn_once() -> None:
    """Warns if clients run on one of several cores because JAX had started before `start`."""
    num_devices = len(jax.local_devices())
    if on_cpu() and num_devices < num_cores() and not chosen():
        text = (
            f"clients run on {num_devices} of {num_cores()} CPU cores, since JAX started before the first run; "
            f"to be up to {num_cores() / num_devices:.0f} times faster, "
            "call pfl.use_cores() first or set JAX_NUM_CPU_DEVICES"
        )
        warn_caller(text, UserWarning)
