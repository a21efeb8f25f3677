"""Local response normalisation; items are pixels, arrays are (N·H·W, C).

Pixels are processed in tiles, in several passes over rows that stay in the L1 cache: first the
squares, then powers of their sums over windows of channels. Zeros before and after the channels of
each pixel make all windows equally long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from dptrain.backends.numba.vector import (
    AVX512,
    F32,
    F32P,
    I64,
    Writer,
    as_intrinsic,
    compiled_registers,
)
from dptrain.native.jit import Items, inlined, kernel

Array = NDArray[Any]

ROWS = ("squares", "terms", "kept")
"""Rows of scratch memory: x², dy x s^(−beta−1), dy s^−beta."""

TILE = 1024
"""Approximate elements of a row: three rows of them fit the L1 cache."""

LANES = AVX512.width
"""Elements of the widest vector, to multiples of which channels and zeros are padded."""


def _filled(count: int) -> int:
    """Return `count` rounded up to whole vectors."""
    return -(-count // LANES) * LANES


def scratch_shape(threads: int, channels: int, radius: int) -> tuple[int, int, int]:
    """Return (threads, rows, elements of a row with zeros and one more vector at both ends)."""
    zeros = _filled(radius)
    width = _filled(channels) + zeros
    return threads, len(ROWS), max(1, TILE // width) * width + zeros + 2 * LANES


class _Pass(Writer):
    """A loop over pixels and vectors of channels.

    The pixel stride is `channels` in the arrays of a layer and `stride` in the rows of scratch.
    """

    name: ClassVar[str]
    arguments: ClassVar[Mapping[str, ir.Type]]
    shape: ClassVar[Mapping[str, ir.Type]] = {
        "pixels": I64,
        "channels": I64,
        "stride": I64,
        "radius": I64,
    }

    def __init__(self, module: ir.Module, width: int, usual: bool) -> None:
        self.usual = usual
        name = f"dptrain_lrn_{self.name}{'' if usual else '_any'}_x{width}"
        super().__init__(module, name, {**self.arguments, **self.shape}, width)

    def write(self) -> None:
        b, args = self.builder, self.args
        rest = b.srem(args["channels"], I64(self.width))
        whole = b.sub(args["channels"], rest)
        self.mask_after(rest)

        def pixel(p: ir.Value, _: Any) -> list[ir.Value]:
            layer, row = b.mul(p, args["channels"]), b.mul(p, args["stride"])

            def vector(q: ir.Value, _: Any) -> list[ir.Value]:
                self.compute(b.add(layer, q), b.add(row, q), masked=False)
                return []

            self.loop(I64(0), whole, [], vector, step=self.width)
            with b.if_then(b.icmp_signed("!=", rest, I64(0)), likely=False):
                self.compute(b.add(layer, whole), b.add(row, whole), masked=True)
            return []

        self.loop(I64(0), args["pixels"], [], pixel)

    def compute(self, layer: ir.Value, row: ir.Value, masked: bool) -> None:
        """Compute one vector: offset `layer` in the layer's arrays, offset `row` in the rows."""
        raise NotImplementedError

    def get(self, name: str, offset: ir.Value, masked: bool = False) -> ir.Value:
        """Load the vector at an offset of an array."""
        return self.load(self.at(self.args[name], offset), masked=masked)

    def put(self, value: ir.Value, name: str, offset: ir.Value, masked: bool = False) -> None:
        """Store a vector at an offset of an array."""
        self.store(value, self.at(self.args[name], offset), masked=masked)

    def window(self, name: str, row: ir.Value) -> ir.Value:
        """Return the sums of a row over windows of channels."""
        b = self.builder

        def add(i: ir.Value, state: Any) -> list[ir.Value]:
            return [b.fadd(state[0], self.get(name, b.add(row, i)))]

        radius = self.args["radius"]
        return self.loop(b.neg(radius), b.add(radius, I64(1)), [self.zero], add)[0]

    def constant(self, value: float) -> ir.Value:
        """Return a vector of equal numbers."""
        return ir.Constant(self.vector, [value] * self.width)


class _Squares(_Pass):
    """Squares = x²."""

    name = "squares"
    arguments: ClassVar[Mapping[str, ir.Type]] = {"x": F32P, "squares": F32P}

    def compute(self, layer: ir.Value, row: ir.Value, masked: bool) -> None:
        x = self.get("x", layer, masked)
        self.put(self.builder.fmul(x, x), "squares", row)


