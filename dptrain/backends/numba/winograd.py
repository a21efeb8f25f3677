"""Convolutions of 3 by 3, stride 1, with 36 multiplications for every 144: F(4×4, 3×3).

Four rows and columns of outputs at a time, a *tile*, come from six of inputs:

    y = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ x B)] A,      dw = Gᵀ [(Bᵀ x B) ⊙ (A dy Aᵀ)] G

summed over channels on the left and over tiles on the right: so the elementwise products ⊙ are 36
matrix products, which `microkernels` computes. A, B and G evaluate polynomials at 0, ±¾, ±3/2 and
infinity. Rounding grows with the spread of the points' powers: with the usual 0, ±1, ±2 the error
is twice as large as with these, which all are exact in float32 (docs/kernels.md has figures).

Source: A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016;
B. Barabasz, A. Anderson, K. M. Soodhalter and D. Gregg, Error Analysis and Improving the Accuracy
of Winograd Convolution for Deep Neural Networks, ACM TOMS 46, 2020.
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

SIDE = 4
"""Rows and columns of outputs in a tile."""
MATRICES = (SIDE + 2) ** 2

BLOCK = 48
"""Tiles between two transforms: what they leave stays in L2."""

FEWEST, MOST = 16, 512
"""Channels. Below, the transforms cost what the products save; above is beyond the ramp."""

_RAMP = np.arange(MOST, dtype=np.int32)
_GAP = 16
"""Elements between the matrices: without them all lie in the same sets of the cache."""

_P, _Q = 0.75, 1.5
"""The points besides 0 and infinity are ±P and ±Q."""
_PP, _QQ = _P * _P, _Q * _Q

Vectors = Sequence[ir.Value]


def _sum(w: Writer, *terms: tuple[float, ir.Value]) -> ir.Value:
    """Σ factor · vector, by as many multiply-adds as there are factors but 1."""
    plain = [value for factor, value in terms if factor == 1]
    rest = [(factor, value) for factor, value in terms if factor != 1]
    total = plain[0] if plain else None
    for value in plain[1:]:
        total = w.builder.fadd(total, value)
    for factor, value in rest:
        constant = ir.Constant(w.vector, [factor] * w.width)
        if total is None:
            total = w.builder.fmul(constant, value)
        else:
            total = w.multiply_add(constant, value, total)
    return total


def _input(w: Writer, d: Vectors) -> Vectors:
    """Bᵀ d."""
    both, product = -(_PP + _QQ), _PP * _QQ
    p_even, p_odd = _sum(w, (1, d[4]), (-_QQ, d[2])), _sum(w, (1, d[3]), (-_QQ, d[1]))
    q_even, q_odd = _sum(w, (1, d[4]), (-_PP, d[2])), _sum(w, (1, d[3]), (-_PP, d[1]))
    return (
        _sum(w, (1, d[4]), (both, d[2]), (product, d[0])),
        _sum(w, (1, p_even), (_P, p_odd)),
        _sum(w, (1, p_even), (-_P, p_odd)),
        _sum(w, (1, q_even), (_Q, q_odd)),
        _sum(w, (1, q_even), (-_Q, q_odd)),
        _sum(w, (1, d[5]), (both, d[3]), (product, d[1])),
    )


def _output(w: Writer, m: Vectors) -> Vectors:
    """Aᵀ m."""
    b = w.builder
    p_sum, p_difference = b.fadd(m[1], m[2]), b.fsub(m[1], m[2])
    q_sum, q_difference = b.fadd(m[3], m[4]), b.fsub(m[3], m[4])
    return (
        _sum(w, (1, m[0]), (1, p_sum), (1, q_sum)),
        _sum(w, (_P, p_difference), (_Q, q_difference)),
        _sum(w, (_PP, p_sum), (_QQ, q_sum)),
        _sum(w, (1, m[5]), (_P * _PP, p_difference), (_Q * _QQ, q_difference)),
    )


def _gradient(w: Writer, y: Vectors) -> Vectors:
    """A y."""
    p_even, p_odd = _sum(w, (1, y[0]), (_PP, y[2])), _sum(w, (1, y[1]), (_PP, y[3]))
    q_even, q_odd = _sum(w, (1, y[0]), (_QQ, y[2])), _sum(w, (1, y[1]), (_QQ, y[3]))
    return (
        y[0],
        _sum(w, (1, p_even), (_P, p_odd)),
        _sum(w, (1, p_even), (-_P, p_odd)),
        _sum(w, (1, q_even), (_Q, q_odd)),
        _sum(w, (1, q_even), (-_Q, q_odd)),
        y[3],
    )


_F0, _FP, _FQ = _PP * _QQ, 2 * _PP * (_PP - _QQ), 2 * _QQ * (_QQ - _PP)
"""What G divides by: each point's product of distances from the others."""


