"""Transforms of Winograd convolutions F(4×4, 3×3) and F(2×2, 5×5).

A *tile* of 4 × 4 outputs of a 3 × 3 filter needs 6 × 6 inputs and 36 multiplications instead of
144; a tile of 2 × 2 outputs of a 5 × 5 filter needs 36 instead of 100:

    y = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ x B)] A,      dw = Gᵀ [(Bᵀ x B) ⊙ (A dy Aᵀ)] G

The left equation is summed over channels, the right one over tiles, so the elementwise products ⊙
are 36 matrix products, computed by `microkernels`. A, B and G evaluate polynomials at 0, ±¾, ±3/2
and infinity. Rounding errors grow with the spread of the points' powers: these points are exact in
float32 and have half the error of the usual 0, ±1, ±2 (docs/developers/kernels). B has six rows
and columns and is the same for all of them.

Source: A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016; B.
Barabasz, A. Anderson, K. M. Soodhalter and D. Gregg, Error Analysis and Improving the Accuracy of
Winograd Convolution for Deep Neural Networks, ACM TOMS 46, 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from dptrain.backends.numba.convolution.microkernels import (
    NO_LOWER_BOUND,
    multiply_in_place,
    multiply_panel,
    multiply_spaced,
)
from dptrain.backends.numba.prefetching import prefetch_share, prefetch_share_for_writing
from dptrain.backends.numba.vector import (
    F32,
    F32P,
    I64,
    Writer,
    compiled_registers,
    flatten_arguments,
    vector_width,
)
from dptrain.native.jit import inlined

SIDE = 4
"""Rows and columns of outputs in a tile of 3 × 3 filters."""
SIDES = {3: SIDE, 5: 2}
"""Rows and columns of outputs in a tile, by rows and columns of the filters."""
INTEGERS = {3: np.int64, 5: np.int32}
"""Integer type of `WinogradGeometry.taps` by filter size. Kernels are compiled for the types of
their arguments, so each filter size has its own kernel; one kernel for two sizes took 2 s more to
compile."""
MATRICES = (SIDE + 2) ** 2
PANEL = 32
"""Columns of a panel of a (C, K) matrix. Panel p is contiguous and starts at element PANEL · p · C;
the last one may have fewer columns. The products read U, and add to the sums of the weight
gradient, panel by panel, so that both are read sequentially: they may exceed the L2 cache."""

_P, _Q = 0.75, 1.5
"""The evaluation points other than 0 and infinity are ±P and ±Q."""
_PP, _QQ = _P * _P, _Q * _Q

Vectors = Sequence[ir.Value]


def weighted_sum(w: Writer, *terms: tuple[float, ir.Value]) -> ir.Value:
    """Return Σ factor · vector with one multiply-add for each factor other than 1."""
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


def input_transform(w: Writer, d: Vectors) -> Vectors:
    """Bᵀ d."""
    both, product = -(_PP + _QQ), _PP * _QQ
    p_even, p_odd = (
        weighted_sum(w, (1, d[4]), (-_QQ, d[2])),
        weighted_sum(w, (1, d[3]), (-_QQ, d[1])),
    )
    q_even, q_odd = (
        weighted_sum(w, (1, d[4]), (-_PP, d[2])),
        weighted_sum(w, (1, d[3]), (-_PP, d[1])),
    )
    return (
        weighted_sum(w, (1, d[4]), (both, d[2]), (product, d[0])),
        weighted_sum(w, (1, p_even), (_P, p_odd)),
        weighted_sum(w, (1, p_even), (-_P, p_odd)),
        weighted_sum(w, (1, q_even), (_Q, q_odd)),
        weighted_sum(w, (1, q_even), (-_Q, q_odd)),
        weighted_sum(w, (1, d[5]), (both, d[3]), (product, d[1])),
    )


def output_transform(w: Writer, m: Vectors, side: int = SIDE) -> Vectors:
    """Aᵀ m."""
    b = w.builder
    p_sum, p_difference = b.fadd(m[1], m[2]), b.fsub(m[1], m[2])
    q_sum, q_difference = b.fadd(m[3], m[4]), b.fsub(m[3], m[4])
    outputs = [weighted_sum(w, (1, m[0]), (1, p_sum), (1, q_sum))]
    for i in range(1, side):
        p, q = (p_difference, q_difference) if i % 2 else (p_sum, q_sum)
        last = [(1.0, m[5])] if i == side - 1 else []
        outputs.append(weighted_sum(w, *last, (_P**i, p), (_Q**i, q)))
    return outputs


def gradient_transform(w: Writer, y: Vectors) -> Vectors:
    """A y."""

    def even_and_odd(square: float) -> Vectors:
        """Return the terms of even powers, and those of odd powers over the point."""
        return [
            weighted_sum(w, *((square**i, value) for i, value in enumerate(y[first::2])))
            for first in range(2)
        ]

    (p_even, p_odd), (q_even, q_odd) = even_and_odd(_PP), even_and_odd(_QQ)
    return (
        y[0],
        weighted_sum(w, (1, p_even), (_P, p_odd)),
        weighted_sum(w, (1, p_even), (-_P, p_odd)),
        weighted_sum(w, (1, q_even), (_Q, q_odd)),
        weighted_sum(w, (1, q_even), (-_Q, q_odd)),
        y[-1],
    )


_F0, _FP, _FQ = _PP * _QQ, 2 * _PP * (_PP - _QQ), 2 * _QQ * (_QQ - _PP)
"""Divisors of G: each point's product of distances from the other points."""


