"""The one place that multiplies: a register tile of a matrix product.

Every convolution and every matrix product of the backend is a loop over tiles of

    C[m, k] = max(floor, D[m, k] + Σ_t A[m, t] · B[t, k])

for a few rows m and one or two vectors of columns k. The sums of a tile stay in registers until
they are complete. A is read one element at a time and broadcast, B is read by vectors:

- A[m, t] lies at ``a + a_rows[m] · a_row + a_steps[t] · a_step``;
- B[t, k] at ``b + t · b_step + k``;
- C[m, k] at ``c + c_rows[m] · c_row + k``, and D likewise with ``d`` and ``d_row``: D is a bias
  when ``d_row`` is 0, what C held before when it is ``c_row``, and zero when it is negative.

The offsets of rows and steps come from tables. So a convolution needs no copy of its input's
patches: with pixels as rows and filter elements (r, s, c) as steps A is the input's patches, with
the two tables swapped it is their transpose. All are arguments at run time, and layers of every
shape share the same few machine functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.backends.numba.vector import (
    F32,
    F32P,
    I32P,
    I64,
    Writer,
    compiled_registers,
    flatten_arguments,
)

_ARGUMENTS = {
    "a": F32P,
    "a_rows": I32P,
    "a_row": I64,
    "a_steps": I32P,
    "a_step": I64,
    "b": F32P,
    "b_step": I64,
    "d": F32P,
    "d_row": I64,
    "c": F32P,
    "c_rows": I32P,
    "c_row": I64,
    "rows": I64,
    "steps": I64,
    "columns": I64,
    "floor": F32,
}


class _Tile(Writer):
    """One tile of at most `height` rows and `vectors` vectors.

    Under `masked`, only the first ``columns`` columns exist, which end inside the last vector.
    """

    def __init__(
        self, module: ir.Module, width: int, height: int, vectors: int, masked: bool
    ) -> None:
        self.height, self.vectors, self.masked = height, vectors, masked
        name = f"dptrain_tile_{height}x{vectors}x{width}{'_masked' if masked else ''}"
        super().__init__(module, name, _ARGUMENTS, width)

    def write(self) -> None:
        if self.masked:
            before = I64((self.vectors - 1) * self.width)
            self.mask_after(self.builder.sub(self.args["columns"], before))
        self._finish(self._sum())

    def _columns(self, pointer: ir.Value) -> list[tuple[ir.Value, bool]]:
        """Where each vector of columns lies, and whether it is masked."""
        return [
            (self.at(pointer, I64(v * self.width)), self.masked and v == self.vectors - 1)
            for v in range(self.vectors)
        ]

    def _entry(self, table: str, index: ir.Value, scale: str) -> ir.Value:
        """Offset that a table gives."""
        entry = self.builder.load(self.at(self.args[table], index))
        return self.builder.mul(self.builder.sext(entry, I64), self.args[scale])

    def _sum(self) -> Sequence[ir.Value]:
        b, args = self.builder, self.args
        rows = []
        for m in range(self.height):
            # Rows beyond the last repeat the first, whose memory exists.
            exists = b.icmp_signed("<", I64(m), args["rows"])
            index = b.select(exists, I64(m), I64(0))
            rows.append(self.at(args["a"], self._entry("a_rows", index, "a_row")))

        def step(t: ir.Value, state: Sequence[ir.Value]) -> Sequence[ir.Value]:
            pointer, offset, *sums = state
            columns = [self.load(place, masked=masked) for place, masked in self._columns(pointer)]
            following = b.add(t, I64(1))
            following = b.select(b.icmp_signed("<", following, args["steps"]), following, t)
            new = [self.at(pointer, args["b_step"]), self._entry("a_steps", following, "a_step")]
            for m, row in enumerate(rows):
                element = self.splat(b.load(self.at(row, offset), align=4))
                for v, column in enumerate(columns):
                    new.append(self.multiply_add(element, column, sums[m * self.vectors + v]))
            return new

        zeros = [self.zero] * (self.height * self.vectors)
        return self.loop(
            I64(0),
            args["steps"],
            [args["b"], self._entry("a_steps", I64(0), "a_step"), *zeros],
            step,
        )[2:]

    def _finish(self, sums: Sequence[ir.Value]) -> None:
        """Add D, apply the floor, store the rows that exist."""
        b, args = self.builder, self.args
        kind = ir.ArrayType(F32, self.vectors * self.width)
        zeros = ir.GlobalVariable(self.module, kind, f"{self.function.name}_zeros")
        zeros.linkage, zeros.global_constant = "internal", True
        zeros.initializer = ir.Constant(kind, None)
        nothing = b.icmp_signed("<", args["d_row"], I64(0))
        d = b.select(nothing, b.bitcast(zeros, F32P), args["d"])
        d_row = b.select(nothing, I64(0), args["d_row"])
        floor = self.splat(args["floor"])
        for m in range(self.height):
            with b.if_then(b.icmp_signed("<", I64(m), args["rows"]), likely=True):
                entry = b.sext(b.load(self.at(args["c_rows"], I64(m))), I64)
                addends = self._columns(self.at(d, b.mul(entry, d_row)))
                targets = self._columns(self.at(args["c"], b.mul(entry, args["c_row"])))
                for v, ((addend, masked), (target, _)) in enumerate(
                    zip(addends, targets, strict=True)
                ):
                    value = b.fadd(sums[m * self.vectors + v], self.load(addend, masked=masked))
                    # Written so that a NaN passes: it must reach the loss to be noticed.
                    value = b.select(b.fcmp_ordered("<", value, floor), floor, value)
                    self.store(value, target, masked)


class _Product(Writer):
    """All tiles of a product: columns outside, so that a panel of B stays in cache."""

    def __init__(self, module: ir.Module) -> None:
        self.registers = compiled_registers()
        super().__init__(module, "dptrain_product", _ARGUMENTS, self.registers.width)

    def write(self) -> None:
        b, args, width = self.builder, self.args, self.registers.width
        wide = b.mul(b.sdiv(args["columns"], I64(2 * width)), I64(2 * width))

        def panels(start: ir.Value, stop: ir.Value, vectors: int) -> None:
            def panel(k: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
                def tile(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
                    self._tile(k, m, vectors)
                    return []

                self.loop(I64(0), args["rows"], [], tile, step=self.registers.heights[0])
                return []

            self.loop(start, stop, [], panel, step=vectors * width)

        panels(I64(0), wide, 2)
        panels(wide, args["columns"], 1)

    def _tile(self, k: ir.Value, m: ir.Value, vectors: int) -> None:
        """Call the lowest tile that holds the rows that are left."""
        b = self.builder
        moved = dict(self.args)
        for name in ("b", "d", "c"):
            moved[name] = self.at(moved[name], k)
        for name in ("a_rows", "c_rows"):
            moved[name] = self.at(moved[name], m)
        moved["rows"] = b.sub(moved["rows"], m)
        moved["columns"] = b.sub(moved["columns"], k)

        def call(heights: Sequence[int]) -> None:
            if len(heights) == 1:
                tile = _Tile(self.module, self.width, heights[0], vectors, masked=vectors == 1)
                b.call(tile.function, list(moved.values()))
                return
            with b.if_else(b.icmp_signed(">", moved["rows"], I64(heights[1]))) as (high, low):
                with high:
                    call(heights[:1])
                with low:
                    call(heights[1:])

        call(self.registers.heights)


@intrinsic
def multiply(typingctx, a, a_rows, a_steps, b, d, c, c_rows, shape, floor):  # type: ignore[no-untyped-def]
    """A product with any number of rows, steps and columns; the module says of what.

    Args:
        a, c: (contiguous array, start).
        a_rows, a_steps, c_rows: (table, first entry, multiplier).
        b, d: (contiguous array, start, distance of steps or rows).
        shape: (rows, steps, columns).
        floor: float32.
    """
    sig = types.none(a, a_rows, a_steps, b, d, c, c_rows, shape, floor)

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kinds = [kind for group in sig.args[:-1] for kind in group.types]
        values = [v for group in args[:-1] for v in cgutils.unpack_tuple(builder, group)]
        flat = flatten_arguments(context, builder, [*kinds, sig.args[-1]], [*values, args[-1]])
        builder.call(_Product(builder.module).function, flat)
        return context.get_dummy_value()

    return sig, codegen
