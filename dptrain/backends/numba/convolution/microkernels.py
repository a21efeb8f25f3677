"""Register tiles of a matrix product; all convolutions and products of the backend use them.

Every convolution and every matrix product is a loop over tiles of

    C[m, k] = max(lower_bound, D[m, k] + Σ_t A[m, t] · B[t, k])

for a few rows m and one or two vectors of columns k. The sums of a tile stay in registers until
they are complete. A is read element by element and broadcast, B is read in vectors:

- A[m, t] is at ``a + a_rows[m] · a_row + a_steps[t] · a_step``;
- B[t, k] at ``b + t · b_step + k``;
- C[m, k] at ``c + c_rows[m] · c_row + k``, and D likewise with ``d`` and ``d_row``: D is a bias if
  ``d_row`` is 0, the previous C if it is ``c_row``, and zero if it is negative.

Tables contain the offsets of rows and steps (implicit im2col), so a convolution needs no copy of
its input's patches: with pixels as rows and filter elements (r, s, c) as steps, A is the matrix of
patches; with the tables swapped, its transpose. All of these are run-time arguments, so layers of
every shape share a few machine functions.

One address per row is more than the processor's integer registers can hold, and spilled addresses
compete with A for the load ports. If rows are in runs at equal distances, such as the pixels of a
row or the elements of a filter row, a `_Regular` tile needs one address for several rows.

Columns after the last whole vector are computed with masked loads and stores, in a vector of half
the width if they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from llvmlite import ir

from dptrain.backends.numba.vector import (
    F32,
    F32P,
    I32P,
    I64,
    LINE,
    Writer,
    as_intrinsic,
    compiled_registers,
)

NO_LOWER_BOUND = np.float32(-np.inf)
"""Lower bound of outputs without ReLU."""

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
    "lower_bound": F32,
}

ROW_GROUP = 4
"""Rows that share an address in `multiply_in_place`, which computes whole groups."""


class Tile(Writer):
    """One tile of at most `height` rows and `vectors` vectors.

    With `masked`, only the first ``columns`` columns exist; they end inside the last vector.
    """

    kind = "tile"
    arguments: ClassVar[Mapping[str, ir.Type]] = _ARGUMENTS

    def __init__(
        self, module: ir.Module, width: int, height: int, vectors: int, masked: bool = False
    ) -> None:
        self.height, self.vectors, self.masked = height, vectors, masked
        name = f"dptrain_{self.kind}_{height}x{vectors}x{width}{'_masked' if masked else ''}"
        super().__init__(module, name, self.arguments, width)

    def write(self) -> None:
        if self.masked:
            before = I64((self.vectors - 1) * self.width)
            self.mask_after(self.builder.sub(self.args["columns"], before))
        self.finish(self._sum())

    def columns(self, pointer: ir.Value) -> list[tuple[ir.Value, bool]]:
        """Return the address of each vector of columns, and whether it is masked."""
        return [
            (self.at(pointer, I64(v * self.width)), self.masked and v == self.vectors - 1)
            for v in range(self.vectors)
        ]

    def entry(self, table: str, index: ir.Value, scale: ir.Value) -> ir.Value:
        """Load an offset from a table."""
        entry = self.builder.load(self.at(self.args[table], index))
        return self.builder.mul(self.builder.sext(entry, I64), scale)

    def rows(self) -> Callable[[ir.Value], Iterator[ir.Value]]:
        """Return a function that yields the address of every row's element of A for an offset."""
        b, args = self.builder, self.args
        rows = []
        for m in range(self.height):
            # Rows after the last one repeat the first, whose memory exists.
            exists = b.icmp_signed("<", I64(m), args["rows"])
            index = b.select(exists, I64(m), I64(0))
            rows.append(self.at(args["a"], self.entry("a_rows", index, args["a_row"])))
        return lambda offset: (self.at(row, offset) for row in rows)

    def _sum(self) -> Sequence[ir.Value]:
        b, args, rows = self.builder, self.args, self.rows()

        def step(t: ir.Value, state: Sequence[ir.Value]) -> Sequence[ir.Value]:
            pointer, offset, *sums = state
            columns = [
                self.load(address, masked=masked) for address, masked in self.columns(pointer)
            ]
            self.prefetch_in_step(t, pointer)
            following = b.add(t, I64(1))
            following = b.select(b.icmp_signed("<", following, args["steps"]), following, t)
            following = self.entry("a_steps", following, args["a_step"])
            new = [self.at(pointer, args["b_step"]), following]
            for m, address in enumerate(rows(offset)):
                pairs = zip(self.elements(address), columns, strict=True)
                for v, (element, column) in enumerate(pairs, m * self.vectors):
                    new.append(self.multiply_add(element, column, sums[v]))
            return new

        first = self.entry("a_steps", I64(0), args["a_step"])
        return self.loop(I64(0), args["steps"], [args["b"], first, *self.begin()], step)[2:]

    def elements(self, address: ir.Value) -> list[ir.Value]:
        """Return what multiplies each vector of a row of B: the element of A at an address."""
        return [self.splat(self.builder.load(address, align=4))] * self.vectors

    def prefetch_in_step(self, t: ir.Value, pointer: ir.Value) -> None:
        """Prefetch in step t, whose row of B is at `pointer`."""

    def begin(self) -> Sequence[ir.Value]:
        """Return the initial sums."""
        return [self.zero] * (self.height * self.vectors)

    def finish(self, sums: Sequence[ir.Value]) -> None:
        """Add D, apply the lower bound, and store the rows that exist."""
        b, args = self.builder, self.args
        kind = ir.ArrayType(F32, self.vectors * self.width)
        zeros = ir.GlobalVariable(self.module, kind, f"{self.function.name}_zeros")
        zeros.linkage, zeros.global_constant = "internal", True
        zeros.initializer = ir.Constant(kind, None)
        no_d = b.icmp_signed("<", args["d_row"], I64(0))
        d = b.select(no_d, b.bitcast(zeros, F32P), args["d"])
        self.store_rows(sums, d, b.select(no_d, I64(0), args["d_row"]))

    def store_rows(self, sums: Sequence[ir.Value], d: ir.Value, d_row: ir.Value) -> None:
        """Add D and store the rows that exist."""
        b, args = self.builder, self.args
        for m in range(self.height):
            with b.if_then(b.icmp_signed("<", I64(m), args["rows"]), likely=True):
                addend = self.at(d, self.entry("c_rows", I64(m), d_row))
                target = self.at(args["c"], self.entry("c_rows", I64(m), args["c_row"]))
                self.store_row(sums[m * self.vectors :], addend, target)

    def store_row(self, sums: Sequence[ir.Value], addend: ir.Value, target: ir.Value) -> None:
        """Store the sums of one row plus `addend`'s, at least the lower bound."""
        b, lower_bound = self.builder, self.splat(self.args["lower_bound"])
        vectors = zip(sums, self.columns(addend), self.columns(target), strict=False)
        for total, (source, masked), (address, _) in vectors:
            value = b.fadd(total, self.load(source, masked=masked))
            # This comparison passes NaN through, so that the loss reveals it.
            value = b.select(b.fcmp_ordered("<", value, lower_bound), lower_bound, value)
            self.store(value, address, masked)


