"""SIMD vectors: their width on this processor, and a writer of LLVM IR for vector code.

Numba has no vector type. Kernels that must not depend on LLVM's automatic vectorisation are written
as LLVM IR with the operations of `Writer`.

Vector width and tile sizes follow the processor that Numba compiles for: this one, unless
``NUMBA_CPU_NAME`` or ``NUMBA_CPU_FEATURES`` are set. Numba's cache key contains both, so code of
one width is never loaded for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from typing import Any, ClassVar

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.native.jit import inlined

F32, F64 = ir.FloatType(), ir.DoubleType()
I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
F32P, I8P, I32P = F32.as_pointer(), I8.as_pointer(), I32.as_pointer()
LINE = 16
"""Float32 elements of a cache line."""


@dataclass(frozen=True)
class Registers:
    """Vector width and register-tile sizes of a processor.

    Attributes:
        width: float32 elements of a vector.
        heights: rows of the register tiles, the highest first. Two accumulators per row, two
            vectors of B and one broadcast element of A must fit the registers.
        spaced, adjacent: (height, group) of tiles of one and of two vectors whose rows are in
            groups at equal distances, any or 1. A group needs one address, so these tiles may have
            as many rows as there are vector registers.
        in_place: rows of the tiles of one and of two vectors whose products replace A, the highest
            first and all multiples of 4.
    """

    width: int
    heights: tuple[int, ...]
    spaced: tuple[tuple[int, int], tuple[int, int]]
    adjacent: tuple[tuple[int, int], tuple[int, int]]
    in_place: tuple[tuple[int, ...], tuple[int, ...]]


AVX512 = Registers(
    width=16,
    heights=(12, 8, 4),
    spaced=((24, 4), (12, 4)),
    adjacent=((27, 3), (9, 3)),
    in_place=((16, 4), (12, 4)),
)
AVX2 = Registers(
    width=8,
    heights=(6, 4, 2),
    spaced=((12, 4), (6, 2)),
    adjacent=((12, 3), (6, 3)),
    in_place=((8, 4), (4,)),
)
PORTABLE = Registers(
    width=4,
    heights=(6, 4, 2),
    spaced=((12, 4), (6, 2)),
    adjacent=((12, 3), (6, 3)),
    in_place=((8, 4), (4,)),
)
"""128-bit vectors, which every processor that Numba supports has."""


def registers(features: str) -> Registers:
    """Select the registers by the processor's features in LLVM's notation
    (``+avx2,-avx512f,…``).
    """
    present = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
    if "avx512f" in present:
        return AVX512
    if {"avx2", "fma"} <= present:
        return AVX2
    return PORTABLE


@cache
def compiled_registers() -> Registers:
    """Return the registers of the processor that Numba compiles for."""
    from numba.core.registry import cpu_target

    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return registers(features)


class Writer:
    """Write one function into a module; a later writer with the same name reuses it.

    Args:
        module: the module that receives the function.
        name: name of the function, unique for its content.
        arguments: names and types.
        width: elements of a vector; 1 for the rest of a range.

    Attributes:
        function: the function.
        args: its arguments by name.
        builder: the instruction builder.
    """

    def __init__(
        self, module: ir.Module, name: str, arguments: Mapping[str, ir.Type], width: int
    ) -> None:
        self.module, self.width = module, width
        signature = ir.FunctionType(ir.VoidType(), list(arguments.values()))
        self.function = cgutils.get_or_insert_function(module, signature, name)
        self.args = dict(zip(arguments, self.function.args, strict=True))
        self.vector = ir.VectorType(F32, width)
        self.zero = ir.Constant(self.vector, [0.0] * width)
        self.mask: ir.Value | None = None
        if self.function.is_declaration:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
            self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
            self.write()
            self.builder.ret_void()

    def write(self) -> None:
        """Write the function's body."""
        raise NotImplementedError

    def splat(self, scalar: ir.Value) -> ir.Value:
        """Return a vector of equal elements."""
        kind = ir.VectorType(scalar.type, self.width)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        lanes = ir.Constant(ir.VectorType(I32, self.width), [0] * self.width)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)

    def mask_after(self, count: ir.Value) -> None:
        """Restrict masked loads and stores to the first `count` elements."""
        lanes = ir.Constant(ir.VectorType(I32, self.width), list(range(self.width)))
        self.mask = self.builder.icmp_signed("<", lanes, self.splat(self.builder.trunc(count, I32)))

    def at(self, pointer: ir.Value, offset: ir.Value) -> ir.Value:
        """Return the pointer advanced by `offset` elements."""
        return self.builder.gep(pointer, [offset])

    def load(self, pointer: ir.Value, kind: ir.Type = F32, masked: bool = False) -> ir.Value:
        """Load the vector of `kind` elements at `pointer`."""
        b, vector = self.builder, ir.VectorType(kind, self.width)
        address = b.bitcast(pointer, vector.as_pointer())
        if not masked:
            return b.load(address, align=1 if kind == I8 else 4)
        assert self.mask is not None
        zero = ir.Constant(vector, [0] * self.width if kind == I8 else [0.0] * self.width)
        align = I32(1 if kind == I8 else 4)
        return self.call("llvm.masked.load", vector, address, align, self.mask, zero, kind=kind)

    def store(self, value: ir.Value, pointer: ir.Value, masked: bool = False) -> None:
        """Store a vector at `pointer`."""
        b = self.builder
        address = b.bitcast(pointer, value.type.as_pointer())
        if not masked:
            b.store(value, address, align=1 if value.type.element == I8 else 4)
            return
        assert self.mask is not None
        kind = value.type.element
        align = I32(1 if kind == I8 else 4)
        self.call("llvm.masked.store", ir.VoidType(), value, address, align, self.mask, kind=kind)

    def prefetch(self, pointer: ir.Value, cache: int, written: bool = False) -> None:
        """Prefetch the cache line at `pointer`, which may be invalid, into the L1 or L2 cache."""
        call_prefetch(self.builder, pointer, cache=cache, written=written)

    def call(self, name: str, result: ir.Type, *args: ir.Value, kind: ir.Type = F32) -> ir.Value:
        """Call an LLVM intrinsic by the first part of its name, for vectors of `kind` elements.

        llvmlite's declaration of intrinsics does not support vectors.
        """
        lanes = f"v{self.width}{'i8' if kind == I8 else 'f32'}"
        name += f".{lanes}.p0{lanes}" if "masked" in name else f".{lanes}"
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.module, kind, name), args)

    def hidden(self, pointer: ir.Value) -> ir.Value:
        """Return a pointer about which LLVM knows nothing, by inline assembly without code."""
        kind = ir.FunctionType(pointer.type, [pointer.type])
        return self.builder.call(ir.InlineAsm(kind, "", "=r,0"), [pointer])

    def multiply_add(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """Return x · y + z, fused if the processor has fused multiply-add."""
        return self.call("llvm.fmuladd", self.vector, x, y, z)

    def loop(
        self,
        start: ir.Value,
        stop: ir.Value,
        state: Sequence[ir.Value],
        body: Callable[[ir.Value, Sequence[ir.Value]], Sequence[ir.Value]],
        step: int = 1,
    ) -> list[ir.Value]:
        """Run `body` over a range; it maps the state to the next state. Return the last state.

        LLVM does not unroll the loop. For some processors it would, and then rename the sums of a
        tile so that some of them no longer fit into registers.
        """
        b = self.builder
        before = b.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        phis = [b.phi(value.type) for value in state]
        b.cbranch(b.icmp_signed("<", i, stop), inside, after)
        b.position_at_end(inside)
        new = body(i, phis)
        following = b.add(i, I64(step), flags=("nsw",))
        for phi, first, value in zip((i, *phis), (start, *state), (following, *new), strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, b.block)
        b.branch(head).set_metadata("llvm.loop", self._no_unrolling())
        b.position_at_end(after)
        return phis

    def _no_unrolling(self) -> ir.MDValue:
        """Return the metadata of a loop that LLVM must not unroll: itself, then the property."""
        never = self.module.add_metadata(["llvm.loop.unroll.disable"])
        loop = ir.MDValue(self.module, [never], str(len(self.module.metadata)))
        loop.operands = (loop, never)
        return loop


def flatten_arguments(
    context: Any, builder: ir.IRBuilder, kinds: Sequence[Any], values: Sequence[Any]
) -> list[ir.Value]:
    """Turn Numba's arguments into scalars and pointers.

    A pair (contiguous array, start) becomes a pointer to that element; integers become int64 and
    floats float32. Elements of tuples count as arguments.
    """
    flat: list[ir.Value] = []
    rest = _ungrouped(builder, kinds, values)
    for kind, value in rest:
        if isinstance(kind, types.Array):
            assert kind.layout == "C"
            start_kind, start = next(rest)
            start = context.cast(builder, start, start_kind, types.int64)
            data = context.make_array(kind)(context, builder, value).data
            flat.append(builder.gep(data, [start]))
        else:
            wanted = types.float32 if isinstance(kind, types.Float) else types.int64
            flat.append(context.cast(builder, value, kind, wanted))
    return flat


def _ungrouped(
    builder: ir.IRBuilder, kinds: Sequence[Any], values: Sequence[Any]
) -> Iterator[tuple[Any, ir.Value]]:
    """Yield types and values, of tuples those of their elements."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, types.BaseTuple):
            yield from zip(kind.types, cgutils.unpack_tuple(builder, value), strict=True)
        else:
            yield kind, value


Emit = Callable[[ir.IRBuilder, list[ir.Value]], None]
"""Adds code for the arguments of `flatten_arguments`."""


def as_intrinsic(parameters: str | Mapping[str, ir.Type], emit: Emit) -> Any:
    """Return a function that kernels call, for code that is written as LLVM IR.

    Args:
        parameters: their names, separated by spaces, or the arguments of a `Writer`. A kernel
            passes an array and the index of an element for a pointer. A named parameter may be a
            tuple of several arguments.
        emit: adds the code.
    """
    if isinstance(parameters, str):
        names = parameters.split()
    else:
        pairs = ((n, f"{n}_start") if kind.is_pointer else (n,) for n, kind in parameters.items())
        names = [name for pair in pairs for name in pair]

    def define(typingctx, *kinds):
        def codegen(context, builder, sig, values):
            emit(builder, flatten_arguments(context, builder, sig.args, values))
            return context.get_dummy_value()

        return types.none(*kinds), codegen

    # Numba checks the number of arguments by the signature.
    positional = [Parameter(n, Parameter.POSITIONAL_ONLY) for n in ("typingctx", *names)]
    define.__signature__ = Signature(positional)  # type: ignore[attr-defined]
    return intrinsic(define)


def call_of(writer: Callable[[ir.Module, int], Writer]) -> Emit:
    """Return what calls the function of a writer with the vector width of the processor."""

    def emit(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
        builder.call(writer(builder.module, compiled_registers().width).function, flat)

    return emit


class _Transpose(Writer):
    """Transpose a block of at most as many rows and columns as a vector has elements.

    Args:
        masked: False if the block has exactly so many.
    """

    ARGUMENTS: ClassVar[Mapping[str, ir.Type]] = {
        "source": F32P,
        "source_row": I64,
        "target": F32P,
        "target_row": I64,
        "rows": I64,
        "columns": I64,
    }

    def __init__(self, module: ir.Module, width: int, masked: bool) -> None:
        self.masked = masked
        name = f"dptrain_transpose_x{width}{'_masked' if masked else ''}"
        super().__init__(module, name, self.ARGUMENTS, width)

    def write(self) -> None:
        rows = self._shuffled(self._rows())
        b, args = self.builder, self.args
        if self.masked:
            self.mask_after(args["rows"])
        for i, row in enumerate(rows):
            target = self.at(args["target"], b.mul(I64(i), args["target_row"]))
            if not self.masked:
                self.store(row, target)
                continue
            with b.if_then(b.icmp_signed("<", I64(i), args["columns"])):
                self.store(row, target, masked=True)

    def _rows(self) -> list[ir.Value]:
        """Load the rows of the source; rows that do not exist repeat the first."""
        b, args = self.builder, self.args
        offsets = [b.mul(I64(i), args["source_row"]) for i in range(self.width)]
        if self.masked:
            self.mask_after(args["columns"])
            exists = [b.icmp_signed("<", I64(i), args["rows"]) for i in range(self.width)]
            offsets = [b.select(*pair, I64(0)) for pair in zip(exists, offsets, strict=True)]
        return [self.load(self.at(args["source"], at), masked=self.masked) for at in offsets]

    def _shuffled(self, rows: list[ir.Value]) -> list[ir.Value]:
        """Exchange the off-diagonal halves of ever smaller blocks."""
        b, size = self.builder, self.width
        half = size // 2
        while half:
            low = [j if not j & half else size + j - half for j in range(size)]
            high = [j + half if not j & half else size + j for j in range(size)]
            for i in (i for i in range(size) if not i & half):
                pair = rows[i], rows[i + half]
                for row, lanes in ((i, low), (i + half, high)):
                    mask = ir.Constant(ir.VectorType(I32, size), lanes)
                    rows[row] = b.shuffle_vector(*pair, mask)
            half //= 2
        return rows


def _emit_transpose(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
    """Call the code for a whole block, or that for fewer rows or columns."""
    width = compiled_registers().width
    whole = [builder.icmp_signed("==", size, I64(width)) for size in flat[-2:]]
    with builder.if_else(builder.and_(*whole)) as (all_elements, some_elements):
        with all_elements:
            builder.call(_Transpose(builder.module, width, masked=False).function, flat)
        with some_elements:
            builder.call(_Transpose(builder.module, width, masked=True).function, flat)


_transpose_block = as_intrinsic(_Transpose.ARGUMENTS, _emit_transpose)
"""Transpose a block: (source, start, row, target, start, row, rows, columns)."""


class _Interleave(Writer):
    """Interleave `count` elements of three arrays that are `pitch` elements apart: RGB planes
    become RGB pixels.
    """

    ARGUMENTS: ClassVar[Mapping[str, ir.Type]] = {
        "source": F32P,
        "pitch": I64,
        "target": F32P,
        "count": I64,
    }
    CHANNELS: ClassVar[int] = 3

    def __init__(self, module: ir.Module, width: int) -> None:
        super().__init__(module, f"dptrain_interleave_x{width}", self.ARGUMENTS, width)

    def write(self) -> None:
        b, count = self.builder, self.args["count"]
        whole = b.sub(count, b.urem(count, I64(self.width)))

        def body(i: ir.Value, _: Any) -> tuple[()]:
            self._pixels(i, self.width)
            return ()

        self.loop(I64(0), whole, (), body, step=self.width)

        def single(i: ir.Value, _: Any) -> tuple[()]:
            self._pixels(i, 1)
            return ()

        self.loop(whole, count, (), single)

    def _pixels(self, i: ir.Value, size: int) -> None:
        """Write pixels i to i + size; size is 1 or the vector width."""
        b, (source, pitch, target, _) = self.builder, self.args.values()
        sources = [self.at(source, b.add(b.mul(I64(c), pitch), i)) for c in range(self.CHANNELS)]
        first = self.at(target, b.mul(i, I64(self.CHANNELS)))
        if size == 1:
            for c, plane in enumerate(sources):
                b.store(b.load(plane), self.at(first, I64(c)))
            return
        planes = [self.load(plane) for plane in sources]
        for j in range(self.CHANNELS):
            pixels, channels = zip(
                *(divmod(j * size + lane, self.CHANNELS) for lane in range(size)), strict=True
            )
            result = planes[0]
            for c in range(1, self.CHANNELS):
                # Elements of channel c come from its vector; the others keep their position.
                lanes = [
                    size + pixel if channel == c else (lane if c > 1 else pixel)
                    for lane, (pixel, channel) in enumerate(zip(pixels, channels, strict=True))
                ]
                order = ir.Constant(ir.VectorType(I32, size), lanes)
                result = b.shuffle_vector(result, planes[c], order)
            self.store(result, self.at(first, I64(j * size)))


interleave = as_intrinsic(_Interleave.ARGUMENTS, call_of(_Interleave))
"""target[3 i + c] = source[c · pitch + i] for c < 3, of float32 in contiguous arrays.

Arguments: source, start, pitch, target, start, count.
"""


def _emit_copy(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
    source, target, count = flat
    cgutils.memcpy(builder, target, source, count)


copy = as_intrinsic("source start target target_start count", _emit_copy)
"""Copy `count` elements of float32 between contiguous arrays that do not overlap.

Arguments: source, start, target, start, count.
"""


def call_prefetch(builder: Any, pointer: ir.Value, *, cache: int, written: bool) -> None:
    """Call LLVM's prefetch of a cache line into the L1 or L2 cache; `pointer` may be invalid."""
    kind = ir.FunctionType(ir.VoidType(), [I8P, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    address = builder.bitcast(pointer, I8P)
    builder.call(function, [address, I32(int(written)), I32(4 - cache), I32(1)])


prefetch = as_intrinsic(
    "array index", lambda builder, flat: call_prefetch(builder, flat[0], cache=2, written=False)
)
"""Prefetch the cache line of an element, which may be outside the array, into the L2 cache."""

prefetch_for_writing = as_intrinsic(
    "array index", lambda builder, flat: call_prefetch(builder, flat[0], cache=1, written=True)
)
"""Prefetch the cache line of an element, and remove it from the caches of other cores."""


@intrinsic
def vector_width(typingctx):
    """Return the elements of a vector, a constant of the compiled code."""

    def codegen(context, builder, sig, args):
        return I64(compiled_registers().width)

    return types.int64(), codegen


@inlined
def transpose(source, start, source_row, target, target_start, target_row, rows, columns):
    """target[j, i] = source[i, j] for matrices in flat arrays.

    Args:
        source, target: contiguous.
        start, target_start: first elements.
        source_row, target_row: distances of rows.
        rows, columns: of the source.
    """
    size = vector_width()
    for i in range(0, rows, size):
        for j in range(0, columns, size):
            s, t = start + i * source_row + j, target_start + j * target_row + i
            high, wide = min(size, rows - i), min(size, columns - j)
            _transpose_block(source, s, source_row, target, t, target_row, high, wide)
