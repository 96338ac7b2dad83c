"""LoRA's matrices in methods that treat A, B or their product apart.

A product a b is added to a frozen weight: a (L, inputs, r) and b (L, r, outputs), for L stacked
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Aggregate, Array, Factors, Params, Traffic
from pfljax.local.problem import Problem

A = "_lora_a$"  # end of the path of each A
LORA = "_lora_[ab]$"  # end of the path of each A and B


class Products(NamedTuple):
    """What is averaged in place of a model with LoRA.

    Attributes:
        products: a b (L, inputs, outputs) of each weight, by path.
        others: The model's other parameters, with None in place of LoRA's.
    """

    products: Mapping[tuple[str, ...], Array]
    others: Params


def required(problem: Problem, name: str) -> int:
    """Returns the largest rank r for a method that needs LoRA.

    Raises:
        ArgumentError: if the model has none.
    """
    network = problem.model.network
    factors = jax.eval_shape(network.factors, network.shapes)
    if not factors:
        text = "needs LoRA; accepted: a frozen model with adapters.lora() among what is trained"
        raise ArgumentError("method", text, name)
    return max(a.shape[-1] for a, _ in factors.values())


def split(problem: Problem, params: Params) -> tuple[Params, Params]:
    """LoRA's parameters and the others; None in place of those left out."""
    return tree.partition(params, problem.model.named(params, LORA))


def with_others(problem: Problem, params: Params, rest: Params) -> Params:
    """The parameters with others than LoRA's from `rest`."""
    lora, _ = split(problem, params)
    _, others = split(problem, rest)
    return tree.combine(lora, others)


def side_by_side(
    problem: Problem, models: Sequence[Params], weights: Sequence[Array | float]
) -> Params:
    """One model that adds sum_j weights[j] a_j b_j to each frozen weight.

    Its rank is the sum of the models' ranks: the a_j are concatenated, and the weights[j] b_j. Other
    parameters are those of the last model.
    """
    network = problem.model.network
    models_factors = [network.factors(params) for params in models]
    sums = {}
    for path in models_factors[0]:
        pairs = [factors[path] for factors in models_factors]
        a = [pair.a for pair in pairs]
        b = [weight * pair.b for weight, pair in zip(weights, pairs, strict=True)]
        sums[path] = Factors(jnp.concatenate(a, axis=-1), jnp.concatenate(b, axis=-2))
    return network.with_factors(models[-1], sums)


# ---- Averages of products.


def sent(problem: Problem, models: Params) -> Products:
    """What clients send of models (J, ...): products a b and other parameters, leaves (J, ...)."""

    def products_and_others(params: Params) -> Products:
        factors = problem.model.network.factors(params)
        products = {path: jnp.matmul(a, b) for path, (a, b) in factors.items()}
        _, others = split(problem, params)
        return Products(products, others)

    return problem.plan.over_rows(products_and_others, models)


def averaged(problem: Problem, models: Params, aggregate: Aggregate) -> Params:
    """W <- sum_k n_k A_k B_k / sum_k n_k, decomposed again at the rank of the models (J, ...).

    Other parameters are averaged. Models that no client sent stay.
    """
    network = problem.model.network

    def decompose(params: Params, mean: Products) -> Params:
        best = {
            path: truncated(mean.products[path], rank=pair.a.shape[-1])
            for path, pair in network.factors(params).items()
        }
        new = network.with_factors(params, best)
        lora, _ = split(problem, new)
        return tree.combine(lora, mean.others)

    means = aggregation.mean(aggregate)
    new_models = problem.plan.over_rows(decompose, models, means)
    weight = aggregate.upload.weight
    assert weight is not None
    return tree.where(weight > 0, new_models, models)


def as_factors(
    problem: Problem, rank_share: float = 1.0, model_share: float = 1.0
) -> Callable[[Traffic], Traffic]:
    """`Algorithm.traffic` of methods that average products: A and B travel in their place.

    What clients tell is free: the server can compute it from A and B.

    Args:
        problem: The problem of the method.
        rank_share: Clients' mean rank over the largest one.
        model_share: Share of the received models that travel.
    """
    lora, others = split(problem, problem.model.network.shapes)
    num_bytes = rank_share * tree.num_bytes(lora) + tree.num_bytes(others)
    size_bytes = 4  # n_k is sent, too

    def traffic(counted: Traffic) -> Traffic:
        return counted._replace(
            model=model_share * num_bytes,
            upload=num_bytes + size_bytes,
            report=0,
        )

    return traffic


# ---- Decompositions.


def svd(stack: Array) -> tuple[Array, Array, Array]:
    """U, S and V of matrices (..., inputs, outputs)."""

    def decompose(matrix: Array) -> tuple[Array, ...]:
        return tuple(jnp.linalg.svd(matrix, full_matrices=False))

    u, s, v = in_turn(decompose, stack)
    return u, s, v


def directions(stack: Array) -> tuple[Array, Array]:
    """Squared singular values (..., outputs), ascending, and V (..., outputs, outputs).

    They are those of matrices (..., inputs, outputs), and come from the products of columns, whose
    decomposition is much cheaper than an SVD. In float32, the squares are accurate to about 1e-6 of
    the largest one.
    """

    def decompose(matrix: Array) -> tuple[Array, ...]:
        return tuple(jnp.linalg.eigh(matrix))

    products = jnp.matmul(jnp.swapaxes(stack, -1, -2), stack, precision="highest")
    squares, v = in_turn(decompose, products)
    return jnp.maximum(squares, 0), v


def in_turn(decompose: Callable[[Array], tuple[Array, ...]], stack: Array) -> tuple[Array, ...]:
    """The results of decompose(matrix) for matrices (..., n, m), stacked (..., *shape).

    Decomposes them one after the other, under `vmap`, too: LAPACK calls on several matrices at once
    can wait for each other forever on CPUs with few cores.
    """
    in_sequence = jax.custom_batching.sequential_vmap(decompose)

    def step(carry: None, matrix: Array) -> tuple[None, tuple[Array, ...]]:
        return carry, in_sequence(matrix)

    matrices = stack.reshape(-1, *stack.shape[-2:])
    _, results = jax.lax.scan(step, None, matrices)
    leading = stack.shape[:-2]
    return tuple(result.reshape(*leading, *result.shape[1:]) for result in results)


def truncated(product: Array, rank: int) -> Factors:
    """The best a (L, inputs, rank) and b (L, rank, outputs) for products (L, inputs, outputs).

    The rows of b are orthonormal.
    """
    u, s, v = svd(product)
    a = u[..., :rank] * s[..., None, :rank]
    return Factors(a, v[..., :rank, :])
