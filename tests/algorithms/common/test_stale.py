"""How late clients are."""

import math

import jax
import numpy as np
import pytest

from pfljax.algorithms.common import stale


def drawn(delays, mean, most, rounds, num=4000):
    keys = jax.random.split(jax.random.key(0), num)
    draw = jax.jit(
        jax.vmap(lambda key: stale.draw_delay(key, delays, mean, most, np.int32(rounds))[0])
    )
    return np.asarray(draw(keys))


def test_uniform_delays_are_equally_likely_up_to_the_largest():
    late = drawn("uniform", 9.0, 4, 100)
    np.testing.assert_allclose(np.bincount(late) / len(late), 1 / 5, atol=0.03)


def test_half_normal_delays_have_their_mean():
    """|z| of a standard normal z has the mean sqrt(2 / pi)."""
    late = drawn("half_normal", 6.0, 1000, 1000)
    assert late.mean() == pytest.approx(6, rel=0.05) and late.max() > 12
    share = (late <= 6).mean()  # rounded: |z| < 6.5 / (6 sqrt(pi / 2))
    assert share == pytest.approx(
        math.erf(6.5 / (6 * math.sqrt(math.pi / 2)) / math.sqrt(2)), abs=0.03
    )


def test_nobody_is_later_than_the_run_is_old():
    assert drawn("uniform", 9.0, 4, 2).max() == 2 and drawn("half_normal", 50.0, 4, 100).max() == 4
