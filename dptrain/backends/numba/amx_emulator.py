"""The instructions of the AMX unit as LLVM IR for any processor, to test kernels without AMX.

Kernels get this code if Numba compiles for a processor without AMX. `amx.available` is False there,
so only tests run it. It is about 60 times slower than the unit.

An emulated function has its own tile registers, on the stack. Therefore a function that uses tiles
configures them itself. As on the unit, an instruction whose registers do not fit together is
invalid and ends the process (SIGILL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llvmlite import ir
from numba.core import cgutils

from dptrain.backends.numba.vector import I8P, I32, I32P, I64, Writer

_REGISTERS, _ROWS, _LANES = 8, 16, 16
_TILE = _ROWS * _LANES
I16, I64P = ir.IntType(16), I64.as_pointer()


class _Instruction(Writer):
    """The function of an instruction. Its first arguments are the registers of the caller.

    `tiles` has 16 rows of 16 elements of 32 bits for each register; `sizes` has the rows of all
    registers and then their columns.
    """

    operands: Mapping[str, ir.Type]

    def __init__(self, module: ir.Module) -> None:
        name = f"dptrain_amx_emulator{type(self).__name__.lower()}"
        arguments = {"tiles": I32P, "sizes": I64P, **self.operands}
        super().__init__(module, name, arguments, _LANES)

    def register(self, operand: str) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the address, the rows and the columns of a register, which must be configured."""
        b, number = self.builder, self.args[operand]
        rows = b.load(self.at(self.args["sizes"], number))
        columns = b.load(self.at(self.args["sizes"], b.add(number, I64(_REGISTERS))))
        for size in (rows, columns):
            self.trap_if(b.icmp_unsigned(">=", b.sub(size, I64(1)), I64(_ROWS)))
        return self.at(self.args["tiles"], b.mul(number, I64(_TILE))), rows, columns

    def trap_if(self, condition: ir.Value) -> None:
        """End the process if the instruction is invalid."""
        b = self.builder
        with b.if_then(condition, likely=False):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(self.module, kind, "llvm.trap"), [])


