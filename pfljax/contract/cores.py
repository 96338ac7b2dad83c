"""CPU devices, one per core: JAX has only one unless asked for more before it is initialized."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import jax

from pfljax.contract.errors import ArgumentError
from pfljax.contract.host import num_cores

# the older way to ask for CPU devices, in XLA_FLAGS
BY_XLA = "xla_force_host_platform_device_count"


def chosen() -> bool:
    """Whether the user has set the number of CPU devices."""
    num_devices = getattr(jax.config, "jax_num_cpu_devices", -1)
    return num_devices >= 0 or BY_XLA in os.environ.get("XLA_FLAGS", "")


def use(devices: int = 0) -> None:
    """Asks JAX for CPU devices if it has not been initialized.

    Args:
        devices: Number of CPU devices; 0: what the user has set (`JAX_NUM_CPU_DEVICES`), otherwise one per core.
    """
    try:
        if devices or not chosen():
            jax.config.update("jax_num_cpu_devices", devices or num_cores())
        # CPU devices of one process share a thread pool, so collectives can starve if several dispatches are in flight.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    except RuntimeError:  # JAX has started
        return


def check_settings(compiled: bool = True) -> None:
    """Raises `ArgumentError` for a setting of JAX that nothing can be trained with; it names the setting.

    Args:
        compiled: Whether functions are to be compiled.
    """
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
    """Warns if clients run on one of several cores because JAX was initialized before pfljax was imported."""
    num_devices = len(jax.local_devices())
    if on_cpu() and num_devices < num_cores() and not chosen():
        text = (
            f"clients run on {num_devices} of {num_cores()} CPU cores, since JAX started before pfljax was imported; "
            f"to be up to {num_cores() / num_devices:.0f} times faster, import pfljax first or set JAX_NUM_CPU_DEVICES"
        )
        warnings.warn(text, stacklevel=2)
