"""Follows random keys through a traced function: which are drawn from twice, and which in every pass of a loop.

A key is used up by drawing from it or splitting it. One that is used up may be used no second time, not even to fold a
number into it; a key into which numbers are folded may be folded as often as wanted. In the body of a loop, a key that
is the same in every pass gives the same numbers in every pass.

There is one exception: the key of a client's epochs orders its examples, and the numbers of its mini-batches are folded
into it. Nothing of a mini-batch can equal those bits, as every use of it folds another number first.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

DRAWS = ("random_bits", "random_split", "random_gamma")
# Primitives whose results are the same keys in another shape.
SAME = (
    "copy",
    "copy_p",
    "device_put",
    "sharding_constraint",
    "squeeze",
    "reshape",
    "broadcast_in_dim",
    "stage",
)


class Use(NamedTuple):
    """A way in which a key is used.

    Attributes:
        primitive: The name of the primitive that reads it.
        shape: The shape of what it returns.
    """

    primitive: str
    shape: tuple[int, ...]

    @property
    def is_draw(self) -> bool:
        """Whether the key is used up."""
        return self.primitive in DRAWS


Uses = dict[Hashable, list[Use]]


class Tracker:
    """Reads the equations of a function; an atom's identity is equal to another one's only if both are the same keys.

    Attributes:
        in_loops: Uses of keys that are the same in every pass of a loop.
    """

    def __init__(self):
        self.numbers = itertools.count()
        self.in_loops: list[Use] = []

    def new(self) -> Hashable:
        """An identity that nothing else has."""
        return next(self.numbers)

    def read(
        self, jaxpr: Any, inputs: Sequence[Hashable], constant: set[Hashable]
    ) -> tuple[list[Hashable], Uses]:
        """Identities of the outputs, and how keys are used.

        Args:
            jaxpr: The function.
            inputs: Identities of its inputs.
            constant: Identities of what is the same in every pass of the loop around; empty outside of loops.
        """
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        uses: Uses = {}
        in_loop = bool(constant)

        def identity(atom: Any) -> Hashable:
            if isinstance(atom, core.Literal):
                found = ("value", repr(atom.val))
                constant.add(found)
                return found
            if atom not in known:  # a captured array
                known[atom] = self.new()
                constant.add(known[atom])
            return known[atom]

        for equation in jaxpr.eqns:
            arguments = [identity(atom) for atom in equation.invars]
            name = equation.primitive.name
            results = self.results_of_call(equation, arguments, constant, uses)
            if results is None:
                results = [self.new() for _ in equation.outvars]
                if name == "random_fold_in":
                    results = [("folded", *arguments)]
                elif name in SAME:
                    results = [arguments[0]]
                elif name in ("slice", "dynamic_slice", "gather"):
                    how = repr(
                        {key: equation.params.get(key) for key in ("start_indices", "strides")}
                    )
                    results = [(name, how, *arguments)]
                if all(argument in constant for argument in arguments):
                    constant.update(results)
                if name in DRAWS or name == "random_fold_in":
                    use = Use(name, equation.outvars[0].aval.shape)
                    uses.setdefault(arguments[0], []).append(use)
                    if in_loop and use.is_draw and arguments[0] in constant:
                        self.in_loops.append(use)
            known.update(zip(equation.outvars, results, strict=True))
        return [identity(atom) for atom in jaxpr.outvars], uses

    def results_of_call(
        self, equation: Any, arguments: list[Hashable], constant: set[Hashable], uses: Uses
    ) -> list[Hashable] | None:
        """Identities of the results of an equation that calls functions; None if it does not."""
        name = equation.primitive.name
        params = equation.params
        if name == "cond":
            functions = [getattr(branch, "jaxpr", branch) for branch in params["branches"]]
            branches = [self.read(function, arguments[1:], constant) for function in functions]
            for key in {key for _, used in branches for key in used}:
                uses.setdefault(key, []).extend(
                    max((used.get(key, []) for _, used in branches), key=len)
                )
            return [self.new() for _ in equation.outvars]
        if name == "scan":
            body = params["jaxpr"]
            body = getattr(body, "jaxpr", body)
            # since JAX 0.12 it is not said which inputs are constant: all may vary
            if "num_consts" not in params:
                rows = [self.new() for _ in arguments]
                self.read_loop(body, [], [], rows, False, uses)
                return [self.new() for _ in equation.outvars]
            num_consts = params["num_consts"]
            num_carry = params["num_carry"]
            consts = arguments[:num_consts]
            carry = arguments[num_consts : num_consts + num_carry]
            rows = [("row", each) for each in arguments[num_consts + num_carry :]]
            self.read_loop(body, consts, carry, rows, params["length"] > 1, uses)
            return [self.new() for _ in equation.outvars]
        if name == "while":
            first = params["cond_nconsts"]
            second = first + params["body_nconsts"]
            body = params["body_jaxpr"]
            body = getattr(body, "jaxpr", body)
            self.read_loop(body, arguments[first:second], arguments[second:], [], True, uses)
            return [self.new() for _ in equation.outvars]
        inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
        if inner is None:
            return None
        results, used = self.read(getattr(inner, "jaxpr", inner), arguments, constant)
        for key, found in used.items():
            uses.setdefault(key, []).extend(found)
        return results

    def read_loop(
        self,
        body: Any,
        consts: list[Hashable],
        carry: list[Hashable],
        rows: list[Hashable],
        repeats: bool,
        uses: Uses,
    ) -> None:
        """Reads the body of a loop. Carried values differ from pass to pass, unless it returns them as they are."""
        number = len(consts)
        returned = body.outvars[: len(carry)]
        fixed = [
            outer if inner is after else ("carried", self.new())
            for outer, inner, after in zip(
                carry, body.invars[number : number + len(carry)], returned, strict=True
            )
        ]
        same = {*consts, *(set(fixed) & set(carry))} if repeats else set()
        _, used = self.read(body, [*consts, *fixed, *rows], same)
        for key, found in used.items():
            uses.setdefault(key, []).extend(found)


def misused(jaxpr: Any) -> list[str]:
    """What a traced function does with keys that it should not, a line each."""
    tracker = Tracker()
    inputs = [tracker.new() for _ in jaxpr.invars]
    _, uses = tracker.read(jaxpr, inputs, set())
    found = [
        f"the same numbers in every pass of a loop: {use.primitive} {use.shape}"
        for use in tracker.in_loops
    ]
    for key, used in uses.items():
        draws = {use for use in used if use.is_draw}
        orders_examples = all(
            use.primitive == "random_bits" and len(use.shape) == 2 for use in draws
        )
        if len(draws) > 1 or (draws and len(draws) < len(set(used)) and not orders_examples):
            found.append(f"a key is used twice: {[tuple(use) for use in used]}, {key}")
    return found
