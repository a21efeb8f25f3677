"""Dense layers with register tiles.

Activations are (N, features), weights (I, O), all float32 and contiguous.

Items are smaller than a sample, so that small batches use all threads (`dense_blocks`):

- `dense_forward`: blocks of samples × chunks of inputs × blocks of outputs. y is (chunks, N, O);
  with several chunks, `relu` is False and `add_chunks` adds them.
- `dense_backward_input`: blocks of samples × blocks of inputs.
- `dense_backward_weight`: inputs, that is rows of dw; the part that contains input 0 also computes
  db.
- `dense_shards.dense_backward_weight_shards` does the same for micro-shards.

The first operand has the samples of the launch; y and dx can have more. The order of summation of
an output or an input gradient follows from the shape of the layer alone, not from blocks, threads
or other samples.

A large weight matrix does not fit the L2 cache, and at usual batch sizes each part is used only
briefly. Therefore every kernel reads or writes it sequentially, in blocks that are high enough for
efficient products, prefetches the next block during the current one, and packs the operands that it
reuses (see docs/developers/kernels/dense.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dptrain.backends.numba.convolution.microkernels import (
    NO_LOWER_BOUND,
    multiply,
    multiply_ahead,
    multiply_plain,
)
from dptrain.backends.numba.dense.dense_blocks import (
    STEPS,
    Blocks,
    backward_input_blocks,
    forward_blocks,
)
from dptrain.backends.numba.dense.gemv import multiply_row
from dptrain.backends.numba.vector import LINE, copy, transpose
from dptrain.native.jit import Kernel, inlined, kernel
from dptrain.plan.lowering import Phase

_BLOCK = 384
"""Maximum rows of a product."""
_ALIASED = 512
"""Elements: rows whose distance is a multiple of this map to two sets of the L1 cache."""
_PITCH = STEPS + 16
"""Distance of such rows after packing."""
_PANEL = 32
"""Columns of a packed panel; a multiple of two vectors of any processor."""
_GATHERED = 144
"""Features of x that `dense_backward_weight` packs at a time."""
_FEW_OUTPUTS = 64
"""Number of outputs below which the backward kernels have another form: 100 inputs and 10 outputs
take 5 instead of 12 µs for the input gradient of 256 samples, and 5 instead of 10 for that of w."""
_DIRECT = 1 << 20
"""Elements of x up to which this holds for the gradient of w, which then reads columns of x."""
_FEW = 4
"""Number of samples of a block below which GEMV is faster than tiles."""
_ONE = np.ones(1, np.float32)
RAMP = np.arange(_BLOCK, dtype=np.int32)


@dataclass(frozen=True)
class DenseKernel:
    """The kernel of a stage of a dense layer.

    Attributes:
        kernel: the kernel.
        scratch: float32 elements of scratch for each thread.
        blocks: blocks of samples and features; None for weight gradients, whose items are inputs.
    """

    kernel: Kernel
    scratch: int
    blocks: Blocks | None = None


def dense_kernels(
    samples: int, threads: int, inputs: int, outputs: int
) -> Mapping[Phase, DenseKernel]:
    """Return the kernels of a dense layer without micro-shards.

    Args:
        samples: largest number of samples of a launch.
        threads: largest number of parts of a launch.
        inputs, outputs: shape of w.
    """
    forward = forward_blocks(samples, inputs, outputs, threads)
    backward = backward_input_blocks(samples, inputs, outputs, threads)
    packed = min(forward.samples, _BLOCK) * _PITCH if inputs % _ALIASED == 0 else 1
    if forward.features < outputs:
        packed += forward.features * forward.steps
    transposed, gathered = backward.samples * (outputs + 48), samples * (outputs + _GATHERED)
    for_few = outputs * _GATHERED if outputs < _FEW_OUTPUTS else 0
    return {
        Phase.FORWARD: DenseKernel(dense_forward, packed, forward),
        Phase.BACKWARD_WEIGHT: DenseKernel(dense_backward_weight, max(gathered, for_few)),
        Phase.BACKWARD_INPUT: DenseKernel(dense_backward_input, max(transposed, for_few), backward),
    }


@inlined
def _forward_few_samples(x, w, b, y, relu, most_steps, block):
    """Compute a block of `dense_forward` with few samples; reading w limits the speed."""
    (first, last, i_first, i_last, o_first, o_last), (inputs, outputs) = block, w.shape
    x_flat, w_flat, y_flat, columns = x.reshape(-1), w.reshape(-1), y.reshape(-1), o_last - o_first
    for n in range(first, last):
        y_start = n * outputs + o_first
        if i_first == 0:
            copy(b, o_first, y_flat, y_start, columns)
        else:
            y[n, o_first:o_last] = 0
        for i in range(i_first, i_last, most_steps):
            steps = min(most_steps, i_last - i)
            multiply_row(
                x_flat, n * inputs + i, w_flat, i * outputs + o_first, y_flat, y_start,
                y_flat, y_start, steps, outputs, columns,
                np.float32(0) if relu and i + steps == i_last else NO_LOWER_BOUND,
            )  # fmt: skip


@inlined
def gather(source, start, row, target, target_start, rows, columns, pitch):
    """Copy a block so that its rows are `pitch` apart."""
    for n in range(rows):
        copy(source, start + n * row, target, target_start + n * pitch, columns)


@kernel
def dense_forward(items, x, w, b, y, relu, blocks, scratch):
    """y[n, o] = b[o] + Σ x[n, i] · w[i, o], optionally max(y, 0); see the module for the items.

    With several chunks, y[c] is the sum of chunk c, and the first one contains b.
    """
    inputs, outputs = w.shape
    across, chunks = -(-outputs // blocks.features), -(-inputs // blocks.chunk)
    for item in range(items.start, items.stop):
        chunk = item // across % chunks
        first = item // (across * chunks) * blocks.samples
        last = min(first + blocks.samples, len(x))
        i_first, o_first = chunk * blocks.chunk, item % across * blocks.features
        i_last, o_last = (
            min(i_first + blocks.chunk, inputs),
            min(o_first + blocks.features, outputs),
        )
        block = first, last, i_first, i_last, o_first, o_last
        if last - first < _FEW:
            _forward_few_samples(x, w, b, y[chunk], relu, blocks.steps, block)
        else:
            _forward_block(x, w, b, y[chunk], relu, blocks.steps, scratch[items.thread], block)


@inlined
def _forward_block(x, w, b, y, relu, most_steps, mine, block):
    """Compute a block of `dense_forward`.

    Rows of x that would evict each other from the L1 cache are packed.
    """
    (first, last, i_first, i_last, o_first, o_last), (inputs, outputs) = block, w.shape
    x_flat, w_flat, y_flat = x.reshape(-1), w.reshape(-1), y.reshape(-1)
    panel = mine[len(mine) - (o_last - o_first) * most_steps :]
    for n in range(first, last, _BLOCK):
        rows = min(_BLOCK, last - n)
        for i in range(i_first, i_last, most_steps):
            steps = min(most_steps, i_last - i)
            a, a_start, a_row = x_flat, n * inputs + i, inputs
            if inputs % _ALIASED == 0:
                a, a_start, a_row = mine, 0, _PITCH
                gather(x_flat, n * inputs + i, inputs, mine, 0, rows, steps, _PITCH)
            lower_bound = np.float32(0) if relu and i + steps == i_last else NO_LOWER_BOUND
            at = n * outputs + o_first
            d, d_start, d_row = (y_flat, at, outputs)
            if i == i_first:
                d, d_start, d_row = (b, o_first, 0 if i == 0 else -1)
            columns = o_last - o_first
            if columns == outputs:
                multiply_ahead(
                    (a, a_start), (RAMP, 0, a_row), (RAMP, 0, 1), (w_flat, i * outputs, outputs),
                    (d, d_start, d_row), (y_flat, at), (RAMP, 0, outputs), (rows, steps, columns),
                    lower_bound, (w_flat, (i + steps) * outputs),
                )  # fmt: skip
            else:
                # A column block of w is copied, because its rows are too short for prefetches.
                gather(w_flat, i * outputs + o_first, outputs, panel, 0, steps, columns, columns)
                multiply(
                    (a, a_start), (RAMP, 0, a_row), (RAMP, 0, 1), (panel, 0, columns),
                    (d, d_start, d_row), (y_flat, at), (RAMP, 0, outputs),
                    (rows, steps, columns), lower_bound,
                )  # fmt: skip


@kernel
def add_chunks(items, partial, y, relu):
    """y = Σ_c partial[c], optionally max(y, 0); items are elements of y, which is flat."""
    for i in range(np.uintp(items.start), np.uintp(items.stop)):
        y[i] = partial[0, i]
    for c in range(1, len(partial)):
        for i in range(np.uintp(items.start), np.uintp(items.stop)):
            y[i] += partial[c, i]
    if relu:
        for i in range(np.uintp(items.start), np.uintp(items.stop)):
            y[i] = np.float32(0.0) if y[i] <= 0.0 else y[i]


@kernel
def dense_backward_input(items, dy, w, dx, blocks, scratch):
    """dx[n, i] = Σ dy[n, o] · w[i, o]; see the module for the items."""
    inputs = len(w)
    across = -(-inputs // blocks.features)
    for item in range(items.start, items.stop):
        first = item // across * blocks.samples
        count = min(blocks.samples, len(dy) - first)
        i_first = item % across * blocks.features
        i_last = min(i_first + blocks.features, inputs)
        block, mine = (first, count, i_first, i_last), scratch[items.thread]
        if w.shape[1] <= min(count, _FEW_OUTPUTS - 1):
            _input_gradient_of_few_outputs(dy, w, dx, mine, block)
        else:
            _backward_input_block(dy, w, dx, blocks.steps, mine, block)


@inlined
def _input_gradient_of_few_outputs(dy, w, dx, transposed, block):
    """Compute a block of `dense_backward_input` from the transpose of w: it is smaller than dx."""
    (first, count, i_first, i_last), (inputs, outputs) = block, w.shape
    w_flat, dy_flat, dx_flat = w.reshape(-1), dy.reshape(-1), dx.reshape(-1)
    for i in range(i_first, i_last, _GATHERED):
        wide = min(_GATHERED, i_last - i)
        transpose(w_flat, i * outputs, outputs, transposed, 0, wide, wide, outputs)
        for n in range(first, first + count, _BLOCK):
            rows = min(_BLOCK, first + count - n)
            multiply_plain(
                (dy_flat, n * outputs), (RAMP, 0, outputs), (RAMP, 0, 1), (transposed, 0, wide),
                (dx_flat, n * inputs + i), (RAMP, 0, inputs), (rows, outputs, wide), rows,
            )  # fmt: skip


@inlined
def _backward_input_block(dy, w, dx, most_steps, mine, block):
    """Compute a block of `dense_backward_input` with many outputs.

    The tiles compute the transpose of dx, so that w is read once and sequentially.
    """
    (first, count, i_first, i_last), (inputs, outputs) = block, w.shape
    transposed, result = mine[: outputs * count], mine[outputs * count :]
    w_flat, dx_flat = w.reshape(-1), dx.reshape(-1)
    transpose(dy.reshape(-1), first * outputs, outputs, transposed, 0, count, count, outputs)
    for i in range(i_first, i_last, 48):
        rows = min(48, i_last - i)
        for o in range(0, outputs, most_steps):
            steps = min(most_steps, outputs - o)
            multiply_ahead(
                (w_flat, i * outputs + o),
                (RAMP, 0, outputs),
                (RAMP, 0, 1),
                (transposed, o * count, count),
                (result, 0, -1 if o == 0 else count),
                (result, 0),
                (RAMP, 0, count),
                (rows, steps, count),
                NO_LOWER_BOUND,
                (w_flat, (i + 48) * outputs + o * 48),
            )
        transpose(result, 0, count, dx_flat, first * inputs + i, inputs, rows, count)


@inlined
def sum_rows(source, rows, sums):
    """sums[c] = Σ_r source[r, c], computed as a product with ones."""
    columns = len(sums)
    sums[:] = 0
    for r in range(0, rows, _BLOCK):
        multiply(
            (_ONE, 0),
            (RAMP, 0, 0),
            (RAMP, 0, 0),
            (source, r * columns, columns),
            (sums, 0, 0),
            (sums, 0),
            (RAMP, 0, 0),
            (1, min(_BLOCK, rows - r), columns),
            NO_LOWER_BOUND,
        )


@inlined
def _weight_gradient_of_few_outputs(x, dy, dw, transposed, start, stop, samples):
    """Compute rows of dw as the transpose of dyᵀ·x, for which no operand is packed."""
    inputs, outputs = dw.shape
    x_flat, dy_flat = x.reshape(-1), dy.reshape(-1)
    for first in range(start, stop, _GATHERED):
        wide = min(_GATHERED, stop - first)
        for n in range(0, samples, _BLOCK):
            multiply(
                (dy_flat, n * outputs), (RAMP, 0, 1), (RAMP, 0, outputs),
                (x_flat, n * inputs + first, inputs), (transposed, 0, -1 if n == 0 else wide),
                (transposed, 0), (RAMP, 0, wide), (outputs, min(_BLOCK, samples - n), wide),
                NO_LOWER_BOUND,
            )  # fmt: skip
        transpose(transposed, 0, wide, dw.reshape(-1), first * outputs, outputs, outputs, wide)


@kernel
def dense_backward_weight(items, x, dy, dw, db, scratch):
    """dw[i, o] = Σ x[n, i] · dy[n, o]; db[o] = Σ dy[n, o]; items are inputs i.

    The nonempty range that starts at input 0 also writes db.
    """
    (inputs, outputs), samples = dw.shape, len(x)
    x_flat, dy_flat, dw_flat = x.reshape(-1), dy.reshape(-1), dw.reshape(-1)
    if items.start == 0 < items.stop:
        sum_rows(dy_flat, samples, db)
    if samples == 0:
        dw[items.start : items.stop] = 0
    mine = scratch[items.thread]
    if outputs < _FEW_OUTPUTS and outputs % _PANEL and 0 < samples * inputs <= _DIRECT:
        # Chunks begin at whole cache lines of inputs, so that no register is filled in part.
        first, last = (
            min(-(-items.start // LINE) * LINE, inputs),
            min(-(-items.stop // LINE) * LINE, inputs),
        )
        _weight_gradient_of_few_outputs(x, dy, dw, mine, first, last, samples)
        return
    panels, block = mine[: samples * outputs], mine[samples * outputs :]
    # dy is read once for every 48 inputs: directly for small layers, else from packed panels.
    packed = items.stop - items.start > 4 * 48
    if packed:
        for o in range(0, outputs, _PANEL):
            columns = min(_PANEL, outputs - o)
            gather(dy_flat, o, outputs, panels, o * samples, samples, columns, columns)
    else:
        panels = dy_flat
    for first in range(items.start, items.stop, _GATHERED):
        gathered = min(_GATHERED, items.stop - first)
        gather(x_flat, first, inputs, block, 0, samples, gathered, gathered)
        for i in range(0, gathered, 48):
            # Few rows at a time, so that dw is written sequentially.
            rows = min(48, gathered - i)
            for o in range(0, outputs, _PANEL):
                columns = min(_PANEL, outputs - o)
                dw_start = (first + i) * outputs + o
                panel, row = (o * samples, columns) if packed else (o, outputs)
                for n in range(0, samples, _BLOCK):
                    multiply_ahead(
                        (block, n * gathered + i),
                        (RAMP, 0, 1),
                        (RAMP, 0, gathered),
                        (panels, panel + n * row, row),
                        (dw_flat, dw_start, -1 if n == 0 else outputs),
                        (dw_flat, dw_start),
                        (RAMP, 0, outputs),
                        (rows, min(_BLOCK, samples - n), columns),
                        NO_LOWER_BOUND,
                        (dw_flat, (first + i + 48) * outputs + o * 48),
                    )