class _Regular(Tile):
    """A tile whose rows all exist; rows of A and C are in groups at equal distances.

    Args:
        group: rows of a group.
        adjacent: True if the distance in A is 1, False if it is that of the first two rows.
    """

    name: ClassVar[str] = ""
    """The first part of the name of the compiled function; empty for that of the distances."""

    def __init__(
        self,
        module: ir.Module,
        width: int,
        height: int,
        vectors: int,
        masked: bool,
        group: int,
        adjacent: bool,
    ) -> None:
        self.group, self.adjacent = group, adjacent
        self.kind = f"{self.name or ('adjacent' if adjacent else 'spaced')}{group}"
        super().__init__(module, width, height, vectors, masked)

    def leaders(self) -> range:
        """Return the first row of each group."""
        return range(0, self.height, self.group)

    def moved(self, leader: ir.Value, offset: ir.Value) -> ir.Value:
        """Return the address of a group's first row at an offset of A."""
        return self.at(leader, offset)

    def _distance(self, table: str, scale: ir.Value) -> ir.Value:
        first, second = (self.entry(table, I64(m), scale) for m in range(2))
        return self.builder.sub(second, first)

    def rows(self) -> Callable[[ir.Value], Iterator[ir.Value]]:
        args = self.args
        leaders = [
            self.at(args["a"], self.entry("a_rows", I64(m), args["a_row"])) for m in self.leaders()
        ]
        one = I64(1) if self.adjacent else self._distance("a_rows", args["a_row"])
        distances = [self.builder.mul(one, I64(j)) for j in range(self.group)]

        def addresses(offset: ir.Value) -> Iterator[ir.Value]:
            for leader in leaders:
                moved = self.moved(leader, offset)
                yield from (self.at(moved, distance) for distance in distances)

        return addresses

    def store_rows(self, sums: Sequence[ir.Value], d: ir.Value, d_row: ir.Value) -> None:
        addends = self._rows_at(d, d_row)
        targets = self._rows_at(self.args["c"], self.args["c_row"])
        for m, (addend, target) in enumerate(zip(addends, targets, strict=True)):
            self.store_row(sums[m * self.vectors :], addend, target)

    def _rows_at(self, pointer: ir.Value, row: ir.Value) -> Iterator[ir.Value]:
        """Yield the address of every row of C, or of D, in order."""
        below = self._distance("c_rows", row)
        for leader in self.leaders():
            first = self.at(pointer, self.entry("c_rows", I64(leader), row))
            for j in range(self.group):
                yield self.at(first, self.builder.mul(I64(j), below))


