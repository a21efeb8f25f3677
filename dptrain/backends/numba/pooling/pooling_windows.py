"""Maximum of pooling windows for each channel, and its gradient.

Both functions process consecutive windows of one row. The pixels in rows `first` to `last` and
columns `begin` to `end` of these windows exist. Pixel (i, j) of window p and channel q is at
``map + i · row + (p · across + j) · pitch + q``, the window's result at ``p · pitch + q``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from dptrain.backends.numba.vector import (
    F32,
    F32P,
    I8,
    I8P,
    I32,
    I64,
    Writer,
    as_intrinsic,
    compiled_registers,
)

NO_GRADIENT = 255
"""Position of windows without a positive element."""

_SHAPE = dict.fromkeys(
    ("first", "last", "begin", "end", "width", "row", "across", "channels", "windows", "pitch"), I64
)


class _Windows(Writer):
    """A loop over windows and vectors of channels.

    Args:
        size: height and width of complete windows; None for a size that is passed at run time.
        masked: False for whole vectors of channels, True for the channels after them.
    """

    name: str
    arrays: dict[str, ir.Type]
    sides: tuple[int, ...]
    """Sizes of square windows that have unrolled code."""

    def __init__(
        self, module: ir.Module, width: int, size: tuple[int, int] | None, masked: bool
    ) -> None:
        self.size, self.masked = size, masked
        suffix = "" if size is None else f"_{size[0]}x{size[1]}"
        suffix += "_masked" if masked else ""
        arguments = {**self.arrays, **_SHAPE}
        super().__init__(module, f"dptrain_{self.name}{suffix}_x{width}", arguments, width)

    def write(self) -> None:
        b, args = self.builder, self.args
        vectors = I64(self.width)
        whole = b.mul(b.sdiv(args["channels"], vectors), vectors)

        def vector(q: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            def window(p: ir.Value, state: Sequence[ir.Value]) -> Sequence[ir.Value]:
                pooled = b.mul(p, args["pitch"])
                corner = b.mul(pooled, args["across"])
                return self.window(b.add(pooled, q), b.add(corner, q), state)

            self.finish(q, self.loop(I64(0), args["windows"], self.begin(q), window))
            return []

        if self.masked:
            self.mask_after(b.sub(args["channels"], whole))
            vector(whole, [])
        else:
            self.loop(I64(0), whole, [], vector, step=self.width)

    def read(self, pointer: ir.Value, offset: ir.Value, kind: ir.Type = F32) -> ir.Value:
        """Load a vector of channels."""
        return self.load(self.at(pointer, offset), kind, self.masked)

    def begin(self, channel: ir.Value) -> Sequence[ir.Value]:
        """Return the initial state of the loop over the windows of a vector of channels."""
        return []

    def finish(self, channel: ir.Value, state: Sequence[ir.Value]) -> None:
        """Store the final state."""

    def pixels(self, corner: ir.Value, state: Sequence[ir.Value], body: Any) -> list[ir.Value]:
        """Run ``body(offset in the map, position in the window, state)`` for a window's pixels."""
        b, args = self.builder, self.args
        if self.size is not None:
            for i in range(self.size[0]):
                for j in range(self.size[1]):
                    down, across = b.mul(I64(i), args["row"]), b.mul(I64(j), args["pitch"])
                    offset = b.add(corner, b.add(down, across))
                    state = body(offset, I32(i * self.size[1] + j), state)
            return list(state)

        def row(i: ir.Value, state: Sequence[ir.Value]) -> Sequence[ir.Value]:
            def pixel(j: ir.Value, state: Sequence[ir.Value]) -> Sequence[ir.Value]:
                down, across = b.mul(i, args["row"]), b.mul(j, args["pitch"])
                offset = b.add(corner, b.add(down, across))
                position = b.trunc(b.add(b.mul(i, args["width"]), j), I32)
                result: Sequence[ir.Value] = body(offset, position, state)
                return result

            return self.loop(args["begin"], args["end"], state, pixel)

        return self.loop(args["first"], args["last"], state, row)

    def window(
        self, pooled: ir.Value, corner: ir.Value, state: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """Process one window for a vector of channels and return the new state."""
        raise NotImplementedError


def initial_maximum(writer: Writer) -> list[ir.Value]:
    """Return the maximum of no elements, which is 0, and its position."""
    lanes = ir.VectorType(I32, writer.width)
    return [writer.zero, ir.Constant(lanes, [NO_GRADIENT] * writer.width)]


def larger(
    writer: Writer, value: ir.Value, position: ir.Value, state: Sequence[ir.Value]
) -> list[ir.Value]:
    """Return the maximum and its position after one more element."""
    b, (best, where) = writer.builder, state
    # A NaN is kept, because it has to reach the loss to be detected.
    better = b.or_(b.fcmp_ordered(">", value, best), b.fcmp_unordered("uno", value, value))
    return [b.select(better, value, best), b.select(better, writer.splat(position), where)]


def positive_maximum(
    writer: Writer, values: Sequence[ir.Value], kind: ir.Type, bias: ir.Value | None = None
) -> tuple[ir.Value, ir.Value]:
    """Return the maximum of the four pixels of a window, and its position.

    The maximum is 0 and has the position `NO_GRADIENT` if it is not positive; the first of equal
    pixels counts. All are compared at once, which needs fewer steps in a row than `larger`.

    Args:
        writer: of the function.
        values: vectors of the pixels.
        kind: integer type of the position.
        bias: is added to the maximum.
    """
    b = writer.builder

    def at(number: int) -> ir.Value:
        return ir.Constant(ir.VectorType(kind, writer.width), [number] * writer.width)

    def greater(x: ir.Value, y: ir.Value) -> ir.Value:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    largest = greater(greater(*values[:2]), greater(*values[2:]))
    position = at(len(values) - 1)
    for i, value in reversed(list(enumerate(values[:-1]))):
        position = b.select(b.fcmp_ordered("==", value, largest), at(i), position)
    # A NaN is kept, because it has to reach the loss to be detected.
    lost = b.or_(*(b.fcmp_unordered("uno", *values[i : i + 2]) for i in (0, 2)))
    largest = b.select(lost, ir.Constant(writer.vector, [float("nan")] * writer.width), largest)
    if bias is not None:
        largest = b.fadd(largest, bias)
    dead = b.fcmp_ordered("<=", largest, writer.zero)
    return b.select(dead, writer.zero, largest), b.select(dead, at(NO_GRADIENT), position)


def store_maximum(
    writer: Writer,
    state: Sequence[ir.Value],
    largest: ir.Value,
    position: ir.Value,
    masked: bool,
) -> None:
    """Store a maximum and its position."""
    writer.store(state[0], largest, masked)
    bytes_ = ir.VectorType(I8, writer.width)
    writer.store(writer.builder.trunc(state[1], bytes_), position, masked)


class _Maximum(_Windows):
    name = "maximum"
    sides = (2, 3)
    arrays = {"map": F32P, "largest": F32P, "position": I8P}  # noqa: RUF012

    def window(
        self, pooled: ir.Value, corner: ir.Value, state: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        args = self.args

        def pixel(
            offset: ir.Value, position: ir.Value, state: Sequence[ir.Value]
        ) -> Sequence[ir.Value]:
            return larger(self, self.read(args["map"], offset), position, state)

        best = self.pixels(corner, initial_maximum(self), pixel)
        targets = self.at(args["largest"], pooled), self.at(args["position"], pooled)
        store_maximum(self, best, *targets, self.masked)
        return state


class _Scatter(_Windows):
    name = "scatter"
    sides = (2,)
    arrays = {  # noqa: RUF012
        "map": F32P,
        "gradient": F32P,
        "position": I8P,
        "sums": F32P,
        "add": I64,
    }

    def begin(self, channel: ir.Value) -> Sequence[ir.Value]:
        return [self.read(self.args["sums"], channel)]

    def finish(self, channel: ir.Value, state: Sequence[ir.Value]) -> None:
        self.store(state[0], self.at(self.args["sums"], channel), self.masked)

    def window(
        self, pooled: ir.Value, corner: ir.Value, state: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        b, args = self.builder, self.args
        lanes = ir.VectorType(I32, self.width)
        where = b.zext(self.read(args["position"], pooled, I8), lanes)
        gradient = self.read(args["gradient"], pooled)
        exists = b.icmp_unsigned("!=", where, ir.Constant(lanes, [NO_GRADIENT] * self.width))
        total = b.fadd(state[0], b.select(exists, gradient, self.zero))
        adding = b.icmp_signed("!=", args["add"], I64(0))

        def pixel(
            offset: ir.Value, position: ir.Value, state: Sequence[ir.Value]
        ) -> Sequence[ir.Value]:
            chosen = b.icmp_unsigned("==", where, self.splat(position))
            value, target = b.select(chosen, gradient, self.zero), self.at(args["map"], offset)
            if self.size is None:
                before = self.read(args["map"], offset)
                value = b.select(adding, b.fadd(value, before), value)
            self.store(value, target, self.masked)
            return []

        self.pixels(corner, [], pixel)
        return [total]


def _windows(writer: type[_Windows]) -> Any:
    """Return the function for whole vectors of channels and then for the remaining channels.

    Complete windows of a usual size have unrolled code: 2 × 2 pooling became three times as fast.
    """
    arguments = {**writer.arrays, **_SHAPE}

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        by_name, width = dict(zip(arguments, args, strict=True)), compiled_registers().width
        left = builder.srem(by_name["channels"], I64(width))

        def call_size(size: tuple[int, int] | None) -> None:
            builder.call(writer(builder.module, width, size, False).function, args)
            with builder.if_then(builder.icmp_signed("!=", left, I64(0)), likely=False):
                builder.call(writer(builder.module, width, size, True).function, args)

        def call(sides: Sequence[int]) -> None:
            if not sides:
                call_size(None)
                return
            side = sides[0]
            wanted = {"first": 0, "last": side, "begin": 0, "end": side, "width": side}
            if "add" in by_name:
                wanted["add"] = 0
            usual = ir.IntType(1)(1)
            for name, value in wanted.items():
                usual = builder.and_(usual, builder.icmp_signed("==", by_name[name], I64(value)))
            with builder.if_else(usual, likely=True) as (unrolled, others):
                with unrolled:
                    call_size((side, side))
                with others:
                    call(sides[1:])

        call(writer.sides)

    return as_intrinsic(arguments, emit)


maximum_of_windows = _windows(_Maximum)
"""Store the largest positive element of each window and its position, or 0, `NO_GRADIENT`."""

scatter_to_windows = _windows(_Scatter)
"""Store the gradient of each window at its position, and 0 at the other elements.

If `add` is nonzero, the gradient is added to the previous values. `sums` receives the sum of the
gradients that have a position.
"""
