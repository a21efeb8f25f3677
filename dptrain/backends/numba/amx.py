"""Matrix products on Intel AMX with the accuracy of float32.

The AMX unit multiplies bfloat16 numbers and sums in float32. It computes 16 times as many products
per cycle as float32 vectors. A float32 has 24 significant bits and a bfloat16 has 8, so every
float32 is exactly the sum of three bfloat16 parts, x = x₀ + x₁ + x₂: each part is the remainder of
the previous parts, rounded. The approximation

    x·y ≈ x₀y₀ + x₀y₁ + x₁y₀ + x₁y₁ + x₀y₂ + x₂y₀

uses the six largest of the nine products of parts. The dropped products are below 2⁻²⁵ of |x·y|,
which is half of the error of rounding the product to float32, and products of bfloat16 numbers are
exact in float32. The result therefore has the accuracy of a float32 product. (Henry, Tang and
Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations", 2019.)

Operands are split once and read several times:

- *Rows* of A: each part of a matrix is stored separately, in the order of the source, with a stride
  of `part` elements.
- *Panels* of B: a panel has 16 columns and 32 steps of the sum. The steps of each part are
  interleaved in pairs, which is the layout that the AMX unit reads. The panels of a column tile are
  adjacent.

An infinite element becomes NaN, and parts below 2⁻¹²⁶ count as zero.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.backends.numba.amx_emulator import I16, TileRegisters
from dptrain.backends.numba.vector import F32P, I8, I8P, I32, I32P, I64, Writer, flatten_arguments

I16P = I16.as_pointer()

PARTS = 3
STEPS = 32
"""Steps of the sum in one panel of B."""
SIDE = 16
"""Largest number of rows and of columns of a tile of C."""
PANEL = PARTS * STEPS * SIDE
"""Elements of a panel."""
LINE = 16
"""Float32 elements of a cache line."""
WORDS = 2 * LINE
"""16-bit words of a cache line."""
CACHE = 1 << 20
"""Bytes that the split operands of a product may occupy: half of the L2 cache, which has 2 MB on
every processor with AMX. Packed weights or sums and the next operands use the other half."""


def in_lines(elements: int) -> int:
    """Return `elements` of float32, rounded up to whole cache lines."""
    return -(-elements // LINE) * LINE


def words_in_lines(words: int) -> int:
    """Return the float32 elements, in whole cache lines, that hold `words` of 16 bits."""
    return in_lines(-(-words // 2))


@dataclass(frozen=True)
class _Shape:
    """Tiles of C that are summed at the same time, and the use of the eight tile registers.

    Attributes:
        across: number of column tiles. The number of row tiles is two, or one at the end.
        sums, rows, panels: registers of C, A and B.
    """

    across: int
    sums: tuple[int, ...]
    rows: tuple[int, ...]
    panels: tuple[int, ...]


_SHAPES = (
    _Shape(2, (0, 1, 2, 3), (4, 5), (6, 7)),
    _Shape(1, (0, 1), (2, 3), (4, 5, 6)),
)
_ORDER = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))
"""Pairs of parts of A and B in the order of their products. Only one operand changes from pair to
pair. All shapes have the same order, so an element of C depends only on its row of A and its column
of B, not on the tile that contains it."""


def available() -> bool:
    """Return whether kernels use the AMX unit."""
    return not reason_unavailable()


@functools.cache
def reason_unavailable() -> str:
    """Return why kernels do not use the AMX unit; an empty string if they use it."""
    if not compiled_for_amx():
        return "the processor has no AMX, or NUMBA_CPU_FEATURES excludes it"
    if sys.platform != "linux":
        return "AMX is used on Linux only"
    return _request_permission()


def compiled_for_amx() -> bool:
    """Return whether Numba compiles for a processor with AMX."""
    from numba.core.registry import cpu_target

    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {"+amx-tile", "+amx-bf16", "+avx512f"} <= set(features.split(","))


def _request_permission() -> str:
    """Request permission for the tile registers; Linux requires the request in every process.

    Returns:
        Why Linux refused the request; an empty string if it granted it.
    """
    arch_prctl, request, tiles = 158, 0x1023, 18
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(ctypes.c_long(arch_prctl), ctypes.c_long(request), ctypes.c_long(tiles)) == 0:
        return ""
    error = ctypes.get_errno()
    reason = f"Linux refused permission for the AMX registers: {os.strerror(error)}"
    if error == errno.ENOSPC:
        reason += "; a thread has an alternate signal stack that is too small for them"
    return reason


class TileWriter(Writer):
    """A function that uses the tile registers, and configures and releases them.

    Attributes:
        emulated: True if the instructions are emulated.
    """

    @property
    def emulated(self) -> bool:
        return not compiled_for_amx()

    @functools.cached_property
    def _registers(self) -> TileRegisters:
        return TileRegisters(self.module, self.builder)

    def call_instruction(self, name: str, *operands: ir.Value) -> None:
        """Call an instruction of the AMX unit."""
        if self.emulated:
            self._registers.call_instruction(name, *operands)
            return
        kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        function = cgutils.get_or_insert_function(self.module, kind, f"llvm.x86.{name}")
        self.builder.call(function, operands)

    def configure(self, registers: Sequence[tuple[Iterable[int], ir.Value, ir.Value]]) -> None:
        """Set the rows of registers and the float32 elements (or bfloat16 pairs) of a row."""
        b = self.builder
        with b.goto_entry_block():
            configuration = b.alloca(ir.ArrayType(I64, 8))
        b.store(ir.Constant(ir.ArrayType(I64, 8), None), configuration)
        address = b.bitcast(configuration, I8P)
        b.store(I8(1), address)
        for numbers, rows, columns in registers:
            for number in numbers:
                wide = b.bitcast(b.gep(address, [I64(16 + 2 * number)]), I16P)
                b.store(b.trunc(b.mul(columns, I64(4)), I16), wide, align=1)
                b.store(b.trunc(rows, I8), b.gep(address, [I64(48 + number)]))
        self.call_instruction("ldtilecfg", address)

    def load_tile(self, register: int, pointer: ir.Value, distance: ir.Value) -> None:
        """Load rows with a stride of `distance` bytes."""
        self.call_instruction(
            "tileloadd64", I8(register), self.builder.bitcast(pointer, I8P), distance
        )

    def store_tile(self, register: int, pointer: ir.Value, distance: ir.Value) -> None:
        """Store rows with a stride of `distance` bytes."""
        self.call_instruction(
            "tilestored64", I8(register), self.builder.bitcast(pointer, I8P), distance
        )

    def multiply(self, c: int, a: int, b: int) -> None:
        """Add the product A·B of two registers to C."""
        self.call_instruction("tdpbf16ps", I8(c), I8(a), I8(b))


class _Product(TileWriter):
    """Compute all tiles of C; the outer loop is over column tiles, so B's panels stay in cache."""

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
        whole = b.icmp_signed("==", self.args["last"], I64(SIDE))
        odd = b.icmp_signed("!=", b.and_(across, I64(1)), I64(0))
        pairs = b.and_(across, I64(-2))
        # The last tile of C may have fewer columns: it is in the last pair, or alone.
        full = b.select(b.or_(whole, odd), pairs, b.sub(pairs, I64(2)))
        pair, single = _SHAPES
        with b.if_then(b.icmp_signed("<", I64(0), full)):
            self.prepare(pair, [I64(SIDE)] * 2)
            self.loop(I64(0), full, [], functools.partial(self.columns, pair), step=2)
        with b.if_then(b.icmp_signed("<", full, pairs), likely=False):
            self.prepare(pair, [I64(SIDE), self.args["last"]])
            self.columns(pair, full, ())
        with b.if_then(odd):
            self.prepare(single, [self.args["last"]])
            self.columns(single, pairs, ())
        self.call_instruction("tilerelease")

    def prepare(self, shape: _Shape, columns: Sequence[ir.Value]) -> None:
        """Configure the registers for a shape and the columns of its tiles."""
        height, whole = self.args["height"], I64(SIDE)
        registers = [(shape.rows, height, whole)]
        for j, count in enumerate(columns):
            registers.append((shape.sums[j :: shape.across], height, count))
            registers.append((shape.panels[j :: shape.across], whole, count))
        self.configure(registers)

    def columns(self, shape: _Shape, column: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Compute all row tiles of the shape's column tiles, beginning with number `column`."""
        b, tiles = self.builder, self.args["tiles"]
        columns = [b.add(column, I64(j)) for j in range(shape.across)]
        panels = [self.at(self.args["b"], self.entry("b_columns", j)) for j in columns]
        c_columns = [self.entry("c_columns", j) for j in columns]
        pairs = b.mul(b.sdiv(tiles, I64(2)), I64(2))

        def pair(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            self.tiles(shape, panels, c_columns, [m, b.add(m, I64(1))])
            return []

        self.loop(I64(0), pairs, [], pair, step=2)
        with b.if_then(b.icmp_signed("<", pairs, tiles)):
            self.tiles(shape, panels, c_columns, [pairs])
        return []

    def entry(self, table: str, index: ir.Value) -> ir.Value:
        """Load an offset from a table."""
        return self.builder.sext(self.builder.load(self.at(self.args[table], index)), I64)

    def tiles(
        self,
        shape: _Shape,
        panels: Sequence[ir.Value],
        columns: Sequence[ir.Value],
        rows: Sequence[ir.Value],
    ) -> None:
        """Compute the product of some row tiles and the column tiles of a shape."""
        b, args = self.builder, self.args
        starts = [self.at(args["a"], self.entry("a_rows", m)) for m in rows]
        c_rows = [self.entry("c_rows", m) for m in rows]
        tiles = [
            (shape.sums[m * shape.across + j], c_row, column)
            for m, c_row in enumerate(c_rows)
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
                    address = self.at(start, b.mul(args[parts], I64(part)))
                    self.load_tile(register, address, row)

            for part_a, part_b in _ORDER:
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
        for register, row, column in tiles:
            target = self.at(args["c"], b.add(row, column))
            self.store_tile(register, target, b.mul(args["c_row"], I64(4)))

    def begin(self, tiles: Sequence[tuple[int, ir.Value, ir.Value]]) -> None:
        """Initialise the sums with D, or with zero."""
        b, args = self.builder, self.args
        with b.if_else(b.icmp_signed("<", args["d_row"], I64(0))) as (nothing, something):
            with nothing:
                for register, _, _ in tiles:
                    self.call_instruction("tilezero", I8(register))
            with something:
                same = b.icmp_signed("==", args["d_row"], I64(0))
                for register, row, column in tiles:
                    start = b.add(b.select(same, I64(0), row), column)
                    source = self.at(args["d"], start)
                    self.load_tile(register, source, b.mul(args["d_row"], I64(4)))


def split(writer: Writer, value: ir.Value) -> list[ir.Value]:
    """Return the three parts of a vector of float32: int32 whose upper halves are bfloat16."""
    b = writer.builder
    ints = ir.VectorType(I32, writer.width)
    half, upper = (writer.splat(I32(bits)) for bits in (0x8000, 0xFFFF0000))
    parts = []
    for _ in range(PARTS - 1):
        # Rounding to nearest leaves a remainder with one bit less than truncation does.
        rounded = b.and_(b.add(b.bitcast(value, ints), half), upper)
        parts.append(rounded)
        value = b.fsub(value, b.bitcast(rounded, writer.vector))
    return [*parts, b.bitcast(value, ints)]


class _Rows(Writer):
    """Split consecutive float32 elements into parts, in the order of the source."""

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
                address = self.at(args["source"], b.add(i, I64(h * SIDE)))
                halves.append(split(self, self.load(address, masked=masked)))
            for p in range(PARTS):
                self.store_words(
                    halves[0][p], halves[1][p], b.add(i, b.mul(args["part"], I64(p))), masked
                )
            return []

        self.loop(I64(0), whole, [], body, step=STEPS)
        with b.if_then(b.icmp_signed("<", whole, args["count"])):
            body(whole, [], True)

    def store_words(self, low: ir.Value, high: ir.Value, offset: ir.Value, masked: bool) -> None:
        """Store the upper halves of two vectors, one vector after the other."""
        b = self.builder
        words = ir.VectorType(I16, 2 * SIDE)
        odd = ir.Constant(ir.VectorType(I32, 2 * SIDE), list(range(1, 4 * SIDE, 2)))
        packed = b.shuffle_vector(b.bitcast(low, words), b.bitcast(high, words), odd)
        target = b.bitcast(self.at(self.args["target"], offset), words.as_pointer())
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
    """Split a matrix into panels of B, whose rows are interleaved in pairs."""

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
                address = self.at(target, b.add(panel, inside))
                rows = [self.row(b.add(i, I64(h)), k) for h in range(2)]
                sixteen = self.splat(I32(16))
                upper = self.splat(I32(0xFFFF0000))
                for p in range(PARTS):
                    low, high = b.lshr(rows[0][p], sixteen), b.and_(rows[1][p], upper)
                    part_address = self.at(address, b.mul(args["part"], I64(p)))
                    part_address = b.bitcast(part_address, ir.VectorType(I32, SIDE).as_pointer())
                    b.store(b.or_(low, high), part_address, align=4)
                return []

            self.loop(I64(0), args["written"], [], pair, step=2)
            return []

        self.loop(I64(0), args["columns"], [], column, step=SIDE)

    def row(self, i: ir.Value, column: ir.Value) -> list[ir.Value]:
        """Return the parts of 16 elements of a row, or of zeros after the last row."""
        b, args = self.builder, self.args
        exists = b.icmp_signed("<", i, args["rows"])
        row = b.select(exists, i, I64(0))
        address = self.at(args["source"], b.add(b.mul(row, args["source_row"]), column))
        value = self.load(address, masked=True)
        return split(self, b.select(exists, value, self.zero))


def emit(writer: Any) -> Any:
    """Return the code generator of an intrinsic that calls the function of `writer`."""

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

    Row tile m of A begins at ``a + a_rows[m]``, and the 32 columns of its step t begin at
    ``a + a_rows[m] + a_steps[t]``. Column tile j of B begins at ``b + b_columns[j]``. Their tile
    of C begins at ``c + c_rows[m] + c_columns[j]``.

    Args:
        a: (array, start, part stride); `a_rows` is (table, first entry, row stride).
        b: (array, start, part stride, step stride).
        c: (array, start); `c_rows` is (table, first entry, row stride).
        a_steps, b_columns, c_columns: (table, first entry).
        d: (array, start, row stride). The row stride is 0 for a bias, that of C if D is the
            previous C, and negative if there is no D.
        shape: (rows of a tile, row tiles, steps, column tiles, columns of the last column tile).
    """
    sig = types.none(a, a_rows, a_steps, b, b_columns, c, c_rows, c_columns, d, shape)
    return sig, emit(_Product)


@intrinsic
def split_rows(typingctx, source, target, part, count):  # type: ignore[no-untyped-def]
    """Split `count` elements into parts; source and target are (contiguous array, start)."""
    return types.none(source, target, part, count), emit(_Rows)


@intrinsic
def split_pairs(typingctx, source, source_row, target, shape, distances):  # type: ignore[no-untyped-def]
    """Split a matrix into panels of B, whose rows are interleaved in pairs.

    Args:
        source, target: (contiguous array, start).
        source_row: row stride of the source.
        shape: (rows, rows to write, columns). Rows after the last one of the source are zeros.
        distances: strides in `target` of column tiles, of parts and of 32 rows.
    """
    return types.none(source, source_row, target, shape, distances), emit(_Pairs)