def _weight(w: Writer, g: Vectors) -> Vectors:
    """G g."""
    return (
        _sum(w, (1 / _F0, g[0])),
        _sum(w, (1 / _FP, g[0]), (_P / _FP, g[1]), (_PP / _FP, g[2])),
        _sum(w, (1 / _FP, g[0]), (-_P / _FP, g[1]), (_PP / _FP, g[2])),
        _sum(w, (1 / _FQ, g[0]), (_Q / _FQ, g[1]), (_QQ / _FQ, g[2])),
        _sum(w, (1 / _FQ, g[0]), (-_Q / _FQ, g[1]), (_QQ / _FQ, g[2])),
        g[2],
    )


def _weight_gradient(w: Writer, s: Vectors) -> Vectors:
    """Gᵀ s."""
    b = w.builder
    p_sum, p_difference = b.fadd(s[1], s[2]), b.fsub(s[1], s[2])
    q_sum, q_difference = b.fadd(s[3], s[4]), b.fsub(s[3], s[4])
    return (
        _sum(w, (1 / _F0, s[0]), (1 / _FP, p_sum), (1 / _FQ, q_sum)),
        _sum(w, (_P / _FP, p_difference), (_Q / _FQ, q_difference)),
        _sum(w, (1, s[5]), (_PP / _FP, p_sum), (_QQ / _FQ, q_sum)),
    )


_SIZES: Mapping[Callable[..., Vectors], int] = {
    _input: SIDE + 2,
    _output: SIDE + 2,
    _gradient: SIDE,
    _weight: 3,
    _weight_gradient: SIDE + 2,
}
"""Elements that each takes along rows and columns."""


