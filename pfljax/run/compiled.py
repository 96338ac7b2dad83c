"""A run's compiled functions, and helpers that both client stores use to make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from pfljax.contract.held import Holder, taking
from pfljax.contract.types import Algorithm, Array, ClientData, First, Key, PyTree, Start, State
from pfljax.exchange.plan import ExecutionPlan
from pfljax.run import memory


class Saving(NamedTuple):
    """How to save a state whose rows are in files or shared between processes.

    Attributes:
        like: Shapes, dtypes and locations of a checkpoint's content.
        freeze: state -> checkpoint content. Writes everything else to disk first.
        thaw: (number of the run, its key of `Compiled.init`, checkpoint content) -> state.
        saved: Called with the state once the checkpoint is complete. Earlier checkpoints are unusable from then on.
        check: Number of rounds -> bytes on disk that all runs may need. Raises an error if fewer are free.
    """

    like: Any
    freeze: Callable[[State], Any]
    thaw: Callable[[int, Key, Any], State]
    saved: Callable[[State], None]
    check: Callable[[int], int]


class Jitted:
    """Like `jax.jit`, for functions that compute with a network: its frozen arrays become an argument of the program.

    Attributes:
        frozen: These arrays, on the plan's devices.
    """

    def __init__(self, network: Holder, plan: ExecutionPlan, fn: Callable, **options: Any):
        """Takes the options of `jax.jit`."""
        self.frozen = network.on(plan)
        self.jitted = jax.jit(taking(network, fn), **options)

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        return self.jitted(*args, frozen=self.frozen)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments or their shapes; compiled, it takes `frozen` by name."""
        return self.jitted.lower(*args, frozen=self.frozen)

    def used(self, *args: Any) -> tuple:
        """Returns trees of bool like the arguments: whether a result of the function depends on the array."""
        traced = self.jitted.trace(*args, frozen=self.frozen)
        return used_inputs(traced.jaxpr, args, self.frozen)


def used_inputs(traced: ClosedJaxpr, args: tuple, frozen: PyTree) -> tuple:
    """Returns trees of bool like `args`: whether a result of a traced function depends on the array.

    Args:
        traced: The function, traced with these arguments and `frozen`, which it takes by this name.
        args: Its arguments, or their shapes.
        frozen: The network's frozen arrays, or their shapes.
    """
    all_results = [True] * len(traced.jaxpr.outvars)
    _, is_used = partial_eval.dce_jaxpr(traced.jaxpr, all_results)
    structure = jax.tree.structure((args, {"frozen": frozen}))
    used, _ = jax.tree.unflatten(structure, is_used)
    return used


class Lowered(NamedTuple):
    """A program of rounds that is not compiled yet.

    Attributes:
        algorithm: The method, built for the plan.
        state: Shapes and locations of the state that the program takes.
        program: The program.
        frozen: The model's frozen arrays, which the compiled program takes by this name.
        ahead: Bytes on one device of what is held beside the program's arguments.
    """

    algorithm: Algorithm
    state: State
    program: jax.stages.Lowered
    frozen: Any
    ahead: int = 0


@dataclasses.dataclass
class Compiled:
    """A run's compiled functions, and where its state is stored.

    Attributes:
        algorithm: The method, built for `plan`.
        plan: How clients are mapped to devices.
        state: A `State` of ShapeDtypeStructs with shardings. Device store: of all runs. Host store: of one run, with
            NumPy arrays for the clients' rows.
        init: (key, clients) -> State.
        segment: (key, start, stop, state, clients) -> (state, stacked records, number of rounds done).
        memory: Memory that a segment needs on one device.
        compile_seconds: Compile time in seconds.
        making: Memory that initializing the state needs on one device, if it is initialized on the devices.
        saving: How to save the state; None: unchanged.
        cohort: (key of the rounds, number of a round) -> ids of its cohort (S,), if these follow from the key alone and
            checkpoints may have some of the rows; None: otherwise.
    """

    algorithm: Algorithm
    plan: ExecutionPlan
    state: Any
    init: Callable[[Key, ClientData], State]
    segment: Callable
    memory: memory.MemoryPlan
    compile_seconds: float
    making: memory.MemoryPlan | None = None
    saving: Saving | None = None
    cohort: Callable[[Key, int], Array] | None = None


def state_shardings(plan: ExecutionPlan, state: State, axis: int = 0) -> State:
    """Returns shardings that spread the rows (at `axis`) of clients, and of clients' own models, over the devices.

    Arrays of one model are spread over the devices that share it.
    """

    def shardings_of(part: PyTree, by_rows: bool = False, stacked: bool = True) -> PyTree:
        leading = axis + 1 if stacked else axis

        def sharding_of(leaf: Array) -> jax.sharding.Sharding:
            return plan.sharding(leaf, by_rows=by_rows, axis=axis, leading=leading)

        return jax.tree.map(sharding_of, part)

    server = Start(
        state=shardings_of(state.server.state, stacked=False),
        models=shardings_of(state.server.models),
        opt_state=shardings_of(state.server.opt_state),
    )
    clients = First(
        row=shardings_of(state.clients.row, by_rows=True),
        model=shardings_of(state.clients.model, by_rows=True),
        opt_state=shardings_of(state.clients.opt_state, by_rows=True),
    )
    return State(server, clients, shardings_of(state.round))


def shaped(stack: Any, shardings: Any) -> Any:
    """Returns the shapes and dtypes of a tree of arrays, with shardings."""

    def shape_of(leaf: Array, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shape_of, stack, shardings)