class _Load(_Instruction):
    """Load the rows of a register; the rest of the tile becomes zero."""

    operands = {"number": I64, "source": I8P, "distance": I64}  # noqa: RUF012

    def write(self) -> None:
        b, args = self.builder, self.args
        tile, rows, columns = self.register("number")

        def row(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            target = self.at(tile, b.mul(m, I64(_LANES)))
            self.store(ir.Constant(ir.VectorType(I32, _LANES), None), target)
            with b.if_then(b.icmp_signed("<", m, rows)):
                source = self.at(args["source"], b.mul(m, args["distance"]))
                cgutils.raw_memcpy(b, b.bitcast(target, I8P), source, columns, 4)
            return []

        self.loop(I64(0), I64(_ROWS), [], row)


class _Store(_Instruction):
    """Store the rows of a register."""

    operands = {"number": I64, "target": I8P, "distance": I64}  # noqa: RUF012

    def write(self) -> None:
        b, args = self.builder, self.args
        tile, rows, columns = self.register("number")

        def row(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            source = b.bitcast(self.at(tile, b.mul(m, I64(_LANES))), I8P)
            target = self.at(args["target"], b.mul(m, args["distance"]))
            cgutils.raw_memcpy(b, target, source, columns, 4)
            return []

        self.loop(I64(0), rows, [], row)


class _Multiply(_Instruction):
    """Compute C += A·B of bfloat16 pairs as the instruction TDPBF16PS does.

    For each element of C, the first numbers and the second numbers of the pairs have separate sums,
    which begin at zero. They are added to each other, and their sum to C. Every operation rounds to
    the nearest even number, and denormal operands and results are zero.
    """

    operands = {"c": I64, "a": I64, "b": I64}  # noqa: RUF012

    def write(self) -> None:
        b, ints = self.builder, ir.VectorType(I32, _LANES)
        (c_tile, rows, columns), (a_tile, a_rows, pairs), (b_tile, b_rows, b_columns) = (
            self.register(operand) for operand in "cab"
        )
        for x, y in ((rows, a_rows), (pairs, b_rows), (columns, b_columns)):
            self.trap_if(b.icmp_signed("!=", x, y))
        self.mask_after(columns)
        inside = self.mask

        def row(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            start = b.mul(m, I64(_LANES))

            def pair(k: ir.Value, sums: Sequence[ir.Value]) -> Sequence[ir.Value]:
                x = self.splat(b.load(self.at(self.at(a_tile, start), k)))
                y = self.load(self.at(b_tile, b.mul(k, I64(_LANES))), I32)
                return [
                    self.flush(self.call("llvm.fma", self.vector, x_half, y_half, total))
                    for x_half, y_half, total in zip(
                        self.halves(x), self.halves(y), sums, strict=True
                    )
                ]

            first, second = self.loop(I64(0), pairs, [self.zero] * 2, pair)
            target = self.at(c_tile, start)
            before = self.flush(self.load(target))
            total = self.flush(b.fadd(before, self.flush(b.fadd(first, second))))
            kept = b.select(inside, b.bitcast(total, ints), ir.Constant(ints, None))
            self.store(kept, target)
            return []

        self.loop(I64(0), rows, [], row)

    def halves(self, pairs: ir.Value) -> list[ir.Value]:
        """Return the first and the second numbers of bfloat16 pairs as float32."""
        b = self.builder
        low = b.shl(pairs, self.splat(I32(16)))
        high = b.and_(pairs, self.splat(I32(0xFFFF0000)))
        return [self.flush(b.bitcast(half, self.vector)) for half in (low, high)]

    def flush(self, value: ir.Value) -> ir.Value:
        """Return the value with zeros of equal sign for denormal numbers."""
        b = self.builder
        bits = b.bitcast(value, ir.VectorType(I32, _LANES))
        exponent = b.and_(bits, self.splat(I32(0x7F800000)))
        sign = b.and_(bits, self.splat(I32(0x80000000)))
        denormal = b.icmp_unsigned("==", exponent, self.splat(I32(0)))
        return b.bitcast(b.select(denormal, sign, bits), self.vector)


class TileRegisters:
    """The tile registers of one emulated function.

    Args:
        module: the module of the function.
        builder: writes the function.
    """

    def __init__(self, module: ir.Module, builder: ir.IRBuilder) -> None:
        self._module, self._builder = module, builder
        with builder.goto_entry_block():
            self._tiles = builder.alloca(I32, I64(_REGISTERS * _TILE))
            self._sizes = builder.alloca(I64, I64(2 * _REGISTERS))
            self._tilerelease()

    def call_instruction(self, name: str, *operands: ir.Value) -> None:
        """Write the code of an instruction of the AMX unit."""
        getattr(self, f"_{name}")(*operands)

    def _ldtilecfg(self, address: ir.Value) -> None:
        b = self._builder
        for register in range(_REGISTERS):
            pointer = b.bitcast(b.gep(address, [I64(16 + 2 * register)]), I16.as_pointer())
            columns = b.udiv(b.zext(b.load(pointer, align=1), I64), I64(4))
            b.store(columns, b.gep(self._sizes, [I64(_REGISTERS + register)]))
            rows = b.zext(b.load(b.gep(address, [I64(48 + register)])), I64)
            b.store(rows, b.gep(self._sizes, [I64(register)]))
        cgutils.memset(b, self._tiles, I64(4 * _REGISTERS * _TILE), 0)

    def _tilerelease(self) -> None:
        cgutils.memset(self._builder, self._sizes, I64(8 * 2 * _REGISTERS), 0)

    def _tilezero(self, register: ir.Constant) -> None:
        tile = self._builder.gep(self._tiles, [I64(int(register.constant) * _TILE)])
        cgutils.memset(self._builder, tile, I64(4 * _TILE), 0)

    def _tileloadd64(self, register: ir.Constant, source: ir.Value, distance: ir.Value) -> None:
        self._call(_Load, register, source, distance)

    def _tilestored64(self, register: ir.Constant, target: ir.Value, distance: ir.Value) -> None:
        self._call(_Store, register, target, distance)

    def _tdpbf16ps(self, c: ir.Constant, a: ir.Constant, b: ir.Constant) -> None:
        self._call(_Multiply, c, a, b)

    def _call(self, instruction: type[_Instruction], *operands: ir.Value) -> None:
        """Call the function of an instruction; numbers of registers become 64-bit integers."""
        values = [
            I64(int(operand.constant)) if isinstance(operand, ir.Constant) else operand
            for operand in operands
        ]
        function = instruction(self._module).function
        self._builder.call(function, [self._tiles, self._sizes, *values])
