"""Dropout with the masks of `dptrain.philox`, drawn and applied in one pass.

Forward generates the random numbers of whole vectors of counters and stores one bit per element,
1/32 of the activations' memory. With these bits, backward takes the time of a copy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llvmlite import ir
from numpy.typing import NDArray

from dptrain.backends.numba.vector import (
    F32,
    F32P,
    I8P,
    I32,
    I64,
    Writer,
    as_intrinsic,
    call_of,
)
from dptrain.native.jit import Items, kernel
from dptrain.philox import MULTIPLIERS, ROUNDS, WEYL

Array = NDArray[Any]
Words = tuple[ir.Value, ir.Value, ir.Value, ir.Value]

CHAINS = 4
"""Independent vectors of counters that are computed at the same time to hide instruction latency:
0.44 ns per element; with one vector 0.49 ns."""
ALIGNMENT = 128
"""The elements of a sample are rounded up to a multiple of this; chunks are at most as long."""


class _Masked(Writer):
    """Computes y = x · scale if kept, else x · 0, in chunks of 2 · CHAINS vectors."""

    ARGUMENTS: ClassVar[Mapping[str, ir.Type]] = {
        "x": F32P, "y": F32P, "bits": I8P, "size": I64, "scale": F32,
    }  # fmt: skip
    name: ClassVar[str]

    def __init__(self, module: ir.Module, width: int) -> None:
        self.span = 2 * CHAINS * width
        self.pairs = ir.VectorType(I64, width // 2)
        super().__init__(module, f"dptrain_{self.name}_x{width}", self.ARGUMENTS, width)

    def write(self) -> None:
        b, size = self.builder, self.args["size"]
        self.scale = self.splat(self.args["scale"])
        whole = b.udiv(size, I64(self.span))

        def body(i: ir.Value, _: Any) -> tuple[()]:
            self.chunk(i, None)
            return ()

        self.loop(I64(0), whole, (), body)
        rest = b.urem(size, I64(self.span))
        with b.if_then(b.icmp_signed(">", rest, I64(0))):
            self.chunk(whole, rest)

    def chunk(self, i: ir.Value, rest: ir.Value | None) -> None:
        """Compute chunk i, or its first `rest` elements."""
        b = self.builder
        start, masked = b.mul(i, I64(self.span)), rest is not None
        for first, kept in zip(range(0, self.span, self.width), self.kept(i), strict=True):
            if rest is not None:
                self.mask_after(b.sub(rest, I64(first)))
            offset = b.add(start, I64(first))
            x = self.load(self.at(self.args["x"], offset), masked=masked)
            y = b.fmul(x, b.select(kept, self.scale, self.zero))
            self.store(y, self.at(self.args["y"], offset), masked=masked)

    def bit_addresses(self, i: ir.Value) -> list[ir.Value]:
        """Return the addresses of the bits of chunk i, for each vector or at least each byte."""
        b, size = self.builder, max(self.width // 8, 1)
        start = self.at(self.args["bits"], b.mul(i, I64(self.span // 8)))
        kind = ir.IntType(8 * size).as_pointer()
        return [b.bitcast(self.at(start, I64(j)), kind) for j in range(0, self.span // 8, size)]

    def part(self, mask: ir.Value, lanes: Sequence[int], other: ir.Value | None = None) -> ir.Value:
        """Return the elements `lanes` of a mask, or of two concatenated masks."""
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(mask, other or mask, order)

    @abstractmethod
    def kept(self, i: ir.Value) -> list[ir.Value]:
        """Return the masks of the kept elements of chunk i, one for each vector."""


class _StoredMask(_Masked):
    """Dropout with stored bits."""

    name = "dropout_recall"

    def kept(self, i: ir.Value) -> list[ir.Value]:
        b, kept = self.builder, []
        for address in self.bit_addresses(i):
            bits = b.load(address, align=1)
            mask = b.bitcast(bits, ir.VectorType(ir.IntType(1), bits.type.width))
            for first in range(0, bits.type.width, self.width):
                kept.append(self.part(mask, range(first, first + self.width)))
        return kept


class _NewMask(_Masked):
    """Dropout with new random bits, which are stored.

    Philox multiplies 32-bit words to 64-bit products, so each of the four words of a counter is the
    lower half of a 64-bit element. The upper halves are undefined: products ignore them, and the
    last round stores two words in an element. LLVM moves operations on words that are equal for the
    whole sample out of the loop.
    """

    name = "dropout_draw"
    ARGUMENTS: ClassVar[Mapping[str, ir.Type]] = {
        **_Masked.ARGUMENTS,
        "limit": I64, "sample": I64, "step": I64, "layer": I64, "key0": I64, "key1": I64,
    }  # fmt: skip

    def write(self) -> None:
        b, args, n = self.builder, self.args, self.width // 2
        self.half, self.low = self.constant([32] * n), self.constant([0xFFFFFFFF] * n)
        self.fixed = tuple(self.pair(args[name]) for name in ("sample", "step", "layer"))
        self.keys = [
            tuple(
                self.pair(b.and_(b.add(args[key], I64(r * weyl)), I64(0xFFFFFFFF)))
                for key, weyl in zip(("key0", "key1"), WEYL, strict=True)
            )
            for r in range(ROUNDS)
        ]
        self.limit = self.splat(b.trunc(args["limit"], I32))
        super().write()

    def constant(self, elements: list[int]) -> ir.Constant:
        """Return a constant vector of 64-bit elements."""
        return ir.Constant(self.pairs, elements)

    def pair(self, scalar: ir.Value) -> ir.Value:
        """Return a vector of equal 64-bit elements."""
        b, empty = self.builder, ir.Constant(self.pairs, ir.Undefined)
        lanes = ir.Constant(ir.VectorType(I32, self.width // 2), [0] * (self.width // 2))
        return b.shuffle_vector(b.insert_element(empty, scalar, I32(0)), empty, lanes)

    def kept(self, i: ir.Value) -> list[ir.Value]:
        b, n = self.builder, self.width // 2
        first = b.mul(i, I64(CHAINS * n))
        # Even elements have the first half of the blocks, odd ones the second (see `compared`).
        blocks = [j // 2 + j % 2 * (n // 2) for j in range(n)]
        chains: list[Words] = [
            (b.add(self.pair(first), self.constant([c * n + j for j in blocks])), *self.fixed)
            for c in range(CHAINS)
        ]
        for keys in self.keys[:-1]:
            chains = [self.round(*words, *keys) for words in chains]
        kept = []
        for words in chains:
            kept += self.compared(*self.last_round(*words, *self.keys[-1]))
        masks = kept
        if self.width < 8:
            both = range(2 * self.width)
            masks = [
                self.part(low, both, high) for low, high in zip(kept[::2], kept[1::2], strict=True)
            ]
        for mask, address in zip(masks, self.bit_addresses(i), strict=True):
            b.store(b.bitcast(mask, address.type.pointee), address, align=1)
        return kept

    def compared(self, first: ir.Value, second: ir.Value) -> list[ir.Value]:
        """Return the masks of two vectors of words, in order; pairs interleave within 128 bits."""
        b, n, masks = self.builder, self.width // 2, []
        for odd in range(2):
            lanes = [j + odd - j % 2 + j % 2 * n for j in range(n)]
            four = b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, n), lanes))
            four = b.bitcast(four, ir.VectorType(I32, self.width))
            masks.append(b.icmp_unsigned(">=", four, self.limit))
        return masks

    def products(self, c0: ir.Value, c2: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the 64-bit products of the lower halves and the multipliers."""
        b, n = self.builder, self.width // 2
        first, second = (
            b.mul(b.and_(c, self.low), self.constant([multiplier] * n))
            for c, multiplier in zip((c0, c2), MULTIPLIERS, strict=True)
        )
        return first, second

    def round(
        self, c0: ir.Value, c1: ir.Value, c2: ir.Value, c3: ir.Value, k0: ir.Value, k1: ir.Value
    ) -> Words:
        """Compute one round; the upper halves of the results are undefined."""
        b = self.builder
        p0, p1 = self.products(c0, c2)
        return (
            b.xor(b.lshr(p1, self.half), b.xor(c1, k0)), p1,
            b.xor(b.lshr(p0, self.half), b.xor(c3, k1)), p0,
        )  # fmt: skip

    def last_round(
        self, c0: ir.Value, c1: ir.Value, c2: ir.Value, c3: ir.Value, k0: ir.Value, k1: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Compute the last round; words 0 and 1 share an element, and so do words 2 and 3."""
        b = self.builder
        p0, p1 = self.products(c0, c2)
        swapped = (b.or_(b.lshr(p, self.half), b.shl(p, self.half)) for p in (p1, p0))
        others = (b.xor(b.and_(c, self.low), k) for c, k in ((c1, k0), (c3, k1)))
        first, second = (b.xor(s, o) for s, o in zip(swapped, others, strict=True))
        return first, second


_apply_new_mask = as_intrinsic(
    "x x_start y y_start bits bits_start size scale counter", call_of(_NewMask)
)
"""Apply dropout to a sample: (x, start, y, start, bits, start, size, scale, counter).

The counter is (limit, sample, step, layer, key0, key1).
"""

_apply_stored_mask = as_intrinsic(_StoredMask.ARGUMENTS, call_of(_StoredMask))
"""Apply dropout to a sample with stored bits: (x, start, y, start, bits, start, size, scale)."""


@kernel
def dropout_forward(
    items: Items, x: Array, y: Array, bits: Array, factor: float, key: Any, step: int
) -> None:
    """Compute y = x · factor if kept, else x · 0, which keeps a NaN; items are samples.

    Args:
        x, y: (N, elements); they may be the same array.
        bits: uint8 (N, `mask_bytes`), output: 1 if an element is kept, the lowest bit first.
        factor: factor of the kept elements.
        key: limit, layer, samples, key0, key1. An element is dropped if its random word is below
            the limit, at most 2³² − 1; samples, int64 (N,), are their identities; the others are
            elements of the counter and the key.
        step: element of the counter.
    """
    limit, layer, samples, key0, key1 = key
    size, row = x.shape[1], bits.shape[1]
    for n in range(items.start, items.stop):
        counter = (limit, samples[n], step, layer, key0, key1)
        _apply_new_mask(x, n * size, y, n * size, bits, n * row, size, factor, counter)


@kernel
def dropout_backward(items: Items, dy: Array, dx: Array, bits: Array, factor: float) -> None:
    """Compute dx = dy · factor if kept, else dy · 0; items are samples, arrays as in forward."""
    size, row = dy.shape[1], bits.shape[1]
    for n in range(items.start, items.stop):
        _apply_stored_mask(dy, n * size, dx, n * size, bits, n * row, size, factor)


def mask_bytes(elements: int) -> int:
    """Return the bytes of the mask of a sample with `elements` elements."""
    return -(-elements // ALIGNMENT) * ALIGNMENT // 8
