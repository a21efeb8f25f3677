"""First layers on the tile unit against PyTorch in float64, at awkward shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dptrain.backends.memory import aligned_zeros
from dptrain.backends.numba import amx
from dptrain.backends.numba import amx_small_channel_convolution as narrow
from dptrain.backends.numba.pooling_windows import NO_GRADIENT
from tests.unit.backends import test_numba_convolution as vectors

pytestmark = pytest.mark.skipif(
    not amx.available(),
    reason="this processor has no tile unit (Intel AMX), or it is not granted",
)

CASES = {
    "first layer": vectors.CASES["first layer"],
    "one channel": (2, (17, 19, 1), 32, (3, 3), (1, 1), ((0, 0), (0, 0))),
    "uneven pads": (2, (18, 25, 2), 48, (3, 5), (1, 1), ((2, 1), (0, 3))),
    "five": (2, (9, 24, 3), 64, (5, 5), (1, 1), ((2, 2), (2, 2))),
    "one filter row": (1, (5, 8, 16), 16, (1, 1), (1, 1), ((0, 0), (0, 0))),
    "pads beyond the window": (1, (5, 4, 3), 16, (3, 2), (1, 1), ((3, 3), (4, 4))),
}


class Case(vectors.Case):
    """Cases with the geometry of this algorithm."""

    def __init__(self, name, pool=None):
        case = CASES[name]
        super().__init__(case, pool=pool)
        _, maps, k, window, strides, pads = case
        out = [maps[i] + sum(pads[i]) - window[i] + 1 for i in range(2)]
        corner, height = (pads[0][0], pads[1][0]), pool[0][0] if pool else 0
        self.geometry = narrow.make_geometry(maps, (*out, k), window, strides, corner, height)
        size = self.geometry.scratch_size
        memory = aligned_zeros(2 * size + 64, "float32")
        # Kernels must not count on what scratch holds, nor touch what lies behind it.
        memory[:] = np.nan
        self.memory, self.rows = [memory], memory[: 2 * size].reshape(2, size)

    def run(self, kernel, *rest):
        """Two threads, in turn."""
        n = len(self.x)
        for start, stop, thread in ((0, n // 2, 0), (n // 2, n, 1)):
            kernel(start, stop, thread, self.x, self.w, self.b, *rest, self.rows)
        assert self.memory_behind_scratch_is_untouched()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_forward(name, relu):
    case = Case(name)
    y = np.full(case.dy.shape, np.nan, np.float32)
    case.run(narrow.conv2d_forward, y, case.geometry, relu)
    expected = vectors.nhwc(torch.relu(case.ty) if relu else case.ty)
    vectors.close(y, expected, case.lengths["y"])


@pytest.mark.parametrize("pool", vectors.POOLS)
@pytest.mark.parametrize("name", [name for name in CASES if name != "one filter row"])
def test_pooled(name, pool):
    case = Case(name, vectors.POOLS[pool])
    y = np.full(case.dy.shape, np.nan, np.float32)
    argmax = np.full(y.shape, 77, np.uint8)
    case.run(narrow.conv2d_relu_pool_forward, y, argmax, case.geometry, case.pool_geometry)
    vectors.close(y, vectors.nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)


def test_not_a_number_stays_in_its_patches():
    case = Case("first layer", vectors.POOLS["2/2"])
    case.x[0, 4, 4, 1] = np.nan
    y, argmax = np.zeros(case.dy.shape, np.float32), np.zeros(case.dy.shape, np.uint8)
    case.run(narrow.conv2d_relu_pool_forward, y, argmax, case.geometry, case.pool_geometry)
    assert np.isnan(y[0, 1:3, 1:3]).all()
    y[0, 1:3, 1:3] = 0
    assert not np.isnan(y).any()
