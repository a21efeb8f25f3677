"""F(4×4, 3×3) of colour images, pooled, against PyTorch in float64, at awkward shapes."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends.numba import winograd_rgb_convolution
from dptrain.backends.numba.pooling_windows import NO_GRADIENT
from tests.unit.backends import test_numba_convolution as vectors

SAME, NONE = ((1, 1), (1, 1)), ((0, 0), (0, 0))

# n, (H, W, C), K, pads
CASES = {
    "one tile": (2, (4, 4, 3), 16, SAME),
    "one window": (3, (4, 5, 3), 16, NONE),
    "whole tiles": (2, (16, 32, 3), 16, SAME),
    "groups of tiles that do not fill vectors": (2, (8, 21, 3), 32, SAME),
    "odd rows and columns": (3, (13, 11, 3), 16, SAME),
    "a row and a column of windows more": (2, (10, 22, 3), 48, SAME),
    "uneven pads": (2, (7, 9, 3), 32, ((2, 1), (0, 3))),
}


class Case(vectors.Case):
    """Cases with the geometry of this algorithm."""

    def __init__(self, name):
        n, maps, k, pads = CASES[name]
        super().__init__((n, maps, k, (3, 3), (1, 1), pads), pool=vectors.POOLS["2/2"])
        out = *(maps[i] + sum(pads[i]) - 2 for i in range(2)), k
        self.geometry = winograd_rgb_convolution.make_geometry(maps, out, (pads[0][0], pads[1][0]))
        size = self.geometry.scratch_size
        self.memory = [np.full(2 * size + 64, np.nan, np.float32)]
        self.scratch = self.memory[0][: 2 * size].reshape(2, size)
        self.y = np.full(self.dy.shape, np.nan, np.float32)
        self.argmax = np.full(self.y.shape, 77, np.uint8)
        # F(4×4, 3×3) is about 3 times as far off as a direct sum (docs/kernels.md): as far as one
        # of 9 times as many products.
        self.lengths = {name: 9 * length for name, length in self.lengths.items()}

    def run(self):
        """Forward and backward, of two threads in turn; returns the sums of both."""
        n, partial = len(self.x), self.partial()
        for part in ((0, n // 2, 0), (n // 2, n, 1)):
            rest = self.geometry, self.pool_geometry, self.scratch
            operands = self.x, self.w, self.b, self.y, self.argmax
            winograd_rgb_convolution.conv2d_relu_pool_forward(*part, *operands, *rest)
            operands = self.x, self.dy, self.argmax, partial
            winograd_rgb_convolution.conv2d_relu_pool_backward_weight(*part, *operands, *rest)
        assert self.memory_behind_scratch_is_untouched()
        return partial


@pytest.mark.parametrize("name", CASES)
def test_forward_and_by_the_weights(name):
    case = Case(name)
    dw, db = vectors.weight_gradients(case, case.run())
    vectors.close(case.y, vectors.nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(case.argmax == NO_GRADIENT, case.y == 0)
    vectors.close(dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), case.lengths["dw"])
    vectors.close(db, case.tb.grad.numpy(), case.lengths["dw"])


def test_the_first_among_equals_is_the_maximum():
    case = Case("whole tiles")
    case.w[:] = 0
    case.b[:] = 1
    case.run()
    assert (case.y == 1).all()
    assert not case.argmax.any()


def test_not_a_number_passes():
    case = Case("odd rows and columns")
    case.x[0, 4, 4, 1] = np.nan
    case.run()
    assert np.isnan(case.y[0, 1:3, 1:3]).all()
    assert not np.isnan(case.y[1:]).any()
