"""The one place that generates vector code: a register tile of a matrix product, as LLVM IR.

Every convolution and every matrix product of the backend is a loop over tiles of

    C[m, k] = max(floor, D[m, k] + Σ_o Σ_i A[m; o, i] · B[o, i; k])

for a few rows m and one or two vectors of columns k. All sums of a tile stay in registers until
they are complete. A is read one element at a time and broadcast, B is read by vectors:

- A[m; o, i] lies at ``a + a_scale · a_rows[m] + o · a_outer + i · a_inner``;
- B[o, i; k] at ``b + o · b_outer + i · b_inner + k``;
- C[m, k] at ``c + c_scale · c_rows[m] + k``, and D likewise with ``d`` and ``d_scale``: D is a bias
  when ``d_scale`` is 0, what C held before when it is ``c_scale``, and zero when it is negative.

The rows' offsets come from tables, so a tile may take any rows: pixels at the end of one image row
and the start of the next, or the (r, s, c) of a filter. All distances are in elements and arguments
at run time, so that layers of every shape share the same few machine functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.backends.numba.jit import inlined
from dptrain.backends.numba.vector import Registers, compiled_registers

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_F32P, _I32P = _F32.as_pointer(), _I32.as_pointer()

_ARGUMENTS: tuple[tuple[str, ir.Type], ...] = (
    ("a", _F32P),
    ("a_rows", _I32P),
    ("a_scale", _I64),
    ("a_inner", _I64),
    ("inner", _I64),
    ("a_outer", _I64),
    ("outer", _I64),
    ("b", _F32P),
    ("b_inner", _I64),
    ("b_outer", _I64),
    ("d", _F32P),
    ("d_scale", _I64),
    ("c", _F32P),
    ("c_rows", _I32P),
    ("c_scale", _I64),
    ("rows", _I64),
    ("columns", _I64),
    ("floor", _F32),
)


class _Tile:
    """Writes the function that computes one tile.

    Args:
        module: where the function goes.
        registers: vector width and rows.
        vectors: vectors of columns.
        masked: only the first ``columns`` columns exist, which end inside the last vector.
    """

    def __init__(self, module: ir.Module, registers: Registers, vectors: int, masked: bool) -> None:
        self.module, self.width, self.rows = module, registers.width, registers.rows
        self.vectors, self.masked = vectors, masked
        self.vector = ir.VectorType(_F32, self.width)
        signature = ir.FunctionType(ir.VoidType(), [kind for _, kind in _ARGUMENTS])
        name = f"dptrain_tile_{self.rows}x{vectors}x{self.width}{'_masked' if masked else ''}"
        self.function = cgutils.get_or_insert_function(module, signature, name)
        if self.function.is_declaration:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
            self._write()

    def _write(self) -> None:
        self.args = dict(zip((name for name, _ in _ARGUMENTS), self.function.args, strict=True))
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        if self.masked:
            self._make_mask()
        rows = [self._row("a", m) for m in range(self.rows)]
        zero = ir.Constant(self.vector, [0.0] * self.width)
        sums = self._sum(rows, [zero] * (self.rows * self.vectors))
        self._finish(sums)

    def _make_mask(self) -> None:
        b = self.builder
        left = b.sub(self.args["columns"], _I64((self.vectors - 1) * self.width))
        lanes = ir.Constant(ir.VectorType(_I32, self.width), list(range(self.width)))
        self.mask = b.icmp_signed("<", lanes, self._splat(b.trunc(left, _I32)))

    def _splat(self, scalar: ir.Value) -> ir.Value:
        b = self.builder
        kind = ir.VectorType(scalar.type, self.width)
        first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
        lanes = ir.Constant(ir.VectorType(_I32, self.width), [0] * self.width)
        return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)

    def _row(self, operand: str, m: int) -> ir.Value:
        """Offset of row m; rows beyond the last repeat the first, whose memory exists."""
        b, args = self.builder, self.args
        index = b.select(b.icmp_signed("<", _I64(m), args["rows"]), _I64(m), _I64(0))
        entry = b.load(b.gep(args[f"{operand}_rows"], [index]))
        offset = b.mul(b.sext(entry, _I64), args[f"{operand}_scale"])
        return b.gep(args["a"], [offset]) if operand == "a" else offset

    def _load(self, pointer: ir.Value, v: int) -> ir.Value:
        """Vector v of the columns that start at `pointer`."""
        b = self.builder
        place = b.bitcast(b.gep(pointer, [_I64(v * self.width)]), self.vector.as_pointer())
        if not (self.masked and v == self.vectors - 1):
            return b.load(place, align=4)
        kind = ir.FunctionType(self.vector, [place.type, _I32, self.mask.type, self.vector])
        name = f"llvm.masked.load.v{self.width}f32.p0v{self.width}f32"
        load = cgutils.get_or_insert_function(self.module, kind, name)
        zero = ir.Constant(self.vector, [0.0] * self.width)
        return b.call(load, [place, _I32(4), self.mask, zero])

    def _store(self, value: ir.Value, pointer: ir.Value, v: int) -> None:
        b = self.builder
        place = b.bitcast(b.gep(pointer, [_I64(v * self.width)]), self.vector.as_pointer())
        if not (self.masked and v == self.vectors - 1):
            b.store(value, place, align=4)
            return
        kind = ir.FunctionType(ir.VoidType(), [self.vector, place.type, _I32, self.mask.type])
        name = f"llvm.masked.store.v{self.width}f32.p0v{self.width}f32"
        store = cgutils.get_or_insert_function(self.module, kind, name)
        b.call(store, [value, place, _I32(4), self.mask])

    def _multiply_add(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        # fmuladd is one instruction where the processor has it and two elsewhere.
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fmuladd.v{self.width}f32"
        return self.builder.call(cgutils.get_or_insert_function(self.module, kind, name), [x, y, z])

    def _loop(
        self,
        count: ir.Value,
        state: Sequence[ir.Value],
        body: Callable[[Sequence[ir.Value]], Sequence[ir.Value]],
    ) -> list[ir.Value]:
        """Run `body` `count` times over `state`; returns the last state."""
        b = self.builder
        before = b.block
        head, step, after = (b.append_basic_block(name) for name in ("head", "step", "after"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(_I64)
        phis = [b.phi(value.type) for value in state]
        b.cbranch(b.icmp_signed("<", i, count), step, after)
        b.position_at_end(step)
        new = body(phis)
        for phi, start, value in zip(
            (i, *phis), (_I64(0), *state), (b.add(i, _I64(1)), *new), strict=True
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return phis

    def _sum(self, rows: Sequence[ir.Value], sums: Sequence[ir.Value]) -> Sequence[ir.Value]:
        b, args = self.builder, self.args

        def inner(state: Sequence[ir.Value]) -> Sequence[ir.Value]:
            offset, pointer, *sums = state
            columns = [self._load(pointer, v) for v in range(self.vectors)]
            new = []
            for m, row in enumerate(rows):
                element = self._splat(b.load(b.gep(row, [offset]), align=4))
                for v, column in enumerate(columns):
                    new.append(self._multiply_add(element, column, sums[m * self.vectors + v]))
            return [b.add(offset, args["a_inner"]), b.gep(pointer, [args["b_inner"]]), *new]

        def outer(state: Sequence[ir.Value]) -> Sequence[ir.Value]:
            offset, pointer, *sums = state
            _, _, *new = self._loop(args["inner"], state, inner)
            return [b.add(offset, args["a_outer"]), b.gep(pointer, [args["b_outer"]]), *new]

        _, _, *result = self._loop(args["outer"], [_I64(0), args["b"], *sums], outer)
        return result

    def _finish(self, sums: Sequence[ir.Value]) -> None:
        """Add D, apply the floor, store the rows that exist."""
        b, args = self.builder, self.args
        zeros = ir.GlobalVariable(
            self.module,
            ir.ArrayType(_F32, self.vectors * self.width),
            f"{self.function.name}_zeros",
        )
        zeros.linkage, zeros.global_constant = "internal", True
        zeros.initializer = ir.Constant(zeros.type.pointee, None)
        nothing = b.icmp_signed("<", args["d_scale"], _I64(0))
        d = b.select(nothing, b.bitcast(zeros, _F32P), args["d"])
        d_scale = b.select(nothing, _I64(0), args["d_scale"])
        floor = self._splat(args["floor"])
        for m in range(self.rows):
            with b.if_then(b.icmp_signed("<", _I64(m), args["rows"]), likely=True):
                entry = b.sext(b.load(b.gep(args["c_rows"], [_I64(m)])), _I64)
                addend = b.gep(d, [b.mul(entry, d_scale)])
                target = b.gep(args["c"], [b.mul(entry, args["c_scale"])])
                for v in range(self.vectors):
                    value = b.fadd(sums[m * self.vectors + v], self._load(addend, v))
                    # Written so that a NaN passes: it must reach the loss to be noticed.
                    value = b.select(b.fcmp_ordered("<", value, floor), floor, value)
                    self._store(value, target, v)
        b.ret_void()


def _emit_tile(context: Any, builder: Any, sig: Any, args: Any, vectors: int, masked: bool) -> Any:
    """Call a tile function with arrays and starts in them turned into pointers."""
    values, kinds, flat = list(args), list(sig.args), []
    for kind in (kind for _, kind in _ARGUMENTS):
        value, numba_kind = values.pop(0), kinds.pop(0)
        if isinstance(kind, ir.PointerType):
            data = context.make_array(numba_kind)(context, builder, value).data
            start = context.cast(builder, values.pop(0), kinds.pop(0), types.int64)
            flat.append(builder.gep(data, [start]))
        else:
            wanted = types.float32 if kind == _F32 else types.int64
            flat.append(context.cast(builder, value, numba_kind, wanted))
    builder.call(_Tile(builder.module, compiled_registers(), vectors, masked).function, flat)
    return context.get_dummy_value()


@intrinsic
def wide_tile(  # type: ignore[no-untyped-def]
    typingctx,
    a,
    a_start,
    a_rows,
    a_first,
    a_scale,
    a_inner,
    inner,
    a_outer,
    outer,
    b,
    b_start,
    b_inner,
    b_outer,
    d,
    d_start,
    d_scale,
    c,
    c_start,
    c_rows,
    c_first,
    c_scale,
    rows,
    columns,
    floor,
):
    """A tile of two whole vectors of columns. Arrays are contiguous; starts are elements."""
    sig = types.none(
        a,
        a_start,
        a_rows,
        a_first,
        a_scale,
        a_inner,
        inner,
        a_outer,
        outer,
        b,
        b_start,
        b_inner,
        b_outer,
        d,
        d_start,
        d_scale,
        c,
        c_start,
        c_rows,
        c_first,
        c_scale,
        rows,
        columns,
        floor,
    )

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return _emit_tile(context, builder, sig, args, 2, False)

    return sig, codegen


@intrinsic
def narrow_tile(  # type: ignore[no-untyped-def]
    typingctx,
    a,
    a_start,
    a_rows,
    a_first,
    a_scale,
    a_inner,
    inner,
    a_outer,
    outer,
    b,
    b_start,
    b_inner,
    b_outer,
    d,
    d_start,
    d_scale,
    c,
    c_start,
    c_rows,
    c_first,
    c_scale,
    rows,
    columns,
    floor,
):
    """A tile of one vector, of which `columns` columns exist."""
    sig = types.none(
        a,
        a_start,
        a_rows,
        a_first,
        a_scale,
        a_inner,
        inner,
        a_outer,
        outer,
        b,
        b_start,
        b_inner,
        b_outer,
        d,
        d_start,
        d_scale,
        c,
        c_start,
        c_rows,
        c_first,
        c_scale,
        rows,
        columns,
        floor,
    )

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return _emit_tile(context, builder, sig, args, 1, True)

    return sig, codegen


@intrinsic
def vector_width(typingctx):  # type: ignore[no-untyped-def]
    """Elements of a vector, a constant of the compiled code."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return ir.Constant(_I64, compiled_registers().width)

    return types.int64(), codegen