class _Transform(Writer):
    """One of the above along rows and columns of a small matrix of vectors.

    Of a gradient's or output's rows and columns only the first ``rows`` and ``columns`` exist. An
    output is bias + the transform, but not below the floor.
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
        "bias": F32P,
        "biased": I64,
        "floor": F32,
    }

    def __init__(
        self, module: ir.Module, width: int, transform: Callable[..., Vectors], whole: bool
    ) -> None:
        self.transform, self.whole = transform, whole
        name = f"dptrain_winograd{transform.__name__}{'' if whole else '_part'}"
        super().__init__(module, name, self.ARGUMENTS, width)

    def write(self) -> None:
        def body(q: ir.Value, _: Vectors) -> Vectors:
            size = range(_SIZES[self.transform])
            matrix = [[self._element(q, i, j) for j in size] for i in size]
            for _axis in range(2):
                # Along the first index, and turned: twice makes both.
                done = [self.transform(self, column) for column in zip(*matrix, strict=True)]
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
        if self.transform is not _gradient or self.whole or i + j == 0:
            return self.load(self._place("source", q, i, j))
        b, exists = self.builder, self._exists(i, j)
        places = self._place("source", q, i, j), self._place("source", q, 0, 0)
        return b.select(exists, self.load(b.select(exists, *places)), self.zero)

    def _store(self, value: ir.Value, q: ir.Value, i: int, j: int) -> None:
        b, place = self.builder, self._place("target", q, i, j)
        if self.transform is not _output:
            self.store(value, place)
            return
        biased = b.icmp_signed("!=", self.args["biased"], I64(0))
        bias = b.select(biased, self.load(self.at(self.args["bias"], q)), self.zero)
        floor, value = self.splat(self.args["floor"]), b.fadd(value, bias)
        value = b.select(b.fcmp_ordered("<", value, floor), floor, value)
        if self.whole:
            self.store(value, place)
            return
        with b.if_then(self._exists(i, j), likely=True):
            self.store(value, place)


def _intrinsic(transform: Callable[..., Vectors]) -> Any:
    """A function (source, …, target, …, channels, rows, columns, bias, …, floor)."""

    @intrinsic
    def apply(  # type: ignore[no-untyped-def]
        typingctx, source, start, row, column, target, place, down, across, channels, h, w,
        bias, bias_start, biased, floor,
    ):  # fmt: skip
        kinds = (
            source, start, row, column, target, place, down, across, channels, h, w,
            bias, bias_start, biased, floor,
        )  # fmt: skip

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            flat = flatten_arguments(context, builder, sig.args, args)
            width, module = compiled_registers().width, builder.module
            if transform not in (_output, _gradient):
                builder.call(_Transform(module, width, transform, True).function, flat)
                return context.get_dummy_value()
            rows, columns = flat[7], flat[8]
            whole = builder.and_(
                builder.icmp_signed(">=", rows, I64(SIDE)),
                builder.icmp_signed(">=", columns, I64(SIDE)),
            )
            with builder.if_else(whole, likely=True) as (all_, some):
                with all_:
                    builder.call(_Transform(module, width, transform, True).function, flat)
                with some:
                    builder.call(_Transform(module, width, transform, False).function, flat)
            return context.get_dummy_value()

        return types.none(*kinds), codegen

    return apply


_transform_input = _intrinsic(_input)
_transform_output = _intrinsic(_output)
_transform_gradient = _intrinsic(_gradient)
_transform_weight = _intrinsic(_weight)
_transform_weight_gradient = _intrinsic(_weight_gradient)
_NOTHING = np.float32(-np.inf)


def wins(window: tuple[int, int], maps: tuple[int, int], fewest: int, forward: bool) -> bool:
    """Whether stages take less time than on the tile unit (`tile_convolution`).

    Measured: forward below 32 channels (16 → 32, 16 × 16 maps: 291 against 384 µs; 32 → 64,
    46 × 46: 2255 against 1843), backward always, if tiles of 4 × 4 cover the outputs without a
    third more (10 × 10: 310 against 222).

    Args:
        window: (R, S).
        maps: height and width of the output, or backward by the input of that.
        fewest: channels of input or output, whichever has fewer.
    """
    covered = [-(-n // SIDE) * SIDE for n in maps]
    close = 3 * covered[0] * covered[1] <= 4 * maps[0] * maps[1]
    return window == (3, 3) and close and (fewest < 32 or not forward)


def scratch(strides: tuple[int, int], window: tuple[int, int], c: int, k: int) -> int:
    """Elements that the functions below need: matrices of weights, inputs and outputs.

    0 where no processor computes so.
    """
    if strides != (1, 1) or window != (3, 3) or min(c, k) < FEWEST:
        return 0
    return MATRICES * (c * k + BLOCK * (c + k) + 2 * _GAP)


@expanded
def suits(geometry, c, k):  # type: ignore[no-untyped-def]
    """Whether a convolution can be computed so: channels must fill vectors."""
    size = vector_width()
    ones = geometry[2] == 1 and geometry[3] == 1 and geometry[4] == 3 and geometry[5] == 3
    return ones and c % size == 0 and k % size == 0 and min(c, k) >= FEWEST and max(c, k) <= MOST


@inlined
def around(outputs):  # type: ignore[no-untyped-def]
    """Rows or columns of padded maps that so many rows or columns of outputs read."""
    return (outputs + SIDE - 1) // SIDE * SIDE + 2


@inlined
def transform_weights(w, start, c, k, u):  # type: ignore[no-untyped-def]
    """G w Gᵀ of weights (3, 3, C, K) as u (36, C, K)."""
    n = c * k
    _transform_weight(w, start, 3 * n, n, u, 0, 6 * n, n, n, 3, 3, w, start, 0, _NOTHING)


@inlined
def correlate(a, a_start, row, c, u, bias, biased, y, y_start, h_out, w_out, k, floor, work):  # type: ignore[no-untyped-def]
    """One sample's y (h_out, w_out, K) from its padded maps of which a row has `row` elements.

    Args:
        a: pixels up to a multiple of `SIDE` outputs each way must be readable and no larger than
            others, for they take part in roundings; `around` says how many pixels these are.
        u: from `transform_weights`.
        bias, biased: (K,) and whether to add it.
        floor: y is not below it.
        work: as long as `scratch` says, less u.
    """
    across = (w_out + SIDE - 1) // SIDE
    tiles = (h_out + SIDE - 1) // SIDE * across
    x_matrix, y_matrix = BLOCK * c + _GAP, BLOCK * k + _GAP
    v, m = work[: MATRICES * x_matrix], work[MATRICES * x_matrix :]
    for first in range(0, tiles, BLOCK):
        count = min(BLOCK, tiles - first)
        for t in range(count):
            i, j = (first + t) // across * SIDE, (first + t) % across * SIDE
            place = a_start + i * row + j * c
            _transform_input(
                *(a, place, row, c, v, t * c, 6 * x_matrix, x_matrix, c, 6, 6),
                *(bias, 0, 0, _NOTHING),
            )
        for e in range(MATRICES):
            multiply_spaced(
                (v, e * x_matrix),
                (_RAMP, 0, c),
                (_RAMP, 0, 1),
                (u, e * c * k, k),
                (bias, 0, -1),
                (m, e * y_matrix),
                (_RAMP, 0, k),
                (count, c, k),
                _NOTHING,
                12,
            )
        for t in range(count):
            i, j = (first + t) // across * SIDE, (first + t) % across * SIDE
            place = y_start + (i * w_out + j) * k
            _transform_output(
                *(m, t * k, 6 * y_matrix, y_matrix, y, place, w_out * k, k, k),
                *(h_out - i, w_out - j, bias, 0, biased, floor),
            )


@inlined
def add_weight_gradient(a, a_start, row, c, dz, dz_start, h_out, w_out, k, sums, work):  # type: ignore[no-untyped-def]
    """Add (Bᵀ x B) ⊙ (A dz Aᵀ) of one sample to sums (36, C, K); other arguments as above."""
    across = (w_out + SIDE - 1) // SIDE
    tiles = (h_out + SIDE - 1) // SIDE * across
    x_matrix, y_matrix = BLOCK * c + _GAP, BLOCK * k + _GAP
    v, m = work[: MATRICES * x_matrix], work[MATRICES * x_matrix :]
    for first in range(0, tiles, BLOCK):
        count = min(BLOCK, tiles - first)
        for t in range(count):
            i, j = (first + t) // across * SIDE, (first + t) % across * SIDE
            place = a_start + i * row + j * c
            _transform_input(
                *(a, place, row, c, v, t * c, 6 * x_matrix, x_matrix, c, 6, 6),
                *(dz, 0, 0, _NOTHING),
            )
            place = dz_start + (i * w_out + j) * k
            _transform_gradient(
                *(dz, place, w_out * k, k, m, t * k, 6 * y_matrix, y_matrix, k),
                *(h_out - i, w_out - j, dz, 0, 0, _NOTHING),
            )
        for e in range(MATRICES):
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
    _transform_weight_gradient(*(sums, 0, 6 * n, n, dw, 0, 3 * n, n, n, 3, 3, sums, 0, 0, _NOTHING))
