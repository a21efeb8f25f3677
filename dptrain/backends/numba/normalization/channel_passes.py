"""Passes over maps with the constants and the sums of their channels in registers.

A pass reads and writes the pixels of a band in arrays (N·H·W, C). Channels are processed in blocks
of up to four vectors, whose constants and sums stay in registers from the first pixel to the last.
A cache should hold a band while one block after another is processed, unless it has few pixels.

All normalisations consist of these passes. With the mean m, a factor a (weight / deviation) and a
bias b of each channel, and z = (x − m) · a + b:

- `sum_deviations`: Σ (x − s) and Σ (x − s)² for a shift s;
- `normalise`: y = z, max(z, 0), z + x2 or max(z + x2, 0);
- `sum_gradients`: Σ dz and Σ dz · (x − m);
- `propagate`: dx = a · (p · dz − r) + q · (x − m) with three further constants of each channel.

Here dz is the gradient before ReLU. With x2, it is stored, because it is also the gradient of x2.
Without x2, z is computed again from x, by the same operations as in `normalise`, instead of reading
dz or y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llvmlite import ir

from dptrain.backends.numba.vector import F32P, I64, Writer, as_intrinsic, compiled_registers

BLOCK = 4
"""Largest number of vectors of a block. With fewer vectors, several pixels are processed at a time,
so that as many sums are independent of each other."""
AHEAD, FEWEST_AHEAD = 1024, 16
"""Distance in elements from the current vectors to the prefetches, and at least how many pixels it
has. Processors themselves do not prefetch beyond a page, which has 1,024 elements."""

RELU, SUM = 1, 2
"""Bits of the variants of `normalise`: apply ReLU, add x2."""
DY, COMPUTED, STORED, COPIED = range(4)
"""Variants of dz in `sum_gradients`: dy; dy where z > 0; dy where y > 0, which is stored in dx2;
dy, which is stored in dx2."""
ADDS = 2
"""Bit of the variants of `propagate`, in addition to `DY` or `COMPUTED`: add to dx."""


class _Pass(Writer):
    """A loop over pixels for one block of channels.

    Args:
        vectors: vectors of the block.
        masked: True for one vector of which only the first ``count`` channels exist.
        variant: what the subclass computes.
    """

    name: ClassVar[str]
    arrays: ClassVar[tuple[str, ...]]
    """Arguments with a row for each pixel."""
    constants: ClassVar[int]
    """Rows of the argument ``table``, which have an element for each channel."""
    sums: ClassVar[int] = 0
    """Rows of the argument ``sums``, which receive the sums of each channel."""
    variants: ClassVar[int] = 4

    def __init__(
        self, module: ir.Module, width: int, vectors: int, masked: bool, variant: int
    ) -> None:
        self.vectors, self.masked, self.variant = vectors, masked, variant
        suffix = "_masked" if masked else ""
        name = f"dptrain_channels_{self.name}{variant}_{vectors}x{width}{suffix}"
        super().__init__(module, name, self.arguments(), width)

    @classmethod
    def arguments(cls) -> Mapping[str, ir.Type]:
        """Return names and types of the arguments."""
        pointers = dict.fromkeys((*cls.arrays, "table", "sums"), F32P)
        return {**pointers, "pixels": I64, "channels": I64, "count": I64}

    def write(self) -> None:
        b, args = self.builder, self.args
        if self.masked:
            self.mask_after(args["count"])
        fewest = b.mul(I64(FEWEST_AHEAD), args["channels"])
        self.ahead = b.select(b.icmp_signed("<", fewest, I64(AHEAD)), I64(AHEAD), fewest)
        self.known = [
            [self._load_vector("table", self._in_row(row, v)) for row in range(self.constants)]
            for v in range(self.vectors)
        ]
        step = BLOCK // self.vectors
        whole = b.sub(args["pixels"], b.srem(args["pixels"], I64(step)))
        state = self.loop(
            I64(0),
            whole,
            [self.zero] * (step * self.vectors * self.sums),
            lambda p, state: self._pixels(p, step, state),
            step=step,
        )
        state = self.loop(whole, args["pixels"], state, lambda p, state: self._pixels(p, 1, state))
        for v in range(self.vectors):
            for row in range(self.sums):
                terms = state[v * self.sums + row :: self.vectors * self.sums]
                while len(terms) > 1:
                    terms = [b.fadd(*terms[i : i + 2]) for i in range(0, len(terms), 2)]
                self.put(terms[0], "sums", self._in_row(row, v))

    def _in_row(self, row: int, vector: int) -> ir.Value:
        """Return the offset of a vector in a row of the constants or sums."""
        start = self.builder.mul(I64(row), self.args["channels"])
        return self.builder.add(start, I64(vector * self.width))

    def _pixels(self, p: ir.Value, count: int, state: Sequence[ir.Value]) -> list[ir.Value]:
        """Process `count` pixels from pixel p on, and return the new sums."""
        b, new = self.builder, list(state)
        for i in range(count):
            row = b.mul(b.add(p, I64(i)), self.args["channels"])
            for v in range(self.vectors):
                first = (i * self.vectors + v) * self.sums
                span = slice(first, first + self.sums)
                offset = b.add(row, I64(v * self.width))
                new[span] = self.compute(offset, self.known[v], state[span])
        return new

    def compute(
        self, offset: ir.Value, known: Sequence[ir.Value], sums: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """Process the vector at an offset of the arrays, and return its new sums."""
        raise NotImplementedError

    def get(self, name: str, offset: ir.Value) -> ir.Value:
        """Load the vector at an offset of an array."""
        self._prefetch(name, offset, written=False)
        return self._load_vector(name, offset)

    def _prefetch(self, name: str, offset: ir.Value, *, written: bool) -> None:
        address = self.at(self.args[name], self.builder.add(offset, self.ahead))
        self.prefetch(address, cache=1, written=written)

    def _load_vector(self, name: str, offset: ir.Value) -> ir.Value:
        return self.load(self.at(self.args[name], offset), masked=self.masked)

    def put(self, value: ir.Value, name: str, offset: ir.Value) -> None:
        """Store a vector at an offset of an array."""
        if name in self.arrays:
            self._prefetch(name, offset, written=True)
        self.store(value, self.at(self.args[name], offset), self.masked)

    def normalised(self, x: ir.Value, known: Sequence[ir.Value]) -> ir.Value:
        """Return z = (x − m) · a + b."""
        mean, factor, bias = known[:3]
        return self.multiply_add(self.builder.fsub(x, mean), factor, bias)

    def where_positive(self, value: ir.Value, z: ir.Value) -> ir.Value:
        """Return `value` where z is positive, else 0."""
        b = self.builder
        return b.select(b.fcmp_ordered(">", z, self.zero), value, self.zero)


class _Deviations(_Pass):
    name, arrays, constants, sums, variants = "deviations", ("x",), 1, 2, 1

    def compute(
        self, offset: ir.Value, known: Sequence[ir.Value], sums: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        d = self.builder.fsub(self.get("x", offset), known[0])
        return self.builder.fadd(sums[0], d), self.multiply_add(d, d, sums[1])


class _Normalise(_Pass):
    name, arrays, constants = "normalise", ("x", "x2", "y"), 3

    def compute(
        self, offset: ir.Value, known: Sequence[ir.Value], sums: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        b = self.builder
        z = self.normalised(self.get("x", offset), known)
        if self.variant & SUM:
            z = b.fadd(z, self.get("x2", offset))
        if self.variant & RELU:
            # This comparison passes NaN through, so that the loss reveals it.
            z = b.select(b.fcmp_ordered("<=", z, self.zero), self.zero, z)
        self.put(z, "y", offset)
        return ()


class _Gradients(_Pass):
    name, arrays, constants, sums = "gradients", ("x", "dy", "y", "dx2"), 3, 2

    def compute(
        self, offset: ir.Value, known: Sequence[ir.Value], sums: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        b, x, dz = self.builder, self.get("x", offset), self.get("dy", offset)
        if self.variant == COMPUTED:
            dz = self.where_positive(dz, self.normalised(x, known))
        if self.variant == STORED:
            dz = self.where_positive(dz, self.get("y", offset))
        if self.variant in (STORED, COPIED):
            self.put(dz, "dx2", offset)
        return b.fadd(sums[0], dz), self.multiply_add(dz, b.fsub(x, known[0]), sums[1])


class _Propagate(_Pass):
    name, arrays, constants = "propagate", ("x", "dy", "dx"), 6

    def compute(
        self, offset: ir.Value, known: Sequence[ir.Value], sums: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        x, dz = self.get("x", offset), self.get("dy", offset)
        if self.variant & COMPUTED:
            dz = self.where_positive(dz, self.normalised(x, known))
        mean, a, _, p, q, r = known
        # The difference comes first: it is exactly 0 if a channel has one element.
        distance = self.builder.fmul(self.builder.fsub(x, mean), q)
        change = self.multiply_add(dz, p, self.builder.fneg(r))
        dx = self.multiply_add(change, a, distance)
        if self.variant & ADDS:
            dx = self.builder.fadd(dx, self.get("dx", offset))
        self.put(dx, "dx", offset)
        return ()


class _Blocks(Writer):
    """Calls a pass for one block of channels after another."""

    def __init__(self, module: ir.Module, width: int, kind: type[_Pass], variant: int) -> None:
        self.kind, self.variant = kind, variant
        super().__init__(
            module, f"dptrain_blocks_{kind.name}{variant}_x{width}", kind.arguments(), width
        )

    def write(self) -> None:
        b, channels, first = self.builder, self.args["channels"], I64(0)
        vectors = BLOCK
        while vectors:
            size = I64(vectors * self.width)
            last = b.sub(channels, b.srem(channels, size))
            self.loop(first, last, [], self._caller(vectors, False), step=vectors * self.width)
            first, vectors = last, vectors // 2
        self.loop(first, channels, [], self._caller(1, True), step=self.width)

    def _caller(self, vectors: int, masked: bool) -> Any:
        def call(q: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            function = self.kind(self.module, self.width, vectors, masked, self.variant).function
            args = dict(self.args)
            for name in (*self.kind.arrays, "table", "sums"):
                args[name] = self.at(args[name], q)
            args["count"] = self.builder.sub(args["channels"], q)
            self.builder.call(function, list(args.values()))
            return []

        return call


def _pass(kind: type[_Pass]) -> Any:
    """Return the function that calls the variant of a pass that its last argument selects."""

    def emit(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
        *values, variant = flat
        for number in range(kind.variants):
            with builder.if_then(builder.icmp_signed("==", variant, I64(number))):
                blocks = _Blocks(builder.module, compiled_registers().width, kind, number)
                builder.call(blocks.function, [*values, I64(0)])

    arguments = {**kind.arguments(), "variant": I64}
    del arguments["count"]  # Of the channels of a block.
    return as_intrinsic(arguments, emit)


sum_deviations = _pass(_Deviations)
"""Store Σ (x − s) and Σ (x − s)² in two rows of sums; `table` has the row s."""

normalise = _pass(_Normalise)
"""Store y; the variant has the bits `RELU` and `SUM`, and `table` has the rows m, a, b."""

sum_gradients = _pass(_Gradients)
"""Store Σ dz and Σ dz (x − m) in two rows of sums; `table` has the rows m, a, b."""

propagate = _pass(_Propagate)
"""Store dx; `table` has the rows m, a, b, p, q, r."""
