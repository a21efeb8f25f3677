"""Matrix products on Intel AMX with the accuracy of float32.

The unit multiplies bfloat16 and sums in float32, 16 times as many products a cycle as vectors of
float32. A float32 has 24 significant bits, a bfloat16 has 8, so every float32 is the sum of three
bfloat16 parts, x = x₀ + x₁ + x₂, with no error at all: each part is what the rounding of the ones
before it left. Of the nine products of parts

    x·y ≈ x₀y₀ + x₀y₁ + x₁y₀ + x₁y₁ + x₀y₂ + x₂y₀

keeps the six largest. What it drops is below 2⁻²⁵ of |x·y|, half of what rounding the product to
float32 would cost, and bfloat16 products are exact in float32. So the result is a float32 product
by other means: six products at 16 times the rate. (Henry, Tang and Heinecke, "Leveraging the
bfloat16 artificial intelligence datatype for higher-precision computations", 2019.)

Operands are prepared once and used often:

- *rows* of A: each part of a matrix lies by itself, in the order of the source, `part` elements
  from the next;
- *panels* of B: for 16 columns and 32 steps, each part as the unit wants it, pairs of steps side
  by side; panels of one column tile lie behind each other.

An infinite element becomes a NaN, parts below 2⁻¹²⁶ count as zero.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.backends.numba.vector import F32P, I8, I8P, I32, I32P, I64, Writer, flatten_arguments

I16 = ir.IntType(16)
I16P = I16.as_pointer()

PARTS = 3
STEPS = 32
"""Steps of the sum in one panel of B."""
SIDE = 16
"""Rows and columns of a tile of C at most."""
PANEL = PARTS * STEPS * SIDE
"""Elements of a panel."""


@dataclass(frozen=True)
class _Shape:
    """Tiles of C that are summed side by side, and what the eight registers hold.

    Attributes:
        across: column tiles; row tiles are two, or one at the end.
        sums, rows, panels: registers of C, A and B.
        order: which parts of A and B are multiplied, one pair after the other. Where registers
            hold one part of B at a time, only one operand changes from pair to pair.
    """

    across: int
    sums: tuple[int, ...]
    rows: tuple[int, ...]
    panels: tuple[int, ...]
    order: tuple[tuple[int, int], ...]


_SHAPES = (
    _Shape(2, (0, 1, 2, 3), (4, 5), (6, 7), ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))),
    _Shape(1, (0, 1), (2, 3), (4, 5, 6), ((2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2))),
)


@functools.cache
def available() -> bool:
    """Whether kernels may use the unit: compiled for, and granted by the operating system."""
    from numba.core.registry import cpu_target

    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    if not {"+amx-tile", "+amx-bf16", "+avx512f"} <= set(features.split(",")):
        return False
    return sys.platform == "linux" and _granted()


def _granted() -> bool:
    """Ask Linux for the registers, which it hands out to processes that ask."""
    arch_prctl, request, tiles = 158, 0x1023, 18
    call = ctypes.CDLL(None).syscall
    return bool(call(ctypes.c_long(arch_prctl), ctypes.c_long(request), ctypes.c_long(tiles)) == 0)


class Unit(Writer):
    """A function that uses the unit's registers."""

    def unit(self, name: str, *operands: ir.Value) -> None:
        """One of the unit's instructions."""
        kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        function = cgutils.get_or_insert_function(self.module, kind, f"llvm.x86.{name}")
        self.builder.call(function, operands)

    def configure(self, registers: Sequence[tuple[Iterable[int], ir.Value, ir.Value]]) -> None:
        """Set how many rows and float32 of a row (or pairs) the registers have."""
        b = self.builder
        with b.goto_entry_block():
            configuration = b.alloca(ir.ArrayType(I64, 8))
        b.store(ir.Constant(ir.ArrayType(I64, 8), None), configuration)
        place = b.bitcast(configuration, I8P)
        b.store(I8(1), place)
        for numbers, rows, columns in registers:
            for number in numbers:
                wide = b.bitcast(b.gep(place, [I64(16 + 2 * number)]), I16P)
                b.store(b.trunc(b.mul(columns, I64(4)), I16), wide, align=1)
                b.store(b.trunc(rows, I8), b.gep(place, [I64(48 + number)]))
        self.unit("ldtilecfg", place)

    def load_tile(self, register: int, pointer: ir.Value, distance: ir.Value) -> None:
        """Load rows `distance` bytes from each other."""
        self.unit("tileloadd64", I8(register), self.builder.bitcast(pointer, I8P), distance)

    def store_tile(self, register: int, pointer: ir.Value, distance: ir.Value) -> None:
        """Store rows `distance` bytes from each other."""
        self.unit("tilestored64", I8(register), self.builder.bitcast(pointer, I8P), distance)

    def multiply(self, c: int, a: int, b: int) -> None:
        """C += A·B of registers."""
        self.unit("tdpbf16ps", I8(c), I8(a), I8(b))


