"""Examples that are standardized when they are read: (x - mean) / std in float64, rounded to float32."""

import numpy as np
import pytest

import pfljax as pfl

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(5, 7, 1), (5, 7, 3), (4, 4, 4), (3, 5, 5), (11,), (3,), (1,)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of numbers that look like pixels
def test_examples_are_standardized_in_float64(shape, dtype):
    num = 1031  # not a multiple of a block
    x = RNG.integers(0, 256, (num, *shape)).astype(dtype)
    clients = pfl.Federation.from_arrays(x, np.arange(num) % 2, client=np.arange(num) % 3)
    mean = clients.scaling.mean
    std = clients.scaling.std

    for k, size in enumerate(clients.train.size):
        own = np.asarray(clients.train.x[k])[:size]
        expected = ((own.astype(np.float64) - mean) / std).astype(np.float32)
        found = np.asarray(clients.standardized.train.x[k])[:size]
        np.testing.assert_array_equal(found, expected)
