"""Transforms of Winograd convolutions F(4×4, 2×2), for 4 × 4 filters with stride 2.

A tile of 4 × 4 outputs of a 2 × 2 filter needs 5 × 5 inputs and 25 multiplications instead of 64
(`winograd_transforms` has the equations and references). The matrices evaluate polynomials at 0,
±¾, 2 and infinity, which are exact in float32; the RMS error is 2.5 times that of a direct sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.polynomial import polynomial
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined
from dptrain.backends.numba.microkernels import NO_LOWER_BOUND
from dptrain.backends.numba.vector import I64, Writer, compiled_registers, flatten_arguments
from dptrain.backends.numba.winograd_transforms import Transform, Vectors, weighted_sum

SIDE, TAPS = 4, 2
"""Rows and columns of the outputs of a tile, and of a filter."""
SIZE = SIDE + TAPS - 1
MATRICES = SIZE**2

_POINTS = (0.0, 0.75, -0.75, 2.0)
"""The evaluation points other than infinity."""


def _matrices() -> Mapping[str, NDArray[np.float64]]:
    """Return Bᵀ ("input"), Aᵀ ("output"), A ("gradient"), G ("weight") and Gᵀ ("sums")."""
    a, b, g = np.zeros((SIZE, SIDE)), np.zeros((SIZE, SIZE)), np.zeros((SIZE, TAPS))
    for j, point in enumerate(_POINTS):
        others = [other for other in _POINTS if other != point]
        a[j] = point ** np.arange(SIDE)
        b[j, : SIZE - 1] = polynomial.polyfromroots(others)
        g[j] = point ** np.arange(TAPS) / np.prod([point - other for other in others])
    a[-1, -1] = g[-1, -1] = 1
    b[-1] = polynomial.polyfromroots(_POINTS)
    return {"input": b, "output": a.T, "gradient": a, "weight": g, "sums": g.T}


_MATRICES = MappingProxyType(_matrices())


class _StridedTransform(Transform):
    """One of the transforms by name, see `_matrices`."""

    def __init__(self, module: ir.Module, width: int, name: str, whole: bool = True) -> None:
        self.matrix, self.whole, self.masked, self.adds = _MATRICES[name], whole, False, False
        self.is_output, self.is_gradient = name == "output", name == "gradient"
        name = f"dptrain_winograd_strided_{name}{'' if whole else '_part'}"
        Writer.__init__(self, module, name, self.ARGUMENTS, width)

    def size(self) -> int:
        return int(self.matrix.shape[1])

    def row_groups(self) -> Sequence[Sequence[int]]:
        return (range(self.result_size()),)

    def result_size(self) -> int:
        return int(self.matrix.shape[0])

    def apply(self, column: Vectors) -> Vectors:
        return [
            weighted_sum(
                self, *((float(f), v) for f, v in zip(factors, column, strict=True) if f != 0)
            )
            for factors in self.matrix
        ]


def _intrinsic(name: str) -> Any:
    """A function (source, start, row, column, target, start, row, column, channels, rows, columns,
    bias, start, lower bound).
    """

    def write(builder: ir.IRBuilder, flat: Sequence[ir.Value]) -> None:
        width, module = compiled_registers().width, builder.module
        whole = _StridedTransform(module, width, name).for_all_vectors
        if name not in ("output", "gradient"):
            builder.call(whole, flat)
            return
        part = _StridedTransform(module, width, name, False).for_all_vectors
        exist = (builder.icmp_signed(">=", count, I64(SIDE)) for count in flat[7:9])
        with builder.if_else(builder.and_(*exist), likely=True) as (all_, some):
            with all_:
                builder.call(whole, flat)
            with some:
                builder.call(part, flat)

    @intrinsic
    def apply(  # type: ignore[no-untyped-def]
        typingctx, source, start, row, column, target, target_start, down, across, channels, h, w,
        bias, bias_start, lower_bound,
    ):  # fmt: skip
        kinds = (
            source, start, row, column, target, target_start, down, across, channels, h, w,
            bias, bias_start, lower_bound,
        )  # fmt: skip

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            write(builder, flatten_arguments(context, builder, sig.args, args))
            return context.get_dummy_value()

        return types.none(*kinds), codegen

    return apply


_transform_input = _intrinsic("input")
_transform_output = _intrinsic("output")
_transform_gradient = _intrinsic("gradient")
_transform_weight = _intrinsic("weight")
_transform_sums = _intrinsic("sums")


@inlined
def transform_weights(w, start, row, column, u, u_start, matrix, count):  # type: ignore[no-untyped-def]
    """U = G w Gᵀ of `count` weights at each of 2 × 2 positions `row` and `column` elements apart.

    Args:
        matrix: distance of the 25 elements of U.
    """
    _transform_weight(
        w, start, row, column, u, u_start, SIZE * matrix, matrix, count, TAPS, TAPS,
        w, start, NO_LOWER_BOUND,
    )  # fmt: skip


@inlined
def transform_sums(sums, start, matrix, dw, dw_start, row, column, count):  # type: ignore[no-untyped-def]
    """Dw = Gᵀ sums G, the transpose of `transform_weights`."""
    _transform_sums(
        sums, start, SIZE * matrix, matrix, dw, dw_start, row, column, count, TAPS, TAPS,
        sums, start, NO_LOWER_BOUND,
    )  # fmt: skip


@inlined
def transform_inputs(a, start, row, c, across, count, v, v_start, matrix):  # type: ignore[no-untyped-def]
    """V = Bᵀ x B of `count` tiles of padded maps, of which a row has `row` elements.

    Args:
        across: tiles of a row.
        matrix: distance of the matrices of V (25, tiles, C).
    """
    for t in range(count):
        i, j = t // across * SIDE, t % across * SIDE
        _transform_input(
            a, start + i * row + j * c, row, c, v, v_start + t * c, SIZE * matrix, matrix, c,
            SIZE, SIZE, a, start, NO_LOWER_BOUND,
        )  # fmt: skip


@inlined
def transform_outputs(  # type: ignore[no-untyped-def]
    m, m_start, matrix, k, across, count, y, start, row, column, rows, columns, bias, lower_bound
):
    """Bias + Aᵀ M A of `count` tiles, at least `lower_bound`, in maps y (rows, columns, K).

    Args:
        row, column: distances of the rows and pixels of y.
        bias: start of the bias in m.
    """
    for t in range(count):
        i, j = t // across * SIDE, t % across * SIDE
        _transform_output(
            m, m_start + t * k, SIZE * matrix, matrix, y, start + i * row + j * column, row, column,
            k, rows - i, columns - j, m, bias, lower_bound,
        )  # fmt: skip


@inlined
def transform_gradients(  # type: ignore[no-untyped-def]
    dz, start, rows, columns, k, channels, across, count, m, m_start, matrix
):
    """M = A dz Aᵀ of `count` tiles and some channels of maps dz (rows, columns, K)."""
    for t in range(count):
        i, j = t // across * SIDE, t % across * SIDE
        _transform_gradient(
            dz, start + (i * columns + j) * k, columns * k, k, m, m_start + t * channels,
            SIZE * matrix, matrix, channels, rows - i, columns - j, dz, start, NO_LOWER_BOUND,
        )  # fmt: skip