class _Product(Unit):
    """All tiles of C: column tiles outside, so that panels of B stay in cache."""

    arguments = {  # noqa: RUF012
        "a": I16P,
        "part": I64,
        "a_rows": I32P,
        "a_row": I64,
        "a_steps": I32P,
        "b": I16P,
        "b_part": I64,
        "b_step": I64,
        "b_columns": I32P,
        "c": F32P,
        "c_rows": I32P,
        "c_row": I64,
        "c_columns": I32P,
        "d": F32P,
        "d_row": I64,
        "height": I64,
        "tiles": I64,
        "steps": I64,
        "across": I64,
        "last": I64,
    }

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tiles", self.arguments, SIDE)

    def write(self) -> None:
        b, across = self.builder, self.args["across"]
        full = b.icmp_signed("==", self.args["last"], I64(SIDE))
        whole = b.select(full, across, b.sub(across, I64(1)))
        start: ir.Value = I64(0)
        for shape in _SHAPES:
            stop = b.mul(b.sdiv(whole, I64(shape.across)), I64(shape.across))
            with b.if_then(b.icmp_signed("<", start, stop)):
                self.prepare(shape, I64(SIDE))
                body = functools.partial(self.columns, shape)
                self.loop(start, stop, [], body, step=shape.across)
            start = stop
        with b.if_then(b.icmp_signed("<", start, across), likely=False):
            self.prepare(_SHAPES[-1], self.args["last"])
            self.columns(_SHAPES[-1], start, ())
        self.unit("tilerelease")

    def prepare(self, shape: _Shape, columns: ir.Value) -> None:
        """Set what the registers hold."""
        height, whole = self.args["height"], I64(SIDE)
        self.configure(
            [
                (shape.sums, height, columns),
                (shape.rows, height, whole),
                (shape.panels, whole, columns),
            ]
        )

    def columns(self, shape: _Shape, column: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """All rows of the column tiles from number `column` on."""
        b, tiles = self.builder, self.args["tiles"]
        columns = [b.add(column, I64(j)) for j in range(shape.across)]
        panels = [self.at(self.args["b"], self.entry("b_columns", j)) for j in columns]
        places = [self.entry("c_columns", j) for j in columns]
        pairs = b.mul(b.sdiv(tiles, I64(2)), I64(2))

        def pair(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            self.tiles(shape, panels, places, [m, b.add(m, I64(1))])
            return []

        self.loop(I64(0), pairs, [], pair, step=2)
        with b.if_then(b.icmp_signed("<", pairs, tiles)):
            self.tiles(shape, panels, places, [pairs])
        return []

    def entry(self, table: str, index: ir.Value) -> ir.Value:
        """Offset that a table gives."""
        return self.builder.sext(self.builder.load(self.at(self.args[table], index)), I64)

    def tiles(
        self,
        shape: _Shape,
        panels: Sequence[ir.Value],
        columns: Sequence[ir.Value],
        rows: Sequence[ir.Value],
    ) -> None:
        """Some row tiles by the column tiles of a shape."""
        b, args = self.builder, self.args
        starts = [self.at(args["a"], self.entry("a_rows", m)) for m in rows]
        places = [self.entry("c_rows", m) for m in rows]
        tiles = [
            (shape.sums[m * shape.across + j], place, column)
            for m, place in enumerate(places)
            for j, column in enumerate(columns)
        ]
        self.begin(tiles)
        sets, distance = len(shape.panels) // shape.across, b.mul(args["a_row"], I64(2))

        def step(t: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            moved, panel = self.entry("a_steps", t), b.mul(t, args["b_step"])
            held: dict[int, int] = {}

            def hold(register: int, part: int, start: ir.Value, parts: str, row: ir.Value) -> None:
                if held.get(register) != part:
                    held[register] = part
                    place = self.at(start, b.mul(args[parts], I64(part)))
                    self.load_tile(register, place, row)

            for part_a, part_b in shape.order:
                chosen = shape.panels[part_b % sets * shape.across :]
                for register, start in zip(shape.rows, starts, strict=False):
                    hold(register, part_a, self.at(start, moved), "part", distance)
                for register, start in zip(chosen, panels, strict=False):
                    hold(register, part_b, self.at(start, panel), "b_part", I64(4 * SIDE))
                for m, (a, _) in enumerate(zip(shape.rows, starts, strict=False)):
                    for j in range(shape.across):
                        total = shape.sums[m * shape.across + j]
                        self.multiply(total, a, chosen[j])
            return []

        self.loop(I64(0), args["steps"], [], step)
        for register, place, column in tiles:
            target = self.at(args["c"], b.add(place, column))
            self.store_tile(register, target, b.mul(args["c_row"], I64(4)))

    def begin(self, tiles: Sequence[tuple[int, ir.Value, ir.Value]]) -> None:
        """Let the sums start from D, or from zero."""
        b, args = self.builder, self.args
        with b.if_else(b.icmp_signed("<", args["d_row"], I64(0))) as (nothing, something):
            with nothing:
                for register, _, _ in tiles:
                    self.unit("tilezero", I8(register))
            with something:
                same = b.icmp_signed("==", args["d_row"], I64(0))
                for register, place, column in tiles:
                    start = b.add(b.select(same, I64(0), place), column)
                    source = self.at(args["d"], start)
                    self.load_tile(register, source, b.mul(args["d_row"], I64(4)))


def split(writer: Writer, value: ir.Value) -> list[ir.Value]:
    """The three parts of a vector of float32, as int32 whose upper halves are the bfloat16."""
    b = writer.builder
    ints = ir.VectorType(I32, writer.width)
    half, upper = (writer.splat(I32(bits)) for bits in (0x8000, 0xFFFF0000))
    parts = []
    for _ in range(PARTS - 1):
        # Half of a unit away from zero, so the rest has one bit less than by cutting off.
        rounded = b.and_(b.add(b.bitcast(value, ints), half), upper)
        parts.append(rounded)
        value = b.fsub(value, b.bitcast(rounded, writer.vector))
    return [*parts, b.bitcast(value, ints)]


class _Rows(Writer):
    """Split a run of float32 into parts, in the order of the source."""

    arguments = {"source": F32P, "target": I16P, "part": I64, "count": I64}  # noqa: RUF012

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_split_rows", self.arguments, SIDE)

    def write(self) -> None:
        b, args = self.builder, self.args
        whole = b.mul(b.sdiv(args["count"], I64(STEPS)), I64(STEPS))

        def body(i: ir.Value, _: Sequence[ir.Value], masked: bool = False) -> Sequence[ir.Value]:
            halves = []
            for h in range(2):
                if masked:
                    self.mask_after(b.sub(args["count"], b.add(i, I64(h * SIDE))))
                place = self.at(args["source"], b.add(i, I64(h * SIDE)))
                halves.append(split(self, self.load(place, masked=masked)))
            for p in range(PARTS):
                self.store_words(
                    halves[0][p], halves[1][p], b.add(i, b.mul(args["part"], I64(p))), masked
                )
            return []

        self.loop(I64(0), whole, [], body, step=STEPS)
        with b.if_then(b.icmp_signed("<", whole, args["count"])):
            body(whole, [], True)

    def store_words(self, low: ir.Value, high: ir.Value, place: ir.Value, masked: bool) -> None:
        """Store the upper halves of two vectors, side by side."""
        b = self.builder
        words = ir.VectorType(I16, 2 * SIDE)
        odd = ir.Constant(ir.VectorType(I32, 2 * SIDE), list(range(1, 4 * SIDE, 2)))
        packed = b.shuffle_vector(b.bitcast(low, words), b.bitcast(high, words), odd)
        target = b.bitcast(self.at(self.args["target"], place), words.as_pointer())
        if not masked:
            b.store(packed, target, align=2)
            return
        lanes = ir.Constant(ir.VectorType(I16, 2 * SIDE), list(range(2 * SIDE)))
        count = b.trunc(b.sub(self.args["count"], b.and_(self.args["count"], I64(-STEPS))), I16)
        kind = ir.VectorType(I16, 2 * SIDE)
        first = b.insert_element(ir.Constant(kind, ir.Undefined), count, I32(0))
        every = ir.Constant(ir.VectorType(I32, 2 * SIDE), [0] * (2 * SIDE))
        every = b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), every)
        mask = b.icmp_signed("<", lanes, every)
        kind = ir.FunctionType(ir.VoidType(), [words, target.type, I32, mask.type])
        name = "llvm.masked.store.v32i16.p0v32i16"
        function = cgutils.get_or_insert_function(self.module, kind, name)
        b.call(function, [packed, target, I32(2), mask])


class _Pairs(Writer):
    """Split a matrix into pairs of rows of B."""

    arguments = {  # noqa: RUF012
        "source": F32P,
        "source_row": I64,
        "target": I16P,
        "rows": I64,
        "written": I64,
        "columns": I64,
        "tile": I64,
        "part": I64,
        "panel": I64,
    }

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_split_pairs", self.arguments, SIDE)

    def write(self) -> None:
        b, args = self.builder, self.args

        def column(k: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            self.mask_after(b.sub(args["columns"], k))
            target = self.at(args["target"], b.mul(b.sdiv(k, I64(SIDE)), args["tile"]))

            def pair(i: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
                panel = b.mul(b.sdiv(i, I64(STEPS)), args["panel"])
                inside = b.mul(b.srem(i, I64(STEPS)), I64(SIDE))
                place = self.at(target, b.add(panel, inside))
                rows = [self.row(b.add(i, I64(h)), k) for h in range(2)]
                sixteen = self.splat(I32(16))
                upper = self.splat(I32(0xFFFF0000))
                for p in range(PARTS):
                    low, high = b.lshr(rows[0][p], sixteen), b.and_(rows[1][p], upper)
                    spot = self.at(place, b.mul(args["part"], I64(p)))
                    spot = b.bitcast(spot, ir.VectorType(I32, SIDE).as_pointer())
                    b.store(b.or_(low, high), spot, align=4)
                return []

            self.loop(I64(0), args["written"], [], pair, step=2)
            return []

        self.loop(I64(0), args["columns"], [], column, step=SIDE)

    def row(self, i: ir.Value, column: ir.Value) -> list[ir.Value]:
        """Parts of 16 elements of a row; of zeros beyond the last."""
        b, args = self.builder, self.args
        exists = b.icmp_signed("<", i, args["rows"])
        row = b.select(exists, i, I64(0))
        place = self.at(args["source"], b.add(b.mul(row, args["source_row"]), column))
        value = self.load(place, masked=True)
        return split(self, b.select(exists, value, self.zero))


def emit(writer: Any) -> Any:
    """What an intrinsic generates: a call of the function that `writer` writes."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kinds: list[Any] = []
        flat: list[ir.Value] = []
        for group, value in zip(sig.args, args, strict=True):
            grouped = isinstance(group, types.BaseTuple)
            kinds += group.types if grouped else [group]
            flat += cgutils.unpack_tuple(builder, value) if grouped else [value]
        flat = flatten_arguments(context, builder, kinds, flat)
        builder.call(writer(builder.module).function, flat)
        return context.get_dummy_value()

    return codegen


@intrinsic
def multiply_tiles(typingctx, a, a_rows, a_steps, b, b_columns, c, c_rows, c_columns, d, shape):  # type: ignore[no-untyped-def]
    """C = D + A·B from operands that `split_rows` and `split_pairs` prepared.

    Row tile m of A begins at ``a + a_rows[m]``, its 32 columns of step t at ``a_steps[t]`` behind
    that. Column tile j of B begins at ``b + b_columns[j]``. Their tile of C is at
    ``c + c_rows[m] + c_columns[j]``.

    Args:
        a: (array, start, distance of parts); `a_rows` (table, first entry, distance of rows).
        b: (array, start, distance of parts, of steps).
        c: (array, start); `c_rows` (table, first entry, distance of rows).
        a_steps, b_columns, c_columns: (table, first entry).
        d: (array, start, distance of rows): of a bias 0, of what C holds that of C, of nothing
            negative.
        shape: (rows of a tile, row tiles, steps, column tiles, columns of the last).
    """
    sig = types.none(a, a_rows, a_steps, b, b_columns, c, c_rows, c_columns, d, shape)
    return sig, emit(_Product)


@intrinsic
def split_rows(typingctx, source, target, part, count):  # type: ignore[no-untyped-def]
    """Split `count` elements; source and target are (contiguous array, start)."""
    return types.none(source, target, part, count), emit(_Rows)


@intrinsic
def split_pairs(typingctx, source, source_row, target, shape, distances):  # type: ignore[no-untyped-def]
    """Split a matrix into pairs of rows.

    Args:
        source, target: (contiguous array, start).
        source_row: distance of rows.
        shape: (rows, rows to write: zeros behind the last; columns).
        distances: in `target`, of column tiles, of parts, of every 32 rows.
    """
    return types.none(source, source_row, target, shape, distances), emit(_Pairs)
