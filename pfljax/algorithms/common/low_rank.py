"""LoRA's matrices in methods that treat A, B or their product apart.

A product a b is added to a frozen weight: a (L, inputs, r) and b (L, r, outputs), for L stacked layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.aggregation import mean
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Aggregate, Array, Factors, Params, PyTree, Traffic
from pfljax.local.problem import Problem

A, LORA = "_lora_a$", "_lora_[ab]$"  # ends of the paths of each A; of each A and B


def required(problem: Problem, name: str) -> int:
    """Returns the largest rank r for a method that needs LoRA.

    Raises:
        ArgumentError: if the model has none.
    """
    found = jax.eval_shape(problem.model.network.factors, problem.model.network.shapes)
    if not found:
        text = "needs LoRA; accepted: a frozen model with adapters.lora() among what is trained"
        raise ArgumentError("method", text, name)
    return max(a.shape[-1] for a, _ in found.values())


def split(problem: Problem, params: Params) -> tuple[Params, Params]:
    """LoRA's parameters and the others; None in place of those left out."""
    return tree.partition(params, problem.model.named(params, LORA))


def sent(problem: Problem, models: Params) -> PyTree:
    """What is averaged in place of A and B of models (J, ...): the products, and the other parameters."""

    def one(params):
        products = {path: jnp.matmul(a, b) for path, (a, b) in problem.model.network.factors(params).items()}
        return {"products": products, "others": split(problem, params)[1]}

    return problem.plan.over_rows(one, models)


def averaged(problem: Problem, models: Params, aggregate: Aggregate) -> Params:
    """Models (J, ...) with the best A and B of their rank for averaged products, and averaged other parameters.

    Models that nobody sent stay.
    """

    def one(params, found):
        factors = problem.model.network.factors(params)
        best = {path: truncated(found["products"][path], pair.a.shape[-1]) for path, pair in factors.items()}
        lora = split(problem, problem.model.network.with_factors(params, best))[0]
        return tree.combine(lora, found["others"])

    new = problem.plan.over_rows(one, models, mean(aggregate))
    return tree.where(aggregate.upload["weight"] > 0, new, models)


def as_factors(problem: Problem, share: float = 1.0, of_models: float = 1.0) -> Callable[[Traffic], Traffic]:
    """`Algorithm.traffic` of products: clients send A and B, of which a `share` of the rank travels.

    Args:
        problem: The problem of the method.
        share: Clients' mean rank over the largest one.
        of_models: Share of the received models that travel.
    """
    lora, rest = map(tree.num_bytes, split(problem, problem.model.network.shapes))
    one = share * lora + rest
    return lambda counted: counted._replace(model=of_models * one, upload=one + 4, report=0)  # and n_k


def svd(stack: Array) -> tuple[Array, Array, Array]:
    """U, S and V of matrices (..., inputs, outputs)."""
    u, s, v = one_by_one(lambda matrix: tuple(jnp.linalg.svd(matrix, full_matrices=False)), stack)
    return u, s, v


def directions(stack: Array) -> tuple[Array, Array]:
    """Squared singular values (..., outputs), ascending, and V (..., outputs, outputs) of (..., inputs, outputs).

    They come from the products of columns, whose decomposition is much cheaper than an SVD. In float32, the squares are
    accurate to about 1e-6 of the largest one.
    """
    products = jnp.matmul(jnp.swapaxes(stack, -1, -2), stack, precision="highest")
    squares, v = one_by_one(lambda matrix: tuple(jnp.linalg.eigh(matrix)), products)
    return jnp.maximum(squares, 0), v


def one_by_one(decompose: Callable[[Array], tuple[Array, ...]], stack: Array) -> tuple[Array, ...]:
    """What a matrix is decomposed into, for matrices (..., n, m), one after the other.

    LAPACK calls on several matrices at once can wait for each other forever on CPUs with few cores.
    """
    one = jax.custom_batching.sequential_vmap(decompose)
    _, found = jax.lax.scan(lambda carry, matrix: (carry, one(matrix)), None, stack.reshape(-1, *stack.shape[-2:]))
    return tuple(x.reshape(*stack.shape[:-2], *x.shape[1:]) for x in found)


def truncated(product: Array, rank: int) -> Factors:
    """The best approximation (L, inputs, rank), (L, rank, outputs) of products; b has orthonormal rows."""
    u, s, v = svd(product)
    return Factors(u[..., :rank] * s[..., None, :rank], v[..., :rank, :])


def side_by_side(problem: Problem, models: Sequence[Params], weights: Sequence[Array | float]) -> Params:
    """One model with sum_j weights[j] a_j b_j beside each frozen weight; other parameters are those of the last model.

    Its rank is the sum of the models' ranks.
    """
    network, last = problem.model.network, models[-1]
    each = [network.factors(params) for params in models]
    factors = {
        path: Factors(
            jnp.concatenate([found[path].a for found in each], axis=-1),
            jnp.concatenate([w * found[path].b for w, found in zip(weights, each, strict=True)], axis=-2),
        )
        for path in each[0]
    }
    return network.with_factors(last, factors)


def with_others(problem: Problem, params: Params, rest: Params) -> Params:
    """The parameters with others than LoRA's from `rest`."""
    return tree.combine(split(problem, params)[0], split(problem, rest)[1])
