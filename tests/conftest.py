"""Four CPU devices, so that every test can lay clients out over one, two or four; must run before JAX starts."""

import os
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 4)
# Devices of one CPU process share a thread pool: with several dispatches in flight their collectives can starve.
jax.config.update("jax_cpu_enable_async_dispatch", False)
# Most of the suite's time is compiling.
jax.config.update("jax_disable_most_optimizations", True)

# pytest puts tests/ on the path, where the folder experiments/ would hide the package of that name.
sys.path.insert(0, str(Path(__file__).parents[1]))
