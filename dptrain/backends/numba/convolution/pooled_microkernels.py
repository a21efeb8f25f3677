"""Register tiles of a convolution with pooling in registers.

A tile of `microkernels` holds the sums of two rows of pixels, which are a few adjacent 2 × 2
windows. Sums start from the bias; the positive maxima of the windows and their positions are
computed in registers, so the convolution's output is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dptrain.backends.numba.convolution.microkernels import Tile
from dptrain.backends.numba.pooling.pooling_windows import initial_maximum, larger, store_maximum
from dptrain.backends.numba.vector import (
    F32P,
    I8P,
    I32,
    I32P,
    I64,
    Writer,
    as_intrinsic,
    compiled_registers,
)

SIDE = 2
"""Height and width of the windows."""

_TILE = {
    "a": F32P,
    "down": I64,
    "across": I64,
    "a_steps": I32P,
    "a_step": I64,
    "b": F32P,
    "b_step": I64,
    "bias": F32P,
    "largest": F32P,
    "position": I8P,
    "steps": I64,
    "columns": I64,
}


class _Windows(Tile):
    """Some adjacent windows of one vector of channels.

    With `masked`, only the first ``columns`` channels of the vector exist.

    Args:
        windows: number of windows.
        group: pixels of a row that share one address; it divides the pixels of the row.
    """

    kind = "windows"
    arguments: ClassVar = _TILE

    def __init__(
        self, module: ir.Module, width: int, windows: int, group: int, masked: bool
    ) -> None:
        self.columns_, self.group = SIDE * windows, group
        super().__init__(module, width, SIDE * self.columns_, 1, masked)

    def rows(self) -> Callable[[ir.Value], Iterator[ir.Value]]:
        b, args = self.builder, self.args
        rows = [self.at(args["a"], b.mul(args["down"], I64(i))) for i in range(SIDE)]
        leaders = [
            self.at(row, b.mul(args["across"], I64(j)))
            for row in rows
            for j in range(0, self.columns_, self.group)
        ]
        distances = [b.mul(args["across"], I64(j)) for j in range(self.group)]

        def addresses(offset: ir.Value) -> Iterator[ir.Value]:
            for leader in leaders:
                moved = self.at(leader, offset)
                yield from (self.at(moved, distance) for distance in distances)

        return addresses

    def columns(self, pointer: ir.Value) -> list[tuple[ir.Value, bool]]:
        return [(pointer, self.masked)]

    def begin(self) -> Sequence[ir.Value]:
        return [self.load(self.args["bias"], masked=self.masked)] * self.height

    def finish(self, sums: Sequence[ir.Value]) -> None:
        args = self.args
        for p in range(self.columns_ // SIDE):
            state = initial_maximum(self)
            for i in range(SIDE):
                for j in range(SIDE):
                    value = sums[i * self.columns_ + p * SIDE + j]
                    state = larger(self, value, I32(i * SIDE + j), state)
            offset = self.builder.mul(args["b_step"], I64(p))
            targets = self.at(args["largest"], offset), self.at(args["position"], offset)
            store_maximum(self, state, *targets, self.masked)


class _Row(Writer):
    """A row of windows, in tiles of the size with the smallest cost."""

    arguments: ClassVar = {**_TILE, "windows": I64}

    def __init__(self, module: ir.Module) -> None:
        registers = compiled_registers()
        # Windows of a tile, and pixels that share one address.
        self.sizes = ((6, 4), (5, 5), (4, 4)) if registers.spaced[0][0] >= 24 else ((3, 3), (2, 4))
        super().__init__(module, "dptrain_pooled_row", self.arguments, registers.width)

    def write(self) -> None:
        b, windows = self.builder, self.args["windows"]

        def cost(size: int) -> ir.Value:
            tiles = b.sdiv(b.add(windows, I64(size - 1)), I64(size))
            # Each step loads a vector of B, and an element of A for each sum.
            cost = b.mul(tiles, I64(SIDE * SIDE * size + 1))
            return b.select(b.icmp_signed("<", windows, I64(size)), I64(1 << 30), cost)

        costs = [cost(size) for size, _ in self.sizes]
        self._choose(list(zip(costs, self.sizes, strict=True)))

    def _choose(self, sizes: Sequence[tuple[ir.Value, tuple[int, int]]]) -> None:
        b, (cost, size) = self.builder, sizes[0]
        if len(sizes) == 1:
            self._tiles(*size)
            return
        best: ir.Value = ir.IntType(1)(1)
        for other, _ in sizes[1:]:
            best = b.and_(best, b.icmp_signed("<=", cost, other))
        with b.if_else(best) as (this, others):
            with this:
                self._tiles(*size)
            with others:
                self._choose(sizes[1:])

    def _tiles(self, size: int, group: int) -> None:
        b, columns = self.builder, self.args["columns"]
        whole = b.mul(b.sdiv(columns, I64(self.width)), I64(self.width))

        def vector(k: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            self._vector(_Windows(self.module, self.width, size, group, False), k, size)
            return []

        self.loop(I64(0), whole, [], vector, step=self.width)
        rest = b.sub(columns, whole)
        with b.if_then(b.icmp_signed(">", rest, I64(0)), likely=False):
            half = self.width // 2
            with b.if_else(b.icmp_signed("<=", rest, I64(half))) as (few, many):
                with few:
                    self._vector(_Windows(self.module, half, size, group, True), whole, size)
                with many:
                    self._vector(_Windows(self.module, self.width, size, group, True), whole, size)

    def _vector(self, tile: _Windows, k: ir.Value, size: int) -> None:
        """Compute the row for one vector of channels, from channel k on."""
        b, args = self.builder, self.args
        last = b.sub(args["windows"], I64(size))

        def call(p: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            # The last tile overlaps the one before it, so that all of its windows exist.
            p = b.select(b.icmp_signed("<", p, last), p, last)
            moved = {name: args[name] for name in _TILE}
            moved["a"] = self.at(args["a"], b.mul(b.mul(p, I64(SIDE)), args["across"]))
            offset = b.add(b.mul(p, args["b_step"]), k)
            for name in ("largest", "position"):
                moved[name] = self.at(args[name], offset)
            for name in ("b", "bias"):
                moved[name] = self.at(args[name], k)
            moved["columns"] = b.sub(args["columns"], k)
            b.call(tile.function, list(moved.values()))
            return []

        self.loop(I64(0), args["windows"], [], call, step=size)


@intrinsic
def fewest_windows(typingctx):
    """Return the smallest number of windows of a row, a constant of the compiled code."""

    def codegen(context, builder, sig, args):
        return I64(_Row(builder.module).sizes[-1][0])

    return types.int64(), codegen


def _emit_row(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
    builder.call(_Row(builder.module).function, flat)


multiply_pooled = as_intrinsic("a distances a_steps b bias y argmax shape", _emit_row)
"""Compute convolution, ReLU and max pooling for one row of adjacent 2 × 2 windows.

Arguments: (a, distances, a_steps, b, bias, y, argmax, shape), of which

- a is (contiguous array, start) of the first pixel's patch,
- distances is (distance of the patch of the pixel below, of the next pixel in the row),
- a_steps is (table, first entry, multiplier),
- b is (contiguous array, start, K): steps by K columns,
- bias, y, argmax are (contiguous array, start),
- shape is (steps, columns to compute, windows); windows is at least `fewest_windows`.
"""
