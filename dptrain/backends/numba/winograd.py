"""Convolutions of 3 by 3, stride 1, with 16 multiplications for every 36: F(2×2, 3×3).

Two rows and columns of outputs at a time, a *tile*, come from four of inputs:

    y = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ x B)] A,      dw = Gᵀ [(Bᵀ x B) ⊙ (A dy Aᵀ)] G

summed over channels on the left and over tiles on the right: so the elementwise products ⊙ are 16
matrix products, which `microkernels` computes. The entries of A, B and G are 0, ±1 and ±½, so that
the error stays near that of the direct sum (docs/kernels.md has both).

Source: A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dptrain.backends.numba.jit import expanded, inlined
from dptrain.backends.numba.microkernels import multiply_spaced
from dptrain.backends.numba.vector import (
    F32,
    F32P,
    I64,
    Writer,
    compiled_registers,
    flatten_arguments,
    vector_width,
)

BLOCK = 96
"""Tiles between two transforms: what they leave stays in L2."""

FEWEST, MOST = 16, 512
"""Channels. Below, the transforms cost what the products save; above is beyond the ramp."""

_RAMP = np.arange(MOST, dtype=np.int32)
_GAP = 16
"""Elements between the 16 matrices: without them all lie in the same sets of the cache."""

Vectors = Sequence[ir.Value]


def _input(b: ir.IRBuilder, d: Vectors) -> Vectors:
    """Bᵀ d."""
    return b.fsub(d[0], d[2]), b.fadd(d[1], d[2]), b.fsub(d[2], d[1]), b.fsub(d[1], d[3])


def _output(b: ir.IRBuilder, m: Vectors) -> Vectors:
    """Aᵀ m."""
    return b.fadd(b.fadd(m[0], m[1]), m[2]), b.fsub(b.fsub(m[1], m[2]), m[3])


def _gradient(b: ir.IRBuilder, y: Vectors) -> Vectors:
    """A y."""
    return y[0], b.fadd(*y), b.fsub(*y), b.fneg(y[1])


def _weight(b: ir.IRBuilder, g: Vectors) -> Vectors:
    """G g."""
    half = ir.Constant(g[0].type, [0.5] * g[0].type.count)
    ends, middle = b.fmul(half, b.fadd(g[0], g[2])), b.fmul(half, g[1])
    return g[0], b.fadd(ends, middle), b.fsub(ends, middle), g[2]


def _weight_gradient(b: ir.IRBuilder, s: Vectors) -> Vectors:
    """Gᵀ s."""
    half = ir.Constant(s[0].type, [0.5] * s[0].type.count)
    total, difference = (b.fmul(half, f(s[1], s[2])) for f in (b.fadd, b.fsub))
    return b.fadd(s[0], total), difference, b.fadd(total, s[3])


_SIZES: Mapping[Callable[..., Vectors], int] = {
    _input: 4,
    _output: 4,
    _gradient: 2,
    _weight: 3,
    _weight_gradient: 4,
}
"""Elements that each takes along rows and columns."""


class _Transform(Writer):
    """One of the above along rows and columns of a small matrix of vectors.

    Of a gradient's or output's two rows and columns only the first ``rows`` and ``columns`` exist.
    """

    ARGUMENTS: ClassVar[Mapping[str, ir.Type]] = {
        "source": F32P,
        "source_row": I64,
        "source_column": I64,
        "target": F32P,
        "target_row": I64,
        "target_column": I64,
        "channels": I64,
        "rows": I64,
        "columns": I64,
        "floor": F32,
    }

    def __init__(self, module: ir.Module, width: int, transform: Callable[..., Vectors]) -> None:
        self.transform = transform
        super().__init__(module, f"dptrain_winograd{transform.__name__}", self.ARGUMENTS, width)

    def write(self) -> None:
        def body(q: ir.Value, _: Vectors) -> Vectors:
            size = range(_SIZES[self.transform])
            matrix = [[self._element(q, i, j) for j in size] for i in size]
            for _axis in range(2):
                # Along the first index, and turned: twice makes both.
                done = [
                    self.transform(self.builder, column) for column in zip(*matrix, strict=True)
                ]
                matrix = [list(column) for column in done]
            for i, row in enumerate(matrix):
                for j, value in enumerate(row):
                    self._store(value, q, i, j)
            return []

        self.loop(I64(0), self.args["channels"], [], body, step=self.width)

    def _place(self, which: str, q: ir.Value, i: int, j: int) -> ir.Value:
        b, args = self.builder, self.args
        row, column = b.mul(I64(i), args[f"{which}_row"]), b.mul(I64(j), args[f"{which}_column"])
        return self.at(args[which], b.add(q, b.add(row, column)))

    def _exists(self, i: int, j: int) -> ir.Value:
        b, args = self.builder, self.args
        row, column = (
            b.icmp_signed("<", I64(p), args[n]) for p, n in ((i, "rows"), (j, "columns"))
        )
        return b.and_(row, column)

    def _element(self, q: ir.Value, i: int, j: int) -> ir.Value:
        if self.transform is not _gradient or i + j == 0:
            return self.load(self._place("source", q, i, j))
        b, exists = self.builder, self._exists(i, j)
        places = self._place("source", q, i, j), self._place("source", q, 0, 0)
        return b.select(exists, self.load(b.select(exists, *places)), self.zero)

    def _store(self, value: ir.Value, q: ir.Value, i: int, j: int) -> None:
        b, place = self.builder, self._place("target", q, i, j)
        if self.transform is not _output:
            self.store(value, place)
            return
        floor = self.splat(self.args["floor"])
        value = b.select(b.fcmp_ordered("<", value, floor), floor, value)
        with b.if_then(self._exists(i, j), likely=True):
            self.store(value, place)


def _intrinsic(transform: Callable[..., Vectors]) -> Any:
    """A function (source, start, row, column, target, start, row, column, channels, …)."""

    @intrinsic
    def apply(  # type: ignore[no-untyped-def]
        typingctx, source, start, row, column, target, place, down, across, channels, h, w, floor
    ):
        kinds = source, start, row, column, target, place, down, across, channels, h, w, floor

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            function = _Transform(builder.module, compiled_registers().width, transform).function
            builder.call(function, flatten_arguments(context, builder, sig.args, args))
            return context.get_dummy_value()

        return types.none(*kinds), codegen

    return apply


_transform_input = _intrinsic(_input)
_transform_output = _intrinsic(_output)
_transform_gradient = _intrinsic(_gradient)
_transform_weight = _intrinsic(_weight)
_transform_weight_gradient = _intrinsic(_weight_gradient)
_NOTHING = np.float32(-np.inf)


def scratch(strides: tuple[int, int], window: tuple[int, int], c: int, k: int) -> int:
    """Elements that the functions below need: 16 matrices of weights, inputs and outputs.

    0 where no processor computes so.
    """
    if strides != (1, 1) or window != (3, 3) or min(c, k) < FEWEST:
        return 0
    return 16 * (c * k + BLOCK * (c + k) + 2 * _GAP)


@expanded
def suits(geometry, c, k):  # type: ignore[no-untyped-def]
    """Whether a convolution can be computed so: channels must fill vectors."""
    size = vector_width()
    ones = geometry[2] == 1 and geometry[3] == 1 and geometry[4] == 3 and geometry[5] == 3
    return ones and c % size == 0 and k % size == 0 and min(c, k) >= FEWEST and max(c, k) <= MOST


@inlined
def transform_weights(w, start, c, k, u):  # type: ignore[no-untyped-def]
    """G w Gᵀ of weights (3, 3, C, K) as u (16, C, K)."""
    n = c * k
    _transform_weight(w, start, 3 * n, n, u, 0, 4 * n, n, n, 3, 3, _NOTHING)


@inlined
def correlate(a, a_start, row, c, u, bias, biased, y, y_start, h_out, w_out, k, floor, work):  # type: ignore[no-untyped-def]
    """One sample's y (h_out, w_out, K) from its padded maps of which a row has `row` elements.

    Args:
        a: pixels up to an even number of outputs must be readable; those behind count for nothing.
        u: from `transform_weights`.
        bias, biased: (K,) and whether to add it.
        floor: y is not below it.
        work: as long as `scratch` says, less u.
    """
    across = (w_out + 1) // 2
    tiles = (h_out + 1) // 2 * across
    x_matrix, y_matrix = BLOCK * c + _GAP, BLOCK * k + _GAP
    v, m = work[: 16 * x_matrix], work[16 * x_matrix :]
    for first in range(0, tiles, BLOCK):
        count = min(BLOCK, tiles - first)
        for t in range(count):
            i, j = (first + t) // across * 2, (first + t) % across * 2
            place = a_start + i * row + j * c
            _transform_input(
                *(a, place, row, c, v, t * c, 4 * x_matrix, x_matrix, c, 4, 4, _NOTHING)
            )
        for e in range(16):
            # Added to number (1, 1), bias reaches all four outputs once.
            d_row = 0 if biased and e == 5 else -1
            multiply_spaced(
                (v, e * x_matrix),
                (_RAMP, 0, c),
                (_RAMP, 0, 1),
                (u, e * c * k, k),
                (bias, 0, d_row),
                (m, e * y_matrix),
                (_RAMP, 0, k),
                (count, c, k),
                _NOTHING,
                12,
            )
        for t in range(count):
            i, j = (first + t) // across * 2, (first + t) % across * 2
            place = y_start + (i * w_out + j) * k
            _transform_output(
                *(m, t * k, 4 * y_matrix, y_matrix, y, place, w_out * k, k, k),
                *(h_out - i, w_out - j, floor),
            )


@inlined
def add_weight_gradient(a, a_start, row, c, dz, dz_start, h_out, w_out, k, sums, work):  # type: ignore[no-untyped-def]
    """Add (Bᵀ x B) ⊙ (A dz Aᵀ) of one sample to sums (16, C, K); other arguments as above."""
    across = (w_out + 1) // 2
    tiles = (h_out + 1) // 2 * across
    x_matrix, y_matrix = BLOCK * c + _GAP, BLOCK * k + _GAP
    v, m = work[: 16 * x_matrix], work[16 * x_matrix :]
    for first in range(0, tiles, BLOCK):
        count = min(BLOCK, tiles - first)
        for t in range(count):
            i, j = (first + t) // across * 2, (first + t) % across * 2
            place = a_start + i * row + j * c
            _transform_input(
                *(a, place, row, c, v, t * c, 4 * x_matrix, x_matrix, c, 4, 4, _NOTHING)
            )
            place = dz_start + (i * w_out + j) * k
            _transform_gradient(
                *(dz, place, w_out * k, k, m, t * k, 4 * y_matrix, y_matrix, k),
                *(h_out - i, w_out - j, _NOTHING),
            )
        for e in range(16):
            multiply_spaced(
                (v, e * x_matrix),
                (_RAMP, 0, 1),
                (_RAMP, 0, c),
                (m, e * y_matrix, k),
                (sums, e * c * k, k),
                (sums, e * c * k),
                (_RAMP, 0, k),
                (c, count, k),
                _NOTHING,
                # All rows are one run: a multiple of every group.
                12,
            )


@inlined
def finish_weight_gradient(sums, c, k, dw):  # type: ignore[no-untyped-def]
    """Dw (3, 3, C, K) = Gᵀ sums G."""
    n = c * k
    _transform_weight_gradient(sums, 0, 4 * n, n, dw, 0, 3 * n, n, n, 3, 3, _NOTHING)
