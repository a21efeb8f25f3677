"""GEMV: one vector times a matrix, the forward pass of a dense layer for a single sample.

Each matrix element is used once, so memory bandwidth limits the speed. Rows are read sequentially
with prefetches, and the sums stay in registers. 36864 inputs and 128 outputs take 0.35 instead of
0.69 ms (EPYC, matrix in the L3 cache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llvmlite import ir

from dptrain.backends.numba.vector import (
    AVX512,
    F32,
    F32P,
    I64,
    LINE,
    Writer,
    as_intrinsic,
    call_of,
)

AHEAD = 1024
"""Distance in elements from the current reads to the prefetches."""


def panel_sizes(width: int) -> tuple[int, ...]:
    """Return the numbers of vectors of sums of a panel, as many as fit the vector registers.

    Wide panels read long parts of rows: 2304 inputs and 384 outputs, which exceed the L2 cache,
    take 76 µs with 24 vectors and 89 µs with 8 (Intel Xeon, AVX-512, minimum of 40).
    """
    small = tuple(range(1, 9))
    return (*small, 12, 16, 24) if width == AVX512.width else (*small, 12)


_ARGUMENTS: Mapping[str, ir.Type] = {
    "x": F32P,
    "w": F32P,
    "d": F32P,
    "y": F32P,
    "inputs": I64,
    "outputs": I64,
    "columns": I64,
    "lower_bound": F32,
}


class _Panel(Writer):
    """y = max(lower_bound, d + x w) for some columns of w, whose rows have ``outputs`` elements.

    Args:
        vectors: vectors of sums.
        masked: number of vectors, the last ones, that ``columns`` may not fill.
    """

    def __init__(self, module: ir.Module, width: int, vectors: int, masked: int) -> None:
        self.vectors, self.masked = vectors, masked
        super().__init__(module, f"dptrain_gemv_{vectors}x{width}", _ARGUMENTS, width)

    def write(self) -> None:
        b, args = self.builder, self.args
        whole = self.vectors - self.masked
        masks: list[ir.Value | None] = [None] * whole
        for v in range(whole, self.vectors):
            self.mask_after(b.sub(args["columns"], I64(v * self.width)))
            masks.append(self.mask)

        def vectors(pointer: ir.Value) -> list[ir.Value]:
            loaded = []
            for v, self.mask in enumerate(masks):
                address = self.at(pointer, I64(v * self.width))
                loaded.append(self.load(address, masked=self.mask is not None))
            return loaded

        def row(i: ir.Value, sums: Sequence[ir.Value]) -> Sequence[ir.Value]:
            x = self.splat(b.load(self.at(args["x"], i), align=4))
            w = self.at(args["w"], b.mul(i, args["outputs"]))
            for line in range(0, self.vectors * self.width, LINE):
                self.prefetch(self.at(w, I64(AHEAD + line)), cache=1)
            return [
                self.multiply_add(x, element, total)
                for element, total in zip(vectors(w), sums, strict=True)
            ]

        sums = self.loop(I64(0), args["inputs"], [self.zero] * self.vectors, row)
        lower_bound, addends = self.splat(args["lower_bound"]), vectors(args["d"])
        for v, (total, addend, self.mask) in enumerate(zip(sums, addends, masks, strict=True)):
            total = b.fadd(total, addend)
            # This comparison passes NaN through, so that the loss reveals it.
            value = b.select(b.fcmp_ordered("<", total, lower_bound), lower_bound, total)
            address = self.at(args["y"], I64(v * self.width))
            self.store(value, address, masked=self.mask is not None)


class _Row(Writer):
    """y = max(lower_bound, d + x w), in panels of columns of about the same size."""

    def __init__(self, module: ir.Module, width: int) -> None:
        self.sizes = panel_sizes(width)
        super().__init__(module, f"dptrain_gemv_x{width}", _ARGUMENTS, width)

    def write(self) -> None:
        b, columns = self.builder, self.args["columns"]

        def quotient(total: ir.Value, unit: ir.Value) -> ir.Value:
            return b.sdiv(b.add(total, b.sub(unit, I64(1))), unit)

        vectors = quotient(columns, I64(self.width))
        panels = quotient(vectors, I64(self.sizes[-1]))
        step = b.mul(quotient(vectors, panels), I64(self.width))

        def panel(i: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            first = b.mul(i, step)
            left = b.sub(columns, first)
            moved = dict(self.args)
            for name in ("w", "d", "y"):
                moved[name] = self.at(moved[name], first)
            moved["columns"] = b.select(b.icmp_signed("<", left, step), left, step)
            self._call(moved, 0)
            return []

        self.loop(I64(0), panels, [], panel)

    def _call(self, args: Mapping[str, ir.Value], i: int) -> None:
        """Call the smallest panel, from size `i` on, that has the columns."""
        b, size = self.builder, self.sizes[i]
        before = self.sizes[i - 1] if i else 0
        tile = _Panel(self.module, self.width, size, size - before)
        if i == len(self.sizes) - 1:
            b.call(tile.function, list(args.values()))
            return
        fits = b.icmp_signed("<=", args["columns"], I64(size * self.width))
        with b.if_else(fits) as (this, larger):
            with this:
                b.call(tile.function, list(args.values()))
            with larger:
                self._call(args, i + 1)


multiply_row = as_intrinsic(_ARGUMENTS, call_of(_Row))
"""y = max(lower_bound, d + x w) for the first `columns` elements of the rows of w.

x, w (inputs, outputs), d and y are contiguous float32 arrays, each followed by its start. The bits
are those of the register tiles (`microkernels`): products are added one after another to 0, and
their sum to d.
"""
