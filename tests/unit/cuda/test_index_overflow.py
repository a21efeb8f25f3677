"""Index arithmetic of kernels beyond 2³¹, with the memory of the first elements only."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulator import Emulator, EmulatorError
from tests.unit.cuda.launching import THREADS, ints, launch


def test_backward_pooling_counts_cells_beyond_2_31() -> None:
    """A 4 × 4 map with 3 × 3 windows has 5 × 5 cells, because cells include the padding.

    2²⁷ samples have 2³¹ elements but 3.4 · 10⁹ cells. The launch covers the cells of two samples.
    """
    cells = 25
    samples = 2**27
    assert 2**31 < cells * samples < 2**32
    dy = np.ones((2, 4, 4, 1), np.float32)
    dx = np.full_like(dy, np.nan)
    geometry = ints(4, 4, 1, 4, 4, 1, 3, 3, 1, 1, 1, 1, 1, 1)
    _, dx = launch(
        "pooling.cu", "sum_pool2d_backward", 2 * cells, dy, dx, np.float32(1.0),
        *ints(samples), *geometry,
        block=2 * cells,
    )  # fmt: skip
    windows = np.array([2, 3, 3, 2], np.float32)
    expected = np.broadcast_to(np.outer(windows, windows), (2, 4, 4))
    np.testing.assert_array_equal(dx[..., 0], expected)


def test_crop_windows_address_images_beyond_2_31_rows() -> None:
    """The row index of image 2³⁰ with 4 channels is 2³², which 32 bits would wrap to image 0."""
    device = Emulator()
    arrays = [
        np.ones((1, 4, 1, 1), np.float32),  # images
        np.array([[2**30, 0, 0, 0]], np.int32),  # crop_windows
        np.zeros((1, 2), np.float32),  # recolourings
        np.zeros((1, 1), np.float32),  # mixings
        np.zeros((1, 1, 1, 4), np.float32),  # input
    ]
    memory = [device.zeros(array.shape, array.dtype) for array in arrays]
    for target, source in zip(memory, arrays, strict=True):
        device.upload(target, source)
    words = [device.zeros((5,), np.uint32) for _ in range(8)]
    message = [
        *words[:2], np.int32(0), *words[2:4], np.int32(0), *words[4:6], np.int32(0),
        *words[6:],
        device.zeros((3,), np.float32), np.int32(1),
    ]  # fmt: skip
    unpack = device.function("unpack_batch.cu", "unpack_crop_windows")
    taps = [device.zeros((1,), np.float32) for _ in range(2)]
    sizes = [*ints(1, 4, 1, 1, 1, 1), *taps, np.float32(1), np.float32(0), *ints(4, 0, 0)]
    args = [*memory, *sizes, *message]
    with pytest.raises(EmulatorError, match="outside"):
        unpack((1, 1, 1), (THREADS, 1, 1), args)