class _Powers(_Pass):
    """A pass that computes powers of s = bias + alpha · Σ x²."""

    def powers(self, sums: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return s^−beta and 1 / s."""
        b, args, one = self.builder, self.args, self.constant(1.0)
        s = self.multiply_add(self.splat(args["alpha"]), sums, self.splat(args["bias"]))
        if not self.usual:
            exponent = b.fneg(self.splat(args["beta"]))
            return self.call("llvm.pow", self.vector, s, exponent), b.fdiv(one, s)
        if self.width == AVX512.width:
            return self.three_quarters(s)
        root = b.fdiv(one, self.call("llvm.sqrt", self.vector, s))
        return b.fmul(root, self.call("llvm.sqrt", self.vector, root)), b.fmul(root, root)

    def three_quarters(self, s: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return s^−¾ and 1 / s in a third of the time of a division and two square roots.

        The processor's estimates r of s^−½ and u of r^−½ have a relative error below 2^−14. With
        d = 1 − s r² and e = 1 − r u², s^−¾ = r² u (1 − d)^−¾ (1 − e)^−½ and
        1 / s = r² (1 − d)^−1. The first-order terms of these series suffice: the following ones
        are below 2e-8.
        """
        b, one = self.builder, self.constant(1.0)
        r = self.estimate(s)
        u = self.estimate(r)
        d = self.multiply_add(b.fneg(b.fmul(s, r)), r, one)
        v = b.fmul(r, u)
        e = self.multiply_add(b.fneg(v), u, one)
        power, inverse = b.fmul(r, v), b.fmul(r, r)
        change = self.multiply_add(d, self.constant(0.75), b.fmul(e, self.constant(0.5)))
        # An infinite s makes d NaN, so it is replaced; negative numbers and NaN result in NaN.
        finite = b.fcmp_unordered("!=", s, self.constant(float("inf")))
        power = b.select(finite, self.multiply_add(power, change, power), self.zero)
        return power, b.select(finite, self.multiply_add(inverse, d, inverse), self.zero)

    def estimate(self, x: ir.Value) -> ir.Value:
        """Return 1 / √x with a relative error of at most 2^−14."""
        kind = ir.FunctionType(self.vector, [self.vector, self.vector, ir.IntType(16)])
        function = cgutils.get_or_insert_function(
            self.module, kind, "llvm.x86.avx512.rsqrt14.ps.512"
        )
        return self.builder.call(function, [x, self.zero, ir.IntType(16)(-1)])


class _Forward(_Powers):
    """y = x · s^−beta."""

    name = "forward"
    arguments: ClassVar[Mapping[str, ir.Type]] = {
        "x": F32P,
        "squares": F32P,
        "y": F32P,
        "bias": F32,
        "alpha": F32,
        "beta": F32,
    }

    def compute(self, layer: ir.Value, row: ir.Value, masked: bool) -> None:
        power, _ = self.powers(self.window("squares", row))
        self.put(self.builder.fmul(self.get("x", layer, masked), power), "y", layer, masked)


class _Terms(_Powers):
    """Terms = dy x s^(−beta−1) and kept = dy s^−beta."""

    name = "terms"
    arguments: ClassVar[Mapping[str, ir.Type]] = {
        "x": F32P,
        "dy": F32P,
        "squares": F32P,
        "kept": F32P,
        "terms": F32P,
        "bias": F32,
        "alpha": F32,
        "beta": F32,
    }

    def compute(self, layer: ir.Value, row: ir.Value, masked: bool) -> None:
        b = self.builder
        power, inverse = self.powers(self.window("squares", row))
        kept = b.fmul(self.get("dy", layer, masked), power)
        self.put(kept, "kept", row)
        term = b.fmul(kept, b.fmul(self.get("x", layer, masked), inverse))
        self.put(term, "terms", row)


class _Gradient(_Pass):
    """dx = kept − shared · x · Σ terms."""

    name = "gradient"
    arguments: ClassVar[Mapping[str, ir.Type]] = {
        "x": F32P,
        "kept": F32P,
        "terms": F32P,
        "dx": F32P,
        "shared": F32,
    }

    def compute(self, layer: ir.Value, row: ir.Value, masked: bool) -> None:
        b = self.builder
        factor = b.fmul(b.fneg(self.splat(self.args["shared"])), self.get("x", layer, masked))
        dx = self.multiply_add(factor, self.window("terms", row), self.get("kept", row))
        self.put(dx, "dx", layer, masked)


class _Calls:
    """Call passes on a tile, with arguments selected by name.

    Args:
        values: numbers and pointers by name. `rows` is the address of the first pixel in the first
            row, and `length` is the row stride.
    """

    def __init__(self, builder: ir.IRBuilder, values: Mapping[str, ir.Value]) -> None:
        self.builder, self.values = builder, dict(values)
        for index, row in enumerate(ROWS):
            start = builder.mul(I64(index), values["length"])
            self.values[row] = builder.gep(values["rows"], [start])

    def run(self, passes: Sequence[type[_Pass]]) -> None:
        """Call the passes one after the other."""
        usual = self.builder.fcmp_ordered("==", self.values["beta"], F32(0.75))
        for kind in passes:
            self._choose(usual, kind)

    def _choose(self, usual: ir.Value, kind: type[_Pass]) -> None:
        with self.builder.if_else(usual) as (then, otherwise):
            with then:
                self._call(kind, True)
            with otherwise:
                self._call(kind, False)

    def _call(self, kind: type[_Pass], usual: bool) -> None:
        function = kind(self.builder.module, compiled_registers().width, usual).function
        self.builder.call(function, [self.values[n] for n in (*kind.arguments, *kind.shape)])


_NUMBERS = ("pixels", "channels", "stride", "radius", "bias", "alpha", "beta")


def _passes(arrays: Sequence[str], sizes: Sequence[str], passes: Sequence[type[_Pass]]) -> Any:
    """Return the function that runs passes over a tile of pixels."""
    # The types of numbers do not matter here.
    arguments = {**dict.fromkeys(arrays, F32P), **dict.fromkeys((*sizes, *_NUMBERS), I64)}

    def emit(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
        _Calls(builder, dict(zip(arguments, flat, strict=True))).run(passes)

    return as_intrinsic(arguments, emit)


_normalise = _passes(("x", "y", "rows"), ("length",), (_Squares, _Forward))
"""Compute y of a tile of pixels."""

_differentiate = _passes(
    ("x", "dy", "dx", "rows"),
    ("length", "shared"),
    (_Squares, _Terms, _Gradient),
)
"""Compute dx of a tile of pixels."""


@inlined
def _tile(scratch: Array, thread: int, channels: int, radius: int) -> Any:
    """Return the first pixel's start, the row stride, the pixel stride and the tile's pixels."""
    zeros = -(-radius // LANES) * LANES
    length, stride = scratch.shape[2], -(-channels // LANES) * LANES + zeros
    for i in range(length):
        scratch[thread, 0, i] = scratch[thread, 1, i] = 0.0
    start = thread * scratch.shape[1] * length + LANES + zeros
    return start, length, stride, (length - zeros - 2 * LANES) // stride


Formula = tuple[int, float, float, float]
"""Radius of the neighbourhood, bias, alpha and beta."""


@kernel
def lrn_forward(items: Items, x: Array, y: Array, scratch: Array, formula: Formula) -> None:
    """Compute y = x · s^−beta with s = bias + alpha · Σ x² over neighbouring channels."""
    radius, bias, alpha, beta = formula
    channels, rows, x_flat, y_flat = x.shape[1], scratch.reshape(-1), x.reshape(-1), y.reshape(-1)
    origin, length, stride, tile = _tile(scratch, items.thread, channels, radius)
    for first in range(items.start, items.stop, tile):
        at = first * channels
        _normalise(
            *(x_flat, at, y_flat, at, rows, origin, length),
            *(min(tile, items.stop - first), channels, stride, radius, bias, alpha, beta),
        )


@kernel
def lrn_backward(
    items: Items, x: Array, dy: Array, dx: Array, scratch: Array, formula: Formula
) -> None:
    """Compute dx = dy s^−β − 2αβ x Σ dy x s^(−β−1), with the sum over neighbouring channels.

    s is computed again from x, which takes less time than loading stored values.
    """
    radius, bias, alpha, beta = formula
    channels, rows = x.shape[1], scratch.reshape(-1)
    x_flat, dy_flat, dx_flat = x.reshape(-1), dy.reshape(-1), dx.reshape(-1)
    origin, length, stride, tile = _tile(scratch, items.thread, channels, radius)
    for first in range(items.start, items.stop, tile):
        at = first * channels
        _differentiate(
            *(x_flat, at, dy_flat, at, dx_flat, at),
            *(rows, origin, length, 2.0 * alpha * beta),
            *(min(tile, items.stop - first), channels, stride, radius, bias, alpha, beta),
        )
