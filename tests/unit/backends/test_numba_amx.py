"""Products on the AMX unit: operands are split without error, products are float32's.

Without the unit, its instructions are emulated.
"""

from __future__ import annotations

import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic

from dptrain.backends.numba.amx import (
    PANEL,
    PARTS,
    SIDE,
    STEPS,
    TileWriter,
    _Product,
    available,
    emit,
    multiply_tiles,
    split_pairs,
    split_rows,
)
from dptrain.backends.numba.amx_operands import pack_columns, pack_rows
from dptrain.backends.numba.jit import kernel

EPSILON = float(np.finfo(np.float32).eps)
PART = PANEL // PARTS


@kernel
def rows_kernel(start, stop, thread, source, target, part):
    split_rows((source, 0), (target, 0), part, stop)


@kernel
def pairs_kernel(start, stop, thread, source, target):
    n, columns = source.shape
    tiles = -(-n // STEPS)
    split_pairs(
        (source.reshape(-1), 0), columns, (target, 0),
        (n, tiles * STEPS, columns), (tiles * PANEL, PART, PANEL),
    )  # fmt: skip


@kernel
def pack_rows_kernel(start, stop, thread, source, target):
    n, columns = source.shape
    tile = -(-columns // STEPS) * PANEL
    pack_rows((source.reshape(-1), 0), columns, (target, 0), tile, (n, columns))


@kernel
def pack_columns_kernel(start, stop, thread, source, target):
    n, columns = source.shape
    tile = -(-n // STEPS) * PANEL
    pack_columns((source.reshape(-1), 0), columns, (target, 0), tile, (n, columns))


@kernel
def product_kernel(start, stop, thread, a, b, tables, c, d, d_row, last):
    """Tables: of the steps, of two and then three tiles of A, C's rows, B, C's columns."""
    steps = (tables[3] - tables[2]) // PANEL
    tiles, across = 3, 3
    multiply_tiles(
        (a, 0, PART), (tables, 2, STEPS), (tables, 16),
        (b, 0, PART, PANEL), (tables, 8), (c, 0), (tables, 5, c.shape[0] // 48),
        (tables, 11), (d, 0, d_row), (stop, tiles, steps, across, last),
    )  # fmt: skip


class EmulatedProduct(_Product):
    """The product with emulated instructions, on every processor."""

    emulated = True

    def __init__(self, module):
        TileWriter.__init__(self, module, "dptrain_tiles_emulated", self.arguments, SIDE)


@intrinsic
def multiply_emulated(typingctx, a, a_rows, a_steps, b, b_columns, c, c_rows, c_columns, d, shape):
    sig = types.none(a, a_rows, a_steps, b, b_columns, c, c_rows, c_columns, d, shape)
    return sig, emit(EmulatedProduct)


@kernel
def emulated_kernel(start, stop, thread, a, b, tables, c, d, d_row, last):
    """Compute `product_kernel` with emulated instructions."""
    steps = (tables[3] - tables[2]) // PANEL
    tiles, across = 3, 3
    multiply_emulated(
        (a, 0, PART), (tables, 2, STEPS), (tables, 16),
        (b, 0, PART, PANEL), (tables, 8), (c, 0), (tables, 5, c.shape[0] // 48),
        (tables, 11), (d, 0, d_row), (stop, tiles, steps, across, last),
    )  # fmt: skip


def numbers(words):
    """What bfloat16 words stand for."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def patterns(*shape):
    """Random bits: every sign, every fraction, exponents from -100 to 100."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**23, shape, np.uint32)
    bits |= rng.integers(27, 228, shape, np.uint32) << 23
    bits |= rng.integers(0, 2, shape, np.uint32) << 31
    # Rounding carries into the exponent where all bits are ones, and ties at halves.
    special = np.array([0x3F7FFFFF, 0x3F808000, 0x3F818000], np.uint32)[: bits.size]
    bits.reshape(-1)[: len(special)] = special
    return bits.view(np.float32)


def garbage(words):
    return np.full(words, 0x7FC0, np.uint16)


def sums(parts):
    """Sum of parts from the smallest on, exact in float64."""
    return numbers(parts).astype(float).sum(axis=0)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 33, 64, 4097])
def test_rows_are_split_without_error(count):
    x, target = patterns(count), garbage(PARTS * count + 64)
    rows_kernel(0, count, 0, x, target, count)
    np.testing.assert_array_equal(sums(target[: PARTS * count].reshape(PARTS, count)), x)
    assert (target[PARTS * count :] == 0x7FC0).all()


SHAPES = [(1, 1), (2, 16), (31, 17), (32, 32), (33, 31), (50, 100), (96, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_are_split_without_error(shape):
    """Two rows share a double word; what is beyond the last row or column is zero."""
    x, (deep, wide) = patterns(*shape), (-(-shape[0] // STEPS), -(-shape[1] // SIDE))
    target = garbage(deep * wide * PANEL)
    pairs_kernel(0, 1, 0, x, target)
    parts = target.reshape(wide, deep, PARTS, STEPS // 2, SIDE, 2).transpose(2, 1, 3, 5, 0, 4)
    total = sums(parts.reshape(PARTS, deep * STEPS, wide * SIDE))
    np.testing.assert_array_equal(total[: shape[0], : shape[1]], x)
    total[: shape[0], : shape[1]] = 0
    assert not total.any()


def unpacked_rows(words, rows, columns):
    high, deep = -(-rows // SIDE), -(-columns // STEPS)
    parts = words.reshape(high, deep, PARTS, SIDE, SIDE, 2).transpose(2, 0, 3, 1, 5, 4)
    return sums(parts.reshape(PARTS, high * SIDE, deep * STEPS))[:rows]


def unpacked_columns(words, rows, columns):
    deep, wide = -(-rows // STEPS), -(-columns // SIDE)
    parts = words.reshape(wide, deep, PARTS, SIDE, SIDE, 2).transpose(2, 1, 5, 3, 0, 4)
    return sums(parts.reshape(PARTS, deep * STEPS, wide * SIDE))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("pack", "unpacked", "tile"),
    [(pack_rows_kernel, unpacked_rows, (SIDE, STEPS)),
     (pack_columns_kernel, unpacked_columns, (STEPS, SIDE))],
    ids=["rows", "columns"],
)  # fmt: skip
def test_packing_loses_nothing(shape, pack, unpacked, tile):
    x = patterns(*shape)
    target = garbage(PANEL * -(-shape[0] // tile[0]) * -(-shape[1] // tile[1]))
    pack(0, 1, 0, x, target)
    total = unpacked(target, *shape)
    np.testing.assert_array_equal(total[: shape[0], : shape[1]], x)
    total[: shape[0], : shape[1]] = 0
    assert not total.any()


def product(a, b, d=None, d_row=-1, height=SIDE, multiply=product_kernel):
    """Three row tiles of `height` rows by three column tiles, the last perhaps narrow."""
    rows, depth = a.shape
    columns, deep = b.shape[1], -(-depth // STEPS)
    lines = np.zeros((2, 3 * deep * PANEL + 64), np.uint16)
    left, right = (line[-line.ctypes.data // 2 % 32 :] for line in lines)
    for m in range(3):
        tile = left[m * deep * PANEL :][: deep * PANEL]
        pack_rows_kernel(0, 1, 0, np.ascontiguousarray(a[m * height :][:height]), tile)
    pack_columns_kernel(0, 1, 0, b, right[: 3 * deep * PANEL])
    c = np.full(48 * columns, np.nan, np.float32)
    tables = np.zeros(16 + deep, np.int32)
    tables[2:5] = tables[8:11] = np.arange(3) * deep * PANEL
    tables[5:8], tables[11:14] = np.arange(3) * height * columns, np.arange(3) * SIDE
    tables[16:] = np.arange(deep) * PANEL
    if d is not None and d_row:
        c[: d.size], d = d.reshape(-1), c
    d = c if d is None else d
    multiply(0, height, 0, left, right, tables, c, d, d_row, columns - 2 * SIDE)
    assert np.isnan(c[rows * columns :]).all()
    return c[: rows * columns].reshape(rows, columns)


def operands(height, columns, depth, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((3 * height, depth), np.float32), rng.standard_normal(
        (depth, columns), np.float32
    )


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 400])
@pytest.mark.parametrize(("height", "columns"), [(16, 48), (16, 33), (1, 48), (7, 41)])
def test_products_are_as_close_as_those_of_float32(height, columns, depth):
    """Errors of n products in float32 are below n·ε·Σ|a·b|; these sums are no worse."""
    a, b = operands(height, columns, depth)
    exact = a.astype(float) @ b
    bound = EPSILON * (depth**0.5 + 2) * (np.abs(a).astype(float) @ np.abs(b))
    assert (np.abs(product(a, b, height=height) - exact) <= bound).all()


def test_one_product_is_right_to_its_last_bit():
    """Of one product the parts that are left out are below a quarter of float32's last bit."""
    a, b = operands(16, 48, 1)
    exact = a.astype(float) @ b
    # Five sums of parts round, the largest of them as float32 does.
    assert (np.abs(product(a, b) - exact) <= 1.5 * EPSILON * np.abs(exact)).all()


@pytest.mark.parametrize("columns", [48, 37])
def test_sums_start_from_nothing_a_bias_or_what_is_there(columns):
    a, b = operands(16, columns, 70)
    rng = np.random.default_rng(1)
    bias, there = (rng.standard_normal(shape, np.float32) for shape in (columns, (48, columns)))
    exact = a.astype(float) @ b
    bound = 16 * EPSILON * (1 + np.abs(a) @ np.abs(b))
    for start, row in ((None, -1), (bias, 0), (there, columns)):
        expected = exact if start is None else exact + start
        assert (np.abs(product(a, b, start, row) - expected) <= bound).all()


def test_what_is_no_number_stays_none():
    """NaN passes to its row or column alone; so does infinity, as NaN."""
    a, b = operands(16, 48, 64)
    a[3, 40], b[7, 20] = np.nan, np.inf
    c = product(a, b)
    lost = np.zeros((48, 48), bool)
    lost[3], lost[:, 20] = True, True
    np.testing.assert_array_equal(np.isnan(c), lost)


def rounded(x):
    """Return float32 numbers with zeros for denormal ones."""
    x = x.astype(np.float32)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def bfloat16_parts(x):
    """Return three bfloat16 parts, as float64."""
    parts = []
    for last in (False, False, True):
        bits = x.view(np.uint32) + (0 if last else 0x8000)
        part = (bits & np.uint32(0xFFFF0000)).view(np.float32)
        parts.append(rounded(part).astype(float))
        x = x - part
    return parts


ORDER = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))


def reference(a, b):
    """The product in the order of the instructions; float64 holds every sum without error."""
    c = np.zeros((len(a), b.shape[1]), np.float32)
    left, right = bfloat16_parts(a), bfloat16_parts(b)
    for t in range(0, a.shape[1], STEPS):
        for p, q in ORDER:
            halves = []
            for h in (0, SIDE):  # steps k and k + 16 are a pair in these layouts
                total = np.zeros_like(c)
                for k in range(t + h, min(t + h + SIDE, a.shape[1])):
                    total = rounded(total + np.outer(left[p][:, k], right[q][k]))
                halves.append(total)
            c = rounded(c + rounded(halves[0] + halves[1]))
    return c


@pytest.mark.parametrize("multiply", [product_kernel, emulated_kernel], ids=["default", "emulated"])
def test_sums_have_the_order_and_rounding_of_the_instructions(multiply):
    """Also in the first two column tiles, which are computed together, and the third."""
    rng = np.random.default_rng(3)
    a, b = (rng.uniform(0.5, 2, shape).astype(np.float32) for shape in ((48, 70), (70, 41)))
    a, b = (np.where(rng.random(x.shape) < 0.5, -x, x) for x in (a, b))
    c = product(a, b, multiply=multiply)
    np.testing.assert_array_equal(c, reference(a, b))


@pytest.mark.parametrize("multiply", [product_kernel, emulated_kernel], ids=["default", "emulated"])
def test_denormal_operands_and_results_are_zero(multiply):
    for x, y in ((2.0**-130, 2.0**20), (2.0**-70, 2.0**-70)):
        a, b = np.full((48, 40), x, np.float32), np.full((40, 48), y, np.float32)
        np.testing.assert_array_equal(product(a, b, multiply=multiply), 0)


@pytest.mark.skipif(not available(), reason="without AMX, every kernel is emulated")
@pytest.mark.parametrize("columns", [48, 37])
def test_the_emulator_computes_the_bits_of_the_unit(columns):
    rng = np.random.default_rng(4)
    a, b = patterns(48, 200), patterns(200, columns)
    bias = rng.standard_normal(columns, np.float32)
    for start, row in ((None, -1), (bias, 0)):
        results = [product(a, b, start, row, multiply=m) for m in (product_kernel, emulated_kernel)]
        np.testing.assert_array_equal(*(result.view(np.uint32) for result in results))