@intrinsic
def tile_rows(typingctx):  # type: ignore[no-untyped-def]
    """Rows of a tile, a constant of the compiled code."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return ir.Constant(_I64, compiled_registers().rows)

    return types.int64(), codegen


@inlined
def multiply(  # type: ignore[no-untyped-def]
    a,
    a_start,
    a_rows,
    a_first,
    a_scale,
    a_inner,
    inner,
    a_outer,
    outer,
    b,
    b_start,
    b_inner,
    b_outer,
    d,
    d_start,
    d_scale,
    c,
    c_start,
    c_rows,
    c_first,
    c_scale,
    rows,
    columns,
    floor,
):
    """All tiles of a product with any number of rows and columns; the module says of what."""
    height, width = tile_rows(), vector_width()
    k = 0
    while k + 2 * width <= columns:
        for m in range(0, rows, height):
            wide_tile(
                a,
                a_start,
                a_rows,
                a_first + m,
                a_scale,
                a_inner,
                inner,
                a_outer,
                outer,
                b,
                b_start + k,
                b_inner,
                b_outer,
                d,
                d_start + k,
                d_scale,
                c,
                c_start + k,
                c_rows,
                c_first + m,
                c_scale,
                rows - m,
                2 * width,
                floor,
            )
        k += 2 * width
    while k < columns:
        for m in range(0, rows, height):
            narrow_tile(
                a,
                a_start,
                a_rows,
                a_first + m,
                a_scale,
                a_inner,
                inner,
                a_outer,
                outer,
                b,
                b_start + k,
                b_inner,
                b_outer,
                d,
                d_start + k,
                d_scale,
                c,
                c_start + k,
                c_rows,
                c_first + m,
                c_scale,
                rows - m,
                min(width, columns - k),
                floor,
            )
        k += width