class _Plain(_Regular):
    """A spaced tile without D and lower bound.

    With few steps, D and lower bound would add half of the time (F(4×4, 3×3) with 16 channels).
    """

    name = "plain"

    def store_row(self, sums: Sequence[ir.Value], addend: ir.Value, target: ir.Value) -> None:
        for total, (address, masked) in zip(sums, self.columns(target), strict=False):
            self.store(total, address, masked)


class _Streaming(_Regular):
    """A spaced tile that prefetches its rows of C and, in each step, a line of other data."""

    name = "streaming"
    arguments: ClassVar[Mapping[str, ir.Type]] = {
        **_ARGUMENTS,
        "stream": F32P,
        "stream_tile": I64,
        "stream_step": I64,
    }

    def begin(self) -> Sequence[ir.Value]:
        for target in self._rows_at(self.args["c"], self.args["c_row"]):
            for v in range(0, self.vectors * self.width, LINE):
                self.prefetch(self.at(target, I64(v)), cache=1, written=True)
        return super().begin()

    def prefetch_in_step(self, t: ir.Value, pointer: ir.Value) -> None:
        moved = self.builder.mul(t, self.args["stream_step"])
        self.prefetch(self.at(self.args["stream"], moved), cache=2)


class _Panel(_Plain):
    """A plain tile that prefetches B, `next` elements after the row of each step, into L2."""

    name = "panel"
    arguments: ClassVar[Mapping[str, ir.Type]] = {**_ARGUMENTS, "next": I64}
    STEPS: ClassVar[int] = 4
    """Steps of an iteration, so that an address serves several elements of a row of A."""

    def moved(self, leader: ir.Value, offset: ir.Value) -> ir.Value:
        # LLVM would calculate the address of each row before the loop, and spill them.
        return self.hidden(super().moved(leader, offset))

    def _sum(self) -> Sequence[ir.Value]:
        """Sum over steps at equal distances, for which no table is read.

        Several steps share the addresses of the rows; loads limit tiles of one vector.
        """
        b, args, rows = self.builder, self.args, self.rows()

        def steps(count: int) -> Callable[[ir.Value, Sequence[ir.Value]], Sequence[ir.Value]]:
            def step(t: ir.Value, state: Sequence[ir.Value]) -> Sequence[ir.Value]:
                (pointer, *sums), addresses = state, list(rows(t))
                for i in range(count):
                    columns = [self.load(at, masked=masked) for at, masked in self.columns(pointer)]
                    self.prefetch_in_step(t, pointer)
                    for m, address in enumerate(addresses):
                        element = self.splat(b.load(self.at(address, I64(i)), align=4))
                        for v, column in enumerate(columns, m * self.vectors):
                            sums[v] = self.multiply_add(element, column, sums[v])
                    pointer = self.at(pointer, args["b_step"])
                return [pointer, *sums]

            return step

        unrolled = self.STEPS if self.vectors == 1 and not self.masked else 1
        whole = b.sub(args["steps"], b.srem(args["steps"], I64(unrolled)))
        state = [args["b"], *self.begin()]
        state = self.loop(I64(0), whole, state, steps(unrolled), step=unrolled)
        if unrolled > 1:
            state = self.loop(whole, args["steps"], state, steps(1))
        return state[1:]

    def prefetch_in_step(self, t: ir.Value, pointer: ir.Value) -> None:
        following = self.at(pointer, self.args["next"])
        for v in range(0, self.vectors * self.width, LINE):
            self.prefetch(self.at(following, I64(v)), cache=2)


