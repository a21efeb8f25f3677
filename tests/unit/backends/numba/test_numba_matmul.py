"""Fully connected kernels against float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dptrain.backends.numba.dense import dense_blocks, dense_shards, matmul
from dptrain.backends.numba.reduction import GradientSlots
from dptrain.plan.lowering import Phase
from dptrain.plan.shards import MicroShards, add_in_order

EPSILON = float(np.finfo(np.float32).eps)


def close(actual, expected, length):
    """Sums of `length` products of normal numbers: their rounding errors add up like a walk."""
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=8 * EPSILON * (length + 1) ** 0.5 * 4)


SHAPES = [
    (1, 1, 1), (3, 5, 17), (2, 1, 33), (13, 37, 10), (32, 129, 100), (251, 300, 31),
    (9, 800, 390), (780, 30, 33), (400, 420, 40), (17, 33, 47), (70, 290, 530), (33, 64, 672),
    (33, 512, 20), (390, 1024, 30), (3, 37, 100), (1, 20, 128),
]  # fmt: skip
"""Samples, inputs, outputs; beyond what any kernel takes as one block."""


@pytest.fixture(params=SHAPES, ids=str)
def arrays(request):
    n, inputs, outputs = request.param
    rng = np.random.default_rng(0)
    return tuple(
        rng.standard_normal(shape, np.float32)
        for shape in ((n, inputs), (inputs, outputs), (outputs,), (n, outputs))
    )


class Scratch:
    """Memory of two threads that holds no numbers, and more of it behind."""

    def __init__(self, size):
        # From a line of 64 bytes on, as a plan's buffers are.
        memory = np.full(2 * size + 64, np.nan, np.float32)
        first = -memory.ctypes.data // 4 % 16
        self.rows = memory[first : first + 2 * size].reshape(2, size)
        self.behind = memory[first + 2 * size :]

    def intact(self):
        return np.isnan(self.behind).all()


def run(stage, count, *operands):
    """Run a kernel in three parts, one of them empty; check that it writes only its scratch."""
    blocks = () if stage.blocks is None else (stage.blocks,)
    scratch = Scratch(stage.scratch)
    for start, stop, thread in ((0, 0, 0), (0, count // 2, 0), (count // 2, count, 1)):
        stage.kernel(start, stop, thread, *operands, *blocks, scratch.rows)
    assert scratch.intact()


def forward(x, w, b, *, relu=False, threads=2):
    """Return y; with several chunks, `add_chunks` adds them."""
    stage, n = matmul.dense_kernels(len(x), threads, *w.shape)[Phase.FORWARD], len(x)
    chunks = -(-w.shape[0] // stage.blocks.chunk)
    y = np.full((chunks, n, w.shape[1]), np.nan, np.float32)
    count = stage.blocks.num_items(n, w.shape[1], w.shape[0])
    run(stage, count, x, w, b, y, relu and chunks == 1)
    if chunks == 1:
        return y[0]
    total = np.full_like(y[0], np.nan)
    flat = total.reshape(-1)
    matmul.add_chunks(0, flat.size, 0, y.reshape(chunks, -1), flat, relu)
    return total


def backward_input(w, dy, *, threads=2):
    n = len(dy)
    stage = matmul.dense_kernels(n, threads, *w.shape)[Phase.BACKWARD_INPUT]
    dx = np.full((n, len(w)), np.nan, np.float32)
    run(stage, stage.blocks.num_items(n, *w.shape), dy, w, dx)
    return dx


@pytest.mark.parametrize("relu", [False, True])
def test_forward(arrays, relu):
    x, w, b, _ = arrays
    expected = x.astype(float) @ w + b
    y = forward(x, w, b, relu=relu)
    close(y, np.maximum(expected, 0) if relu else expected, len(w))


def test_backward_input(arrays):
    _, w, _, dy = arrays
    close(backward_input(w, dy), dy.astype(float) @ w.T, w.shape[1])


@pytest.mark.parametrize("n", [None, 0])
def test_backward_weight(arrays, n):
    x, w, b, dy = arrays
    dw, db = np.full_like(w, np.nan), np.full_like(b, np.nan)
    stage = matmul.dense_kernels(len(x), 2, *w.shape)[Phase.BACKWARD_WEIGHT]
    run(stage, len(w), x[:n], dy, dw, db)
    close(dw, x[:n].astype(float).T @ dy[:n], len(x))
    close(db, dy[:n].astype(float).sum(axis=0), len(x))


def test_the_weight_gradient_of_few_outputs_has_the_same_bits_for_large_x():
    """Samples without a gradient add nothing, but make x so large that it is packed."""
    rng, samples, inputs = np.random.default_rng(0), 129, 8200
    x, dy = (rng.standard_normal((samples, size), np.float32) for size in (inputs, 10))
    dy[127:] = 0
    found = []
    for n in (127, samples):
        assert (n * inputs > matmul._DIRECT) == (n == samples)
        dw, db = np.full((inputs, 10), np.nan, np.float32), np.full(10, np.nan, np.float32)
        stage = matmul.dense_kernels(n, 2, inputs, 10)[Phase.BACKWARD_WEIGHT]
        run(stage, inputs, x[:n], dy[:n], dw, db)
        close(dw, x[:n].astype(float).T @ dy[:n], n)
        found.append(dw)
    np.testing.assert_array_equal(*found)


def test_only_the_part_of_input_0_writes_the_bias_gradient():
    x, w, dy = (np.ones(shape, np.float32) for shape in ((5, 40), (40, 40), (5, 40)))
    stage = matmul.dense_kernels(5, 2, 40, 40)[Phase.BACKWARD_WEIGHT]
    scratch, db = Scratch(stage.scratch).rows, np.full(40, np.nan, np.float32)
    for start, stop in ((0, 0), (20, 40)):
        stage.kernel(start, stop, 0, x, dy, np.zeros_like(w), db, scratch)
        assert np.isnan(db).all()
    stage.kernel(0, 20, 0, x, dy, np.zeros_like(w), db, scratch)
    assert (db == 5).all()


@pytest.mark.parametrize("n", range(1, 71))
def test_every_number_of_samples(n):
    """Rows that fill tiles, and every number of rows that remain."""
    rng = np.random.default_rng(n)
    inputs, outputs = 32 + n, 107 - n
    x, w, dy = (
        rng.standard_normal(shape, np.float32)
        for shape in ((n, inputs), (inputs, outputs), (n, outputs))
    )
    b = rng.standard_normal(outputs, np.float32)
    dw, db = (np.full_like(array, np.nan) for array in (w, b))
    stage = matmul.dense_kernels(n, 2, *w.shape)[Phase.BACKWARD_WEIGHT]
    run(stage, inputs, x, dy, dw, db)
    close(forward(x, w, b), x.astype(float) @ w + b, inputs)
    close(backward_input(w, dy), dy.astype(float) @ w.T, outputs)
    close(dw, x.astype(float).T @ dy, n)
    close(db, dy.astype(float).sum(axis=0), n)


def test_not_a_number_passes():
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape, np.float32) for shape in ((64, 70), (70, 40), (64, 40)))
    x[5, 69] = dy[33, 2] = np.nan
    y = forward(x, w, np.zeros(40, np.float32), relu=True)
    for result, row in ((y, 5), (backward_input(w, dy), 33)):
        assert np.isnan(result[row]).all()
        assert np.isfinite(np.delete(result, row, axis=0)).all()


@pytest.mark.parametrize("outputs", [1, 16, 17, 64, 100, 129, 160, 193, 384, 385, 1000])
@pytest.mark.parametrize("samples", [1, 3])
def test_gemv(samples, outputs):
    """Every number of panels and of vectors in a panel; the same bits with any number of
    threads.
    """
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s, np.float32) for s in ((samples, 1500), (1500, outputs)))
    b = rng.standard_normal(outputs, np.float32)
    y = forward(x, w, b, relu=True, threads=1)
    close(y, np.maximum(x.astype(float) @ w + b, 0), 1500)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(forward(x, w, b, relu=True, threads=threads), y)


@pytest.mark.parametrize("shape", [(300, 400), (512, 20), (4200, 130), (70, 700), (5000, 1)])
def test_results_of_a_sample_depend_on_the_shape_of_the_layer_alone(shape):
    """They are equal to the bit for any number of samples and threads."""
    rng = np.random.default_rng(0)
    w, x, dy = (
        rng.standard_normal(size, np.float32) for size in (shape, (32, shape[0]), (32, shape[1]))
    )
    b = rng.standard_normal(shape[1], np.float32)
    y, dx = forward(x, w, b, relu=True, threads=1), backward_input(w, dy, threads=1)
    for samples in (1, 5, 32):
        for threads in (1, 2, 3, 8):
            part = slice(32 - samples, 32)
            np.testing.assert_array_equal(
                forward(x[part], w, b, relu=True, threads=threads), y[part]
            )
            np.testing.assert_array_equal(backward_input(w, dy[part], threads=threads), dx[part])


@pytest.mark.parametrize(
    ("samples", "inputs", "outputs", "threads"), [(1, 4608, 400, 8), (3, 800, 900, 4), (7, 6, 5, 2)]
)
def test_small_batches_use_all_threads_if_there_is_enough_work(samples, inputs, outputs, threads):
    kernels = matmul.dense_kernels(samples, threads, inputs, outputs)
    operations = (samples + dense_blocks.FIRST) * inputs * outputs
    enough = operations >= threads * dense_blocks.MIN_OPERATIONS
    forward, backward = kernels[Phase.FORWARD].blocks, kernels[Phase.BACKWARD_INPUT].blocks
    assert (forward.num_items(samples, outputs, inputs) >= threads) == enough
    assert (backward.num_items(samples, inputs, outputs) >= threads) == enough


def bits_by_shards(x, dy, bounds, merges, slots, parts):
    """Return dw and db of all slots, computed in `parts` parts."""
    inputs, outputs = x.shape[1], dy.shape[1]
    pitch = inputs * outputs + outputs + 3
    gradients = np.full((slots, pitch), np.nan, np.float32)
    flat = gradients.reshape(-1)
    wanted = GradientSlots(flat, flat[inputs * outputs :], inputs * outputs, pitch, slots)
    size = dense_shards.weight_shards_scratch(len(x), outputs, len(merges))
    scratch = Scratch(size)
    for part in range(parts):
        start, stop = inputs * part // parts, inputs * (part + 1) // parts
        dense_shards.dense_backward_weight_shards(
            start, stop, part % 2, x, dy, wanted, bounds, merges, scratch.rows
        )
    assert scratch.intact()
    assert np.isnan(gradients[:, -3:]).all()
    return gradients[:, :-3]


@pytest.mark.parametrize("count", [0, 3, 29, 1000])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 8), (3, 8), (2, 5), (0, 7)])
def test_weight_gradient_by_micro_shards(count, first, last):
    """It is the sum along the tree of what each micro-shard contributes."""
    rng = np.random.default_rng(count)
    inputs, outputs = 61, 83
    own = MicroShards(8, first, last)
    bounds, merges = own.offsets(count), own.merges
    x = rng.standard_normal((bounds[-1], inputs), np.float32)
    dy = rng.standard_normal((bounds[-1], outputs), np.float32)
    slots = len(own.subtrees)
    actual = bits_by_shards(x, dy, bounds, merges, slots, 1)
    np.testing.assert_array_equal(bits_by_shards(x, dy, bounds, merges, slots, 3), actual)
    alone = []
    for start, stop in pairwise(bounds):
        one = np.array([0, stop - start]), np.zeros(1, np.int64)
        alone.append(bits_by_shards(x[start:stop], dy[start:stop], *one, 1, 1)[0])
    expected = add_in_order(alone, merges)
    np.testing.assert_array_equal(actual, np.array(expected))
    both = np.vstack([x.astype(float).T @ dy, dy.astype(float).sum(axis=0, keepdims=True)])
    close(actual.sum(axis=0, dtype=float), both.reshape(-1), max(len(x), 1))
