"""Four CPU devices, so that every test can lay clients out over one, two or four; must run before JAX starts."""

import os
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 4)
# Devices of one CPU process share a thread pool: with several dispatches in flight their collectives can starve.
jax.config.update("jax_cpu_enable_async_dispatch", False)
# Most of the suite's time is compiling. Commands that tests start compile as users' do.
jax.config.update("jax_disable_most_optimizations", True)
given = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = f"{given or ''} --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
jax.local_devices()
if given is None:
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = given

# pytest puts tests/ on the path, where the folder experiments/ would hide the package of that name.
sys.path.insert(0, str(Path(__file__).parents[1]))
