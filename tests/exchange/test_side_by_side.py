"""What clients side by side compute at once, against the bytes that are allowed."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfljax.contract.types import ClientOutput, ClientReport, Split, Upload
from pfljax.exchange import plan as plans
from pfljax.exchange import side_by_side
from pfljax.exchange.side_by_side import CLIENTS, largest_array, width
from pfljax.local import batches

WIDE = 1000  # numbers that a model computes for a client: 4,000 bytes


def exchange(plan, models, x, sizes=None):
    def client(models, _, x):
        def one(w):
            return jnp.tanh(w @ x[...] * jnp.arange(1.0, 1 + WIDE)).sum()

        return ClientOutput((), Upload(), ClientReport(plan.over_models(one, models)))

    index = jnp.broadcast_to(jnp.arange(len(models)), (len(x), len(models)))
    return plan.exchange(client, models, index, (), x, topology="shared", sizes=sizes)[
        1
    ].report.loss


@pytest.mark.parametrize(("kind", "side"), [("vmap", 6), ("chunk", 2)])
@pytest.mark.parametrize("at_once", [1, 3])
def test_models_are_processed_at_once_only_if_they_are_small_together(
    monkeypatch, kind, side, at_once
):
    rng = np.random.default_rng(0)
    models = rng.normal(size=(3, 5)).astype(np.float32)
    x = rng.normal(size=(6, 5)).astype(np.float32)
    monkeypatch.setattr(plans, "TOGETHER", side * 3 * 4 * WIDE - (at_once < 3))
    run = functools.partial(exchange, plans.make_plan(kind, 2, devices=1))
    expected = np.tanh((x @ models.T)[..., None].astype(np.float64) * np.arange(1, 1 + WIDE)).sum(
        axis=-1
    )
    np.testing.assert_allclose(jax.jit(run)(models, x), expected, rtol=1e-4, atol=1e-2)
    assert (
        largest_array(jax.make_jaxpr(run)(models, x).jaxpr, multiple_of=WIDE)
        == side * at_once * 4 * WIDE
    )


# Room in the cache, in clients; of 6 clients, how many are then side by side.
@pytest.mark.parametrize(("room", "side"), [(0, 1), (1, 1), (2, 2), (5, 3), (6, 6)])
@pytest.mark.parametrize("kind", ["vmap", "chunk"])
def test_a_core_computes_as_many_clients_side_by_side_as_fit_in_its_cache(
    monkeypatch, kind, room, side
):
    rng = np.random.default_rng(0)
    models = rng.normal(size=(3, 5)).astype(np.float32)
    x = rng.normal(size=(6, 5)).astype(np.float32)
    monkeypatch.setattr(side_by_side, "CACHE", room * 3 * 4 * WIDE)
    run = functools.partial(exchange, plans.make_plan(kind, 3, devices=1))
    expected = np.tanh((x @ models.T)[..., None].astype(np.float64) * np.arange(1, 1 + WIDE)).sum(
        axis=-1
    )
    np.testing.assert_allclose(jax.jit(run)(models, x), expected, rtol=1e-4, atol=1e-2)
    side = 3 if kind == "chunk" else side  # as the user asks
    assert (
        largest_array(jax.make_jaxpr(run)(models, x).jaxpr, multiple_of=WIDE) == side * 3 * 4 * WIDE
    )


def test_clients_of_different_sizes_come_one_by_one_if_no_two_fit_in_the_cache(monkeypatch):
    sizes = np.array([9, 1, 1, 8, 1, 1], np.int32)
    models = np.ones((3, 5), np.float32)
    x = np.eye(6, 5)
    plan = plans.make_plan("vmap", devices=1).for_steps(sizes, 6)
    assert max(wide for wide, _ in plan.buckets) > 1

    # a new one, so that JAX traces it again
    def run():
        return functools.partial(exchange, plan, sizes=sizes)

    def largest():
        return largest_array(jax.make_jaxpr(run())(models, x).jaxpr, multiple_of=WIDE)

    assert largest() > 3 * 4 * WIDE
    monkeypatch.setattr(side_by_side, "CACHE", 0)
    assert largest() == 3 * 4 * WIDE


def test_only_under_vmap_on_cpus_does_the_cache_count():
    plan = plans.make_plan("vmap")
    accelerator = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="cuda")]))
    assert plan.in_cache
    assert not dataclasses.replace(plan, mesh=accelerator).in_cache
    assert not plans.make_plan("map").in_cache and not plans.make_plan("chunk", 2).in_cache


def test_blocks_of_examples_are_as_small_as_the_bytes_of_all_clients_ask_for(monkeypatch):
    sizes = np.array([0, 1, 5, 11], np.int32)
    n_max = 11
    seen = set()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, n_max, 3)).astype(np.float32)
    y = rng.normal(size=(4, n_max)).astype(np.float32)
    # room for three examples of each client
    monkeypatch.setattr(batches, "BLOCK", len(sizes) * 4 * WIDE * 3)

    def total(x, y, mask):
        seen.add(len(y))
        return jnp.where(mask, (x.sum(axis=1)[:, None] * jnp.ones(WIDE)).sum(axis=1) * y, 0).sum()

    def rows(x, y):
        return x.sum(axis=1)[:, None] * jnp.arange(WIDE)

    def of(fn, x, y, size):
        return fn(Split(x, y, size))

    def side_by_side(fn):
        return jax.jit(jax.vmap(functools.partial(of, fn), axis_name=CLIENTS))(x, y, sizes)

    inside = np.arange(n_max) < sizes[:, None]
    found = side_by_side(functools.partial(batches.sum_over_examples, total))
    np.testing.assert_allclose(
        found, WIDE * (x.sum(axis=2) * y * inside).sum(axis=1), rtol=1e-4, atol=1e-3
    )
    assert seen == {batches.PROBED, 3}  # four even blocks: 11 = 3 + 3 + 3 + 2
    found = side_by_side(lambda split: batches.over_examples(rows, split))
    np.testing.assert_allclose(
        found, (x.sum(axis=2) * inside)[..., None] * np.arange(WIDE), rtol=1e-5, atol=1e-4
    )


def test_the_bytes_are_those_of_the_form_that_accelerators_have():
    def patches(x):
        return jnp.tile(x, 9)[: len(x)]

    def apply(x):
        return jax.lax.platform_dependent(x, cpu=patches, default=lambda x: x + 1)

    x = jnp.ones(10)
    assert largest_array(jax.make_jaxpr(apply)(x).jaxpr) == 40
    assert largest_array(jax.make_jaxpr(patches)(x).jaxpr) == 360
    assert width() == 1