class _InPlace(_Panel):
    """A tile whose products replace its rows of A, which are at equal distances.

    All elements of a row are read before its products are stored.
    """

    name = "in_place"
    arguments = {  # noqa: RUF012
        "a": F32P,
        "pitch": I64,
        "b": F32P,
        "b_step": I64,
        "steps": I64,
    }

    def __init__(self, module: ir.Module, width: int, height: int, vectors: int) -> None:
        super().__init__(module, width, height, vectors, False, ROW_GROUP, False)

    def rows(self) -> Callable[[ir.Value], Iterator[ir.Value]]:
        b, (a, pitch, *_) = self.builder, self.args.values()
        groups = [self.at(a, b.mul(pitch, I64(m))) for m in self.leaders()]
        distances = [b.mul(pitch, I64(j)) for j in range(self.group)]

        def addresses(offset: ir.Value) -> Iterator[ir.Value]:
            for group in groups:
                moved = self.moved(group, offset)
                yield from (self.at(moved, distance) for distance in distances)

        return addresses

    def prefetch_in_step(self, t: ir.Value, pointer: ir.Value) -> None:
        """Prefetch nothing: an L2 cache holds all of B."""

    def finish(self, sums: Sequence[ir.Value]) -> None:
        for m, row in enumerate(self.rows()(I64(0))):
            self.store_row(sums[m * self.vectors :], row, row)


class _InPlaceProduct(Writer):
    """A product in place, of one or two vectors of columns."""

    arguments: ClassVar[Mapping[str, ir.Type]] = {
        "a": F32P,
        "pitch": I64,
        "b": F32P,
        "columns": I64,
        "rows": I64,
        "steps": I64,
    }

    def __init__(self, module: ir.Module) -> None:
        width = compiled_registers().width
        super().__init__(module, "dptrain_in_place_product", self.arguments, width)

    def write(self) -> None:
        b, args = self.builder, dict(self.args)
        groups = b.sdiv(b.add(args["rows"], I64(ROW_GROUP - 1)), I64(ROW_GROUP))
        args["rows"] = b.mul(groups, I64(ROW_GROUP))

        one = b.icmp_signed("==", args["columns"], I64(self.width))
        with b.if_else(one) as (single, pair):
            with single:
                self._tiles(args, 1)
            with pair:
                self._tiles(args, 2)

    def _tiles(self, args: Mapping[str, ir.Value], vectors: int) -> None:
        """Compute the rows of a matrix."""
        b, first = self.builder, I64(0)
        for height in compiled_registers().in_place[vectors - 1]:
            tile = _InPlace(self.module, self.width, height, vectors)
            last = b.sub(args["rows"], b.srem(b.sub(args["rows"], first), I64(height)))

            def call(
                m: ir.Value, _: Sequence[ir.Value], tile: _InPlace = tile
            ) -> Sequence[ir.Value]:
                a = self.at(args["a"], b.mul(m, args["pitch"]))
                operands = a, args["pitch"], args["b"], args["columns"], args["steps"]
                b.call(tile.function, operands)
                return []

            self.loop(first, last, [], call, step=height)
            first = last


