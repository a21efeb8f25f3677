"""Operands of AMX products (`amx`), split into bfloat16 parts and packed tile by tile.

A matrix is split into tiles of 16 rows (A) or columns (B) and 32 steps of the sum. A tile has
`PANEL` contiguous 16-bit words, one part after the other. Tiles that follow each other in the sum
are adjacent.

In A and in B, steps k and k + 16 of every 32 share a 32-bit word. The order of the steps does not
change the sum, and this order needs no shuffling of vector halves. Matrices are read in the order
of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dptrain.backends.numba.amx import I16P, PANEL, PARTS, SIDE, STEPS, emit, split
from dptrain.backends.numba.vector import F32P, I32, I64, Writer


class _Packer(Writer):
    """Packs a matrix of `rows` by `columns`; `tile` is the stride of row or column tiles."""

    name = ""
    arguments = {  # noqa: RUF012
        "source": F32P,
        "source_row": I64,
        "target": I16P,
        "tile": I64,
        "rows": I64,
        "columns": I64,
    }

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, self.name, self.arguments, SIDE)

    def row(self, index: ir.Value) -> ir.Value:
        """Return the address of a row of the source."""
        return self.at(self.args["source"], self.builder.mul(index, self.args["source_row"]))

    def pack(self, values: Sequence[ir.Value], target: ir.Value) -> None:
        """Store the parts of two vectors: the first in the lower halves of 32-bit words."""
        b, sixteen = self.builder, self.splat(I32(16))
        upper = self.splat(I32(0xFFFF0000))
        parts = zip(*(split(self, value) for value in values), strict=True)
        for p, (low, high) in enumerate(parts):
            packed = b.or_(b.lshr(low, sixteen), b.and_(high, upper))
            address = self.at(target, I64(p * (PANEL // PARTS)))
            b.store(packed, b.bitcast(address, packed.type.as_pointer()), align=4)


class _Rows(_Packer):
    """Packs rows of A; columns of the matrix are steps."""

    name = "dptrain_pack_rows"

    def write(self) -> None:
        self.loop(I64(0), self.args["rows"], [], self.pack_row)

    def pack_row(self, r: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Pack row r."""
        b, args = self.builder, self.args
        source, columns = self.row(r), args["columns"]
        inside = b.mul(b.srem(r, I64(SIDE)), I64(STEPS))
        target = self.at(args["target"], b.add(b.mul(b.sdiv(r, I64(SIDE)), args["tile"]), inside))

        def step(k: ir.Value, _: Sequence[ir.Value], masked: bool = False) -> Sequence[ir.Value]:
            values = []
            for first in (k, b.add(k, I64(SIDE))):
                if masked:
                    self.mask_after(b.sub(columns, first))
                values.append(self.load(self.at(source, first), masked=masked))
            self.pack(values, self.at(target, b.mul(k, I64(PANEL // STEPS))))
            return []

        whole = b.and_(columns, I64(-STEPS))
        self.loop(I64(0), whole, [], step, step=STEPS)
        with b.if_then(b.icmp_signed("<", whole, columns)):
            step(whole, [], True)
        return []


class _Columns(_Packer):
    """Packs columns of B; rows of the matrix are steps."""

    name = "dptrain_pack_columns"

    def write(self) -> None:
        b = self.builder

        def step(k: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            target = self.at(self.args["target"], b.mul(k, I64(PANEL // STEPS)))

            def pair(p: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
                self.pair(b.add(k, p), self.at(target, b.mul(p, I64(STEPS))))
                return []

            self.loop(I64(0), I64(SIDE), [], pair)
            return []

        self.loop(I64(0), self.args["rows"], [], step, step=STEPS)

    def pair(self, first: ir.Value, target: ir.Value) -> None:
        """Pack rows `first` and `first` + 16; rows after the last are zeros."""
        b, args = self.builder, self.args
        rows = [first, b.add(first, I64(SIDE))]
        sources = [self.row(row) for row in rows]
        exist = [b.icmp_signed("<", row, args["rows"]) for row in rows]

        def vectors(k: ir.Value, _: Sequence[ir.Value], masked: bool = True) -> Sequence[ir.Value]:
            values = []
            for source, exists in zip(sources, exist, strict=True):
                if masked:
                    self.mask_after(b.select(exists, b.sub(args["columns"], k), I64(0)))
                values.append(self.load(self.at(source, k), masked=masked))
            self.pack(values, self.at(target, b.mul(b.sdiv(k, I64(SIDE)), args["tile"])))
            return []

        whole = b.select(exist[1], b.and_(args["columns"], I64(-SIDE)), I64(0))
        self.loop(I64(0), whole, [], lambda k, _: vectors(k, _, masked=False), step=SIDE)
        self.loop(whole, args["columns"], [], vectors, step=SIDE)


@intrinsic
def pack_rows(typingctx, source, source_row, target, tile, shape):  # type: ignore[no-untyped-def]
    """Split a matrix into row tiles of A; zeros fill the last 32 steps.

    Args:
        source, target: (contiguous array, start), float32 and uint16.
        source_row: row stride of the source.
        tile: stride of row tiles in `target`.
        shape: (rows, columns).
    """
    return types.none(source, source_row, target, tile, shape), emit(_Rows)


@intrinsic
def pack_columns(typingctx, source, source_row, target, tile, shape):  # type: ignore[no-untyped-def]
    """Split a matrix into column tiles of B; zeros fill the last tile. Arguments: `pack_rows`."""
    return types.none(source, source_row, target, tile, shape), emit(_Columns)