def weight_transform(w: Writer, g: Vectors) -> Vectors:
    """G g."""

    def value(point: float, divisor: float) -> ir.Value:
        return weighted_sum(w, *((point**i / divisor, element) for i, element in enumerate(g)))

    return (
        weighted_sum(w, (1 / _F0, g[0])),
        value(_P, _FP),
        value(-_P, _FP),
        value(_Q, _FQ),
        value(-_Q, _FQ),
        g[-1],
    )


def weight_gradient_transform(w: Writer, s: Vectors, taps: int = 3) -> Vectors:
    """Gᵀ s."""
    b = w.builder
    p_sum, p_difference = b.fadd(s[1], s[2]), b.fsub(s[1], s[2])
    q_sum, q_difference = b.fadd(s[3], s[4]), b.fsub(s[3], s[4])
    elements = [weighted_sum(w, (1 / _F0, s[0]), (1 / _FP, p_sum), (1 / _FQ, q_sum))]
    for i in range(1, taps):
        p, q = (p_difference, q_difference) if i % 2 else (p_sum, q_sum)
        last = [(1.0, s[5])] if i == taps - 1 else []
        elements.append(weighted_sum(w, *last, (_P**i / _FP, p), (_Q**i / _FQ, q)))
    return elements


class Transform(Writer):
    """One of the transforms of one vector of channels, along the rows and the columns of a small
    matrix of vectors.

    Only the first ``rows`` and ``columns`` of a gradient or output exist. An output is the
    transform plus bias, at least the lower bound.

    Args:
        taps: rows and columns of the filters.
        whole: True if all rows and columns exist.
        masked: True for less than one vector of channels of an output or gradient.
        adds: True if an output is added to what is in memory.
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
        "lower_bound": F32,
    }

    def __init__(
        self,
        module: ir.Module,
        width: int,
        transform: Callable[..., Vectors],
        taps: int,
        whole: bool = True,
        masked: bool = False,
        adds: bool = False,
    ) -> None:
        self.transform, self.taps, self.whole, self.masked = transform, taps, whole, masked
        self.adds = adds
        self.is_output = transform is output_transform
        self.is_gradient = transform is gradient_transform
        suffix = ("" if whole else "_part") + ("_masked" if masked else "")
        suffix += "_adds" if adds else ""
        name = f"dptrain_winograd_{transform.__name__}_{taps}{suffix}_x{width}"
        super().__init__(module, name, self.ARGUMENTS, width)

    def write(self) -> None:
        if self.masked:
            self.mask_after(self.args["channels"])
        size = range(self.size())
        sources = self._addresses("source", self.size())
        targets = self._addresses("target", self.result_size())
        offset = self._offset() if self.is_output else (self.zero, self.zero)
        for rows in self.row_groups():
            # Rows that are not in the group are not used, so LLVM removes them.
            columns = [self.apply([self._element(sources, i, j) for i in size]) for j in size]
            for i in rows:
                for j, value in enumerate(self.apply([column[i] for column in columns])):
                    self._store(value, targets[i][j], i, j, offset)

    @property
    def for_all_vectors(self) -> ir.Function:
        """The function that transforms ``channels`` channels, a multiple of the vector width."""
        return _AllVectors(self).function

    def row_groups(self) -> Sequence[Sequence[int]]:
        """Return the rows of the result in groups that are computed one after the other.

        All columns of a group stay in registers between the transforms of columns and of rows. The
        stores of a group keep LLVM from loading the elements of the next one earlier.
        """
        if self.transform is input_transform or (self.is_gradient and self.whole):
            return (0,), (1, 2), (3, 4), (5,)
        return (range(self.result_size()),)

    def result_size(self) -> int:
        """Return the rows and columns of the result."""
        sizes = {output_transform: SIDES[self.taps], weight_gradient_transform: self.taps}
        return sizes.get(self.transform, SIDE + 2)

    def size(self) -> int:
        """Return the rows and columns of the matrix that is transformed."""
        sizes = {gradient_transform: SIDES[self.taps], weight_transform: self.taps}
        return sizes.get(self.transform, SIDE + 2)

    def apply(self, column: Vectors) -> Vectors:
        """Transform one column."""
        if self.transform is output_transform:
            return output_transform(self, column, SIDES[self.taps])
        if self.transform is weight_gradient_transform:
            return weight_gradient_transform(self, column, self.taps)
        return self.transform(self, column)

    def _addresses(self, which: str, size: int) -> list[list[ir.Value]]:
        """Return the addresses of the elements of a matrix, each from the one before."""
        row, addresses = self.args[which], []
        for _ in range(size):
            columns = [row]
            for _ in range(1, size):
                columns.append(self.at(columns[-1], self.args[f"{which}_column"]))
            addresses.append(columns)
            row = self.at(row, self.args[f"{which}_row"])
        return addresses

    def _exists(self, i: int, j: int) -> ir.Value:
        b, args = self.builder, self.args
        row, column = (
            b.icmp_signed("<", I64(p), args[n]) for p, n in ((i, "rows"), (j, "columns"))
        )
        return b.and_(row, column)

    def _element(self, sources: Sequence[Vectors], i: int, j: int) -> ir.Value:
        if not self.is_gradient:
            return self.load(sources[i][j])
        if self.whole or i + j == 0:
            return self.load(sources[i][j], masked=self.masked)
        b, exists = self.builder, self._exists(i, j)
        address = b.select(exists, sources[i][j], sources[0][0])
        value = self.load(address, masked=self.masked)
        return b.select(exists, value, self.zero)

    def _offset(self) -> tuple[ir.Value, ir.Value]:
        """Bias and the lower bound."""
        return self.load(self.args["bias"]), self.splat(self.args["lower_bound"])

    def _store(
        self, value: ir.Value, address: ir.Value, i: int, j: int, offset: tuple[ir.Value, ir.Value]
    ) -> None:
        b, (bias, lower_bound) = self.builder, offset
        if self.is_output:
            value = b.fadd(value, bias)
            value = b.select(b.fcmp_ordered("<", value, lower_bound), lower_bound, value)
        if not self.is_output or self.whole:
            self._store_or_add(value, address, self.is_output and self.masked)
            return
        with b.if_then(self._exists(i, j), likely=True):
            self._store_or_add(value, address, self.masked)

    def _store_or_add(self, value: ir.Value, address: ir.Value, masked: bool) -> None:
        if self.adds:
            value = self.builder.fadd(value, self.load(address, masked=masked))
        self.store(value, address, masked)


class _AllVectors(Writer):
    """Calls a transform of one vector for each vector of channels.

    With a loop in the transform itself, LLVM calculates the addresses of all elements before the
    loop. They do not fit the registers, and most transforms have only one to four vectors.
    """

    def __init__(self, transform: Transform) -> None:
        self.one_vector = transform.function
        name = f"{transform.function.name}_all"
        super().__init__(transform.module, name, transform.ARGUMENTS, transform.width)

    def write(self) -> None:
        def call(q: ir.Value, _: Vectors) -> Vectors:
            args = dict(self.args)
            for name in ("source", "target", "bias"):
                args[name] = self.at(args[name], q)
            self.builder.call(self.one_vector, list(args.values()))
            return []

        self.loop(I64(0), self.args["channels"], [], call, step=self.width)


def _intrinsic(transform: Callable[..., Vectors], adds: bool = False) -> Any:
    """A function ((source, …), (target, …), channels, (rows, columns), (bias, …), lower_bound,
    taps).
    """

    def write(builder: ir.IRBuilder, taps: int, flat: Sequence[ir.Value]) -> None:
        """Call the transform for filters of some size.

        Channels after the last whole vector are in a vector of half the width if they fit.
        """
        width, module = compiled_registers().width, builder.module
        arguments = dict(zip(Transform.ARGUMENTS, flat, strict=True))

        def call(size: int, whole: bool = True, masked: bool = False) -> None:
            part = Transform(module, size, transform, taps, whole, masked, adds)
            function = part.function if masked else part.for_all_vectors
            builder.call(function, list(arguments.values()))

        def call_by_shape(size: int, masked: bool) -> None:
            with builder.if_else(exist, likely=True) as (all_, some):
                with all_:
                    call(size, True, masked)
                with some:
                    call(size, False, masked)

        if transform not in (input_transform, output_transform, gradient_transform):
            call(width)
            return
        channels, side = arguments["channels"], I64(SIDES[taps])
        rest = builder.and_(channels, I64(width - 1))
        arguments["channels"] = builder.sub(channels, rest)
        exist = builder.and_(
            *(builder.icmp_signed(">=", arguments[n], side) for n in ("rows", "columns"))
        )
        if transform is input_transform:
            call(width)
        else:
            call_by_shape(width, False)
        with builder.if_then(builder.icmp_signed(">", rest, I64(0)), likely=False):
            for name in ("source", "target", "bias"):
                arguments[name] = builder.gep(arguments[name], [arguments["channels"]])
            arguments["channels"] = rest
            if transform is input_transform:
                call(width // 2)
            elif transform is gradient_transform:
                call(width, False, True)
            else:
                few = builder.icmp_signed("<=", rest, I64(width // 2))
                with builder.if_else(few) as (half, most):
                    with half:
                        call_by_shape(width // 2, True)
                    with most:
                        call(width, False, True)

    @intrinsic
    def apply(typingctx, source, target, channels, size, bias, lower_bound, taps):
        def codegen(context, builder, sig, args):
            *flat, _ = flatten_arguments(context, builder, sig.args, args)
            integer = types.unliteral(taps)
            (chosen,) = (n for n, kind in INTEGERS.items() if integer == from_dtype(np.dtype(kind)))
            write(builder, chosen, flat)
            return context.get_dummy_value()

        kinds = source, target, channels, size, bias, lower_bound, taps
        return types.none(*kinds), codegen

    return apply


_transform_input = _intrinsic(input_transform)
_transform_output = _intrinsic(output_transform)
_add_output = _intrinsic(output_transform, adds=True)
_transform_gradient = _intrinsic(gradient_transform)
_transform_weight = _intrinsic(weight_transform)
_transform_weight_gradient = _intrinsic(weight_gradient_transform)


@inlined
def transform_weights(w, start, taps, matrix, u, u_start, u_matrix, count):
    """Transform `count` weights at each position: u = G w Gᵀ.

    Args:
        w: (taps, taps, …), positions `matrix` elements apart.
        u: (6, 6, …), positions `u_matrix` elements apart.
    """
    _transform_weight(
        (w, start, taps * matrix, matrix), (u, u_start, 6 * u_matrix, u_matrix), count,
        (taps, taps), (w, start), NO_LOWER_BOUND, taps,
    )  # fmt: skip


@inlined
def transform_inputs(geo, tiles, channels, mine, ahead):
    """V = Bᵀ x B of some tiles of the padded rows.

    Args:
        channels: channels to compute: C rounded up to a multiple of half a vector, or to whole
            vectors, which are the channels of V. Additional ones are undefined.
        mine: scratch memory.
        ahead: part of an array that is prefetched.
    """
    side, matrix, c, row = geo.tile_side, geo.v_stride, geo.c, geo.padded_width * geo.c
    for t in range(tiles.num):
        prefetch_share(ahead, t, tiles.num)
        tile, at = tiles.first + t, geo.v_offset + (tiles.at + t) * geo.c_vectors
        i, j = tile // geo.tiles_across * side, tile % geo.tiles_across * side
        _transform_input(
            (mine, geo.padded_offset + i * row + j * c, row, c), (mine, at, 6 * matrix, matrix),
            channels, (6, 6), (mine, geo.padded_offset), NO_LOWER_BOUND, 3,
        )  # fmt: skip


@inlined
def transform_outputs(geo, tiles, filters, mine, y, lower_bound, adds):
    """Bias + Aᵀ M A of some tiles, at least `lower_bound`.

    Args:
        filters: the first, and the end.
        mine: scratch memory.
        y: (flat array, first element) of the rows of the tiles.
        adds: None, or whether the result is added to y.
    """
    (q, q_stop), (values, start), matrix, k, row = (
        filters,
        y,
        geo.m_stride,
        geo.k,
        geo.w_out * geo.k,
    )
    top, side, taps, bias = tiles.row * geo.tile_side, geo.tile_side, geo.taps, geo.bias_offset
    for t in range(tiles.num):
        tile, at = tiles.first + t, geo.m_offset + (tiles.at + t) * geo.k_vectors
        i, j = tile // geo.tiles_across * side, tile % geo.tiles_across * side
        source, target = (mine, at + q, 6 * matrix, matrix), start + i * row + j * k + q
        size = geo.h_out - top - i, geo.w_out - j
        rest = (values, target, row, k), q_stop - q, size, (mine, bias + q), lower_bound, taps
        if adds is None:
            _transform_output(source, *rest)
        elif adds:
            _add_output(source, *rest)
        else:
            _transform_output(source, *rest)


@inlined
def transform_gradients(geo, tiles, filters, dz, mine, ahead):
    """M = A dz Aᵀ of some tiles.

    Args:
        filters: the first, how many, and this number rounded up to whole vectors, which are the
            channels of M. Additional ones are 0.
        dz: (flat array, first element) of the rows of the tiles.
        mine: scratch memory.
        ahead: part of an array that is prefetched.
    """
    (first_k, channels, vectors), (values, start) = filters, dz
    side, matrix, k, row = geo.tile_side, geo.m_stride, geo.k, geo.w_out * geo.k
    top, start = tiles.row * side, start + first_k
    for t in range(tiles.num):
        prefetch_share(ahead, t, tiles.num)
        tile, at = tiles.first + t, geo.m_offset + (tiles.at + t) * vectors
        i, j = tile // geo.tiles_across * side, tile % geo.tiles_across * side
        _transform_gradient(
            (values, start + i * row + j * k, row, k), (mine, at, 6 * matrix, matrix), channels,
            (geo.h_out - top - i, geo.w_out - j), (values, start), NO_LOWER_BOUND, geo.taps,
        )  # fmt: skip


@inlined
def multiply_matrices(geo, mine, u, count, columns, ahead, written):
    """M = V U: (matrices, tiles, C) by (matrices, C, K), of which U is in panels.

    If the filters of the last panel fit half a vector, the other columns of M are not written.

    Args:
        mine: scratch memory, with V and M and, as int32, 0, 1, 2, ….
        count: number of tiles.
        columns: first column to compute and the end, multiples of the vector width.
        ahead, written: parts of arrays that are prefetched, to be read and to be written.

    If M begins where V does, all columns are computed.
    """
    (first, last), c, k, ramp = columns, geo.c, geo.k_vectors, geo.ramp_offset
    table, half = mine.view(np.int32), vector_width() // 2
    begin = first // PANEL * PANEL
    for e in range(MATRICES):
        prefetch_share(ahead, e, MATRICES)
        prefetch_share_for_writing(written, e, MATRICES)
        v, m, w = geo.v_offset + e * geo.v_stride, geo.m_offset + e * geo.m_stride, e * geo.u_stride
        if geo.m_offset == geo.v_offset:
            multiply_in_place(mine, v, geo.c_vectors, u, w, k, count, c)
            continue
        for p in range(begin, last, PANEL):
            width, q = min(PANEL, k - p), max(p, first)
            # The next panel is that of the next matrix after the last one of these columns.
            following = c * width if p + PANEL < last else geo.u_stride - (p - begin) * c
            multiply_panel(
                (mine, v),
                (table, ramp, geo.c_vectors),
                (table, ramp, 1),
                (u, w + p * c + q - p, width),
                (mine, m + q),
                (table, ramp, k),
                (count, c, half if geo.k - p <= half else min(p + width, last) - q),
                # All rows are one run: a multiple of every group.
                (following, 12),
            )


@inlined
def add_products(geo, mine, left, right, count, is_first):
    """Sums += leftᵀ right: (matrices, rows, tiles) by (matrices, tiles, columns); the sums are in
    panels.

    Args:
        mine: scratch memory.
        left: (start, distance of the matrices, distance of the tiles, rows).
        right: (start, distance of the matrices, columns).
        count: number of tiles.
        is_first: True to store the products without reading the sums.
    """
    (a, a_matrix, pitch, rows), (b, b_matrix, k) = left, right
    table, ramp = mine.view(np.int32), geo.ramp_offset
    for e in range(MATRICES):
        for p in range(0, k, PANEL):
            columns, target = min(PANEL, k - p), geo.sums_offset + e * geo.u_stride + p * rows
            multiply_spaced(
                (mine, a + e * a_matrix),
                (table, ramp, 1),
                (table, ramp, pitch),
                (mine, b + e * b_matrix + p, k),
                (mine, target, -1 if is_first else columns),
                (mine, target),
                (table, ramp, columns),
                (rows, count, columns),
                NO_LOWER_BOUND,
                12,
            )


@inlined
def transform_sums(sums, start, matrix, taps, dw, dw_start, dw_matrix, count):
    """Transform `count` sums of products at each position: dw = Gᵀ sums G.

    Args:
        sums: (6, 6, …), positions `matrix` elements apart.
        dw: (taps, taps, …), positions `dw_matrix` elements apart.
    """
    _transform_weight_gradient(
        (sums, start, 6 * matrix, matrix), (dw, dw_start, taps * dw_matrix, dw_matrix), count,
        (taps, taps), (sums, start), NO_LOWER_BOUND, taps,
    )  # fmt: skip