class _Ahead(Tile):
    """A tile that prefetches one line of the next block in each step."""

    kind = "ahead"
    arguments = {**_ARGUMENTS, "ahead": F32P}  # noqa: RUF012

    def prefetch_in_step(self, t: ir.Value, pointer: ir.Value) -> None:
        self.prefetch(self.at(self.args["ahead"], self.builder.mul(t, I64(LINE))), cache=2)


class _Diagonal(Tile):
    """A tile whose elements of A are vectors: one number for each column."""

    kind = "diagonal"

    def elements(self, address: ir.Value) -> list[ir.Value]:
        return [self.load(at, masked=masked) for at, masked in self.columns(address)]


_ANY = ("any", "ahead", "diagonal")
"""Kinds of products whose rows have arbitrary offsets."""


class Panel(NamedTuple):
    """Columns that are computed together: `vectors` vectors of `width` elements."""

    width: int
    vectors: int


class _Product(Writer):
    """All tiles of a product. The outer loop is over columns, so that a panel of B stays in cache.

    Args:
        kind: "any", or the order of the rows of A within every ``run`` of them: "spaced" at equal
            distances, "adjacent", or "plain": spaced, without D and lower bound. "ahead" is "any"
            with prefetches at ``ahead``, one line in each step of each tile, "panel" is "plain"
            with prefetches ``next`` elements after B, and "streaming" is "spaced" with prefetches
            of C and of ``stream``. "diagonal" is "any" with a vector of A for each row and step.
    """

    def __init__(self, module: ir.Module, kind: str) -> None:
        self.registers, self.kind = compiled_registers(), kind
        self.tile, self.full_tile = self.tiles_of(kind)
        name, arguments = f"dptrain_product_{kind}", self.arguments_of(kind)
        super().__init__(module, name, arguments, self.registers.width)

    @staticmethod
    def tiles_of(kind: str) -> tuple[type[Tile], type[_Regular]]:
        """Return the tiles of a kind, and those of full height."""
        tiles: Mapping[str, type[_Regular]] = {
            "plain": _Plain,
            "panel": _Panel,
            "streaming": _Streaming,
        }
        others: Mapping[str, type[Tile]] = {"ahead": _Ahead, "diagonal": _Diagonal}
        return others.get(kind, Tile), tiles.get(kind, _Regular)

    @classmethod
    def arguments_of(cls, kind: str) -> Mapping[str, ir.Type]:
        """Return the names and types of the arguments of a kind."""
        tile, full_tile = cls.tiles_of(kind)
        return {**tile.arguments, **full_tile.arguments, "run": I64}

    def write(self) -> None:
        b, args, width = self.builder, self.args, self.registers.width
        wide = b.mul(b.sdiv(args["columns"], I64(2 * width)), I64(2 * width))

        def pair(k: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            self._panel(k, Panel(width, 2))
            return []

        def single(k: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            # Vectors of half the width take half the time on processors that split wide vectors.
            rest, half = b.sub(args["columns"], k), width // 2
            with b.if_else(b.icmp_signed("<=", rest, I64(half))) as (few, many):
                with few:
                    self._panel(k, Panel(half, 1))
                with many:
                    self._panel(k, Panel(width, 1))
            return []

        self.loop(I64(0), wide, [], pair, step=2 * width)
        self.loop(wide, args["columns"], [], single, step=width)

    def _panel(self, k: ir.Value, panel: Panel) -> None:
        """Compute all rows of a panel of columns, from column k on."""
        first = I64(0) if self.kind in _ANY else self._regular(k, panel)
        self._tiles(k, first, panel)

    def _moved(self, k: ir.Value, m: ir.Value) -> dict[str, ir.Value]:
        """Return the arguments of a tile."""
        b = self.builder
        moved = {name: value for name, value in self.args.items() if name != "run"}
        for name in ("b", "d", "c", *(("a",) if self.kind == "diagonal" else ())):
            moved[name] = self.at(moved[name], k)
        for name in ("a_rows", "c_rows"):
            moved[name] = self.at(moved[name], m)
        moved["rows"] = b.sub(moved["rows"], m)
        moved["columns"] = b.sub(moved["columns"], k)
        if "ahead" in moved:
            height, panel = self.registers.heights[0], b.sdiv(k, I64(2 * self.width))
            high = b.sdiv(b.add(self.args["rows"], I64(height - 1)), I64(height))
            before = b.add(b.mul(panel, high), b.sdiv(m, I64(height)))
            lines = b.mul(before, b.mul(self.args["steps"], I64(LINE)))
            moved["ahead"] = self.at(moved["ahead"], lines)
        if "stream" in moved:
            number = b.sdiv(m, I64(self.registers.spaced[1][0]))
            moved["stream"] = self.at(moved["stream"], b.mul(number, moved["stream_tile"]))
        return moved

    def _call(self, tile: Tile, moved: Mapping[str, ir.Value]) -> None:
        self.builder.call(tile.function, [moved[name] for name in tile.arguments])

    def _regular(self, k: ir.Value, panel: Panel) -> ir.Value:
        """Compute full tiles with regular rows; return the first remaining row."""
        b, vectors = self.builder, panel.vectors
        last = self._full_tiles(k, panel, *self.registers.spaced[vectors - 1])
        if self.kind != "adjacent":
            return last
        # Runs that are no multiple of 4 elements, such as those of three channels.
        before = b.block
        other = b.append_basic_block("other_group")
        after = b.append_basic_block("regular_end")
        b.cbranch(b.icmp_signed("==", last, I64(0)), other, after)
        b.position_at_end(other)
        others = self._full_tiles(k, panel, *self.registers.adjacent[vectors - 1])
        end = b.block
        b.branch(after)
        b.position_at_end(after)
        result = b.phi(I64)
        result.add_incoming(last, before)
        result.add_incoming(others, end)
        return result

    def _full_tiles(self, k: ir.Value, panel: Panel, height: int, group: int) -> ir.Value:
        """Compute tiles of `height` rows, if runs are whole groups; return the first remaining
        row.
        """
        b, args = self.builder, self.args
        aligned = b.icmp_signed("==", b.srem(args["run"], I64(group)), I64(0))
        last = b.mul(b.sdiv(args["rows"], I64(height)), I64(height))
        last = b.select(aligned, last, I64(0))

        def loop(masked: bool) -> None:
            size = panel.width, height, panel.vectors, masked, group
            tile = self.full_tile(self.module, *size, self.kind == "adjacent")

            def call(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
                self._call(tile, self._moved(k, m))
                return []

            self.loop(I64(0), last, [], call, step=height)

        # A panel has whole vectors.
        if panel.vectors == 2 or (self.kind == "panel" and panel.width == self.width):
            loop(masked=False)
        elif panel.width < self.width:
            loop(masked=True)
        else:
            whole = b.icmp_signed(">=", b.sub(args["columns"], k), I64(panel.width))
            with b.if_else(whole) as (all_columns, some_columns):
                with all_columns:
                    loop(masked=False)
                with some_columns:
                    loop(masked=True)
        return last

    def _tiles(self, k: ir.Value, first: ir.Value, panel: Panel) -> None:
        """Compute the rows from `first` on, each with the lowest tile that holds the remaining
        rows.
        """
        b = self.builder

        def tile(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            moved = self._moved(k, m)

            def call(heights: Sequence[int]) -> None:
                if len(heights) == 1:
                    size = panel.width, heights[0], panel.vectors, panel.vectors == 1
                    self._call(self.tile(self.module, *size), moved)
                    return
                with b.if_else(b.icmp_signed(">", moved["rows"], I64(heights[1]))) as (high, low):
                    with high:
                        call(heights[:1])
                    with low:
                        call(heights[1:])

            call(self.registers.heights)
            return []

        self.loop(first, self.args["rows"], [], tile, step=self.registers.heights[0])


def _product(kind: str, last: str = "") -> Any:
    """Return the function for a kind of product.

    Args:
        kind: see `_Product`.
        last: parameters after those of `multiply`.
    """
    more = [I64(1)] if kind in _ANY else []

    def emit(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
        builder.call(_Product(builder.module, kind).function, [*flat, *more])

    parameters = "a a_rows a_steps b d c c_rows shape lower_bound"
    return as_intrinsic(f"{parameters} {last}".rstrip(), emit)


_OMITTED = ("d", "d_row", "lower_bound")


def _plain_product(kind: str, last: str) -> Any:
    """Return the function for a kind of product without D and lower bound.

    Args:
        kind: see `_Product`.
        last: the last parameter.
    """
    names = list(_Product.arguments_of(kind))
    given = [name for name in names if name not in _OMITTED]

    def emit(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
        values = dict(zip(given, flat, strict=True))
        # D is unused; any array serves.
        values |= {"d": values["c"], "d_row": I64(-1), "lower_bound": F32(-np.inf)}
        builder.call(_Product(builder.module, kind).function, [values[name] for name in names])

    return as_intrinsic(f"a a_rows a_steps b c c_rows shape {last}", emit)


multiply = _product("any")
"""C = max(lower_bound, D + A·B) with any number of rows, steps and columns; see the module.

Arguments: (a, a_rows, a_steps, b, d, c, c_rows, shape, lower_bound), of which

- a, c are (contiguous array, start),
- a_rows, a_steps, c_rows are (table, first entry, multiplier),
- b, d are (contiguous array, start, distance of steps or rows),
- shape is (rows, steps, columns), and lower_bound is float32.
"""

multiply_diagonal = _product("diagonal")
"""Compute ``C[m, k] = max(lower_bound, D[m, k] + Σ_t A[m, t, k] · B[t, k])``.

The elements of A for all columns are adjacent. Arguments are those of `multiply`.
"""

multiply_ahead = _product("ahead", "ahead")
"""Compute `multiply`, and prefetch from one more argument, (contiguous array, start)."""

multiply_spaced = _product("spaced", "run")
"""Compute `multiply` for rows of C at equal distances and rows of A at equal distances in each run.

One more argument: rows of a run; all runs have the same distance.
"""

multiply_adjacent = _product("adjacent", "run")
"""Compute `multiply_spaced` for rows of A that are adjacent in each run."""

multiply_streaming = _product("streaming", "stream run")
"""Compute `multiply_spaced`, and prefetch C and what later products read.

One more argument before that of `multiply_spaced`: (contiguous array, start, elements from one
register tile to the next, elements from one step to the next). Each step of each full tile
prefetches one cache line.
"""

multiply_plain = _plain_product("plain", "run")
"""C = A·B with rows as in `multiply_spaced`: (a, a_rows, a_steps, b, c, c_rows, shape, run)."""

multiply_panel = _plain_product("panel", "next_and_run")
"""Compute `multiply_plain` and prefetch the next panel of B into the L2 cache.

The table of the steps of A is 0, 1, 2, …. The last argument is (elements from a row of B to that of
the next panel, run).
"""


def _emit_in_place(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
    builder.call(_InPlaceProduct(builder.module).function, flat)


multiply_in_place = as_intrinsic(_InPlaceProduct.arguments, _emit_in_place)
"""Replace A (rows, steps) by A·B, of B (steps, columns).

Arguments: (a, start, pitch, b, start, columns, rows, steps), of which

- a, b are contiguous arrays, followed by the starts of the matrices,
- pitch is the distance of the rows of A, at least `columns`,
- columns, of B, are one or two whole vectors,
- rows are computed up to a multiple of `ROW_GROUP`.
"""
