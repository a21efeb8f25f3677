"""Winograd convolution: results against PyTorch in float64, and their independence of threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.backends.numba.convolution import winograd_convolution as winograd
from dptrain.backends.numba.convolution.planning import Case as Selected
from dptrain.backends.numba.convolution.planning import Shape, Work
from dptrain.backends.numba.pooling.pooling_windows import NO_GRADIENT
from dptrain.plan.lowering import Phase
from tests.unit.backends.numba import test_numba_convolution as vectors

SAME, NONE = ((1, 1), (1, 1)), ((0, 0), (0, 0))

# n, (H, W, C), K, (R, S), strides, ((top, bottom), (left, right))
CASES = {
    "one tile": (5, (4, 4, 16), 16, (3, 3), (1, 1), SAME),
    "blocks of several samples": (7, (8, 8, 32), 16, (3, 3), (1, 1), SAME),
    "blocks that end in samples": (3, (16, 20, 16), 64, (3, 3), (1, 1), SAME),
    "samples of several blocks": (2, (37, 41, 16), 48, (3, 3), (1, 1), ((1, 1), (0, 2))),
    "rows of several panels": (1, (5, 270, 16), 16, (3, 3), (1, 1), SAME),
    "no pads": (2, (9, 7, 16), 16, (3, 3), (1, 1), NONE),
    "uneven pads": (2, (6, 9, 32), 48, (3, 3), (1, 1), ((2, 1), (0, 3))),
    "vectors of as many channels as filters": (3, (9, 21, 13), 16, (3, 3), (1, 1), SAME),
    "channels that do not fill vectors": (3, (9, 11, 17), 24, (3, 3), (1, 1), SAME),
    "filters that do not fill vectors": (2, (10, 9, 32), 40, (3, 3), (1, 1), SAME),
    "channels that fill vectors better": (2, (6, 9, 40), 20, (3, 3), (1, 1), SAME),
    "few channels": (2, (10, 9, 3), 5, (3, 3), (1, 1), SAME),
    "more than 512 channels": (1, (5, 4, 528), 16, (3, 3), (1, 1), SAME),
    "five": (3, (12, 12, 32), 16, (5, 5), (1, 1), ((2, 2), (2, 2))),
    "five, odd maps": (2, (9, 7, 16), 48, (5, 5), (1, 1), ((1, 3), (0, 2))),
    "five, uneven channels": (2, (9, 7, 20), 37, (5, 5), (1, 1), ((2, 2), (2, 2))),
}


def with_tiers(names):
    """Leave filters of 5 × 5 to the parts: only constants differ, but all is compiled."""
    return [
        pytest.param(name, marks=pytest.mark.more if name.startswith("five") else [])
        for name in names
    ]


POOLED = (
    "blocks of several samples", "samples of several blocks", "channels that do not fill vectors",
    "five, odd maps", "rows of several panels",
)  # fmt: skip


class Case(vectors.Case):
    """A case of the Winograd algorithm."""

    plan = staticmethod(winograd.plan)

    def __init__(self, case, pool=None, **options):
        pool = vectors.POOLS[pool] if pool else None
        super().__init__(CASES[case] if isinstance(case, str) else case, pool=pool, **options)
        # All forms have up to 4 times the error of a direct sum (numerics.md), as a sum of 16
        # times as many products has.
        self.lengths = {name: 16 * length for name, length in self.lengths.items()}


def work(case, threads=2, rows=2):
    return Work(len(case.x), threads, rows)


@pytest.fixture(params=with_tiers(CASES))
def case(request):
    return Case(request.param)


def test_forward(case):
    for relu in (False, True):
        y, _ = case.forward(work(case), relu=relu)
        vectors.close(y, vectors.nhwc(case.ty.relu() if relu else case.ty), case.lengths["y"])


def test_backward_input(case):
    dx = case.backward_input(work(case))
    vectors.close(dx, vectors.nhwc(case.tx.grad), case.lengths["dx"])


def test_backward_weight(case):
    vectors.check_weight_gradients(case, case.backward_weight(work(case)))


@pytest.mark.parametrize("pool", vectors.POOLS)
@pytest.mark.parametrize("name", with_tiers(POOLED))
def test_pooled(name, pool):
    case = Case(name, pool)
    y, argmax = case.forward(work(case))
    vectors.close(y, vectors.nhwc(case.ty), case.lengths["y"])
    np.testing.assert_array_equal(argmax == NO_GRADIENT, y == 0)
    dx = case.backward_input(work(case), argmax)
    vectors.close(dx, vectors.nhwc(case.tx.grad), case.lengths["dx"])
    vectors.check_weight_gradients(case, case.backward_weight(work(case), argmax))


def equal(first, second):
    """Assert that arrays are equal to the bit."""
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


BATCHES = [
    ((32, (8, 10, 16), 32, (3, 3), (1, 1), SAME), None),
    ((32, (8, 10, 16), 32, (3, 3), (1, 1), SAME), "2/2"),
    ((32, (9, 7, 20), 24, (3, 3), (1, 1), SAME), "3/2 same"),
    ((32, (5, 6, 32), 24, (3, 3), (1, 1), SAME), None),
    pytest.param(
        (32, (6, 6, 16), 32, (5, 5), (1, 1), ((2, 2), (2, 2))), "3/1", marks=pytest.mark.more
    ),
    ((32, (8, 8, 64), 120, (3, 3), (1, 1), SAME), "2/2"),
    ((32, (9, 9, 16), 16, (3, 3), (1, 1), SAME), None),
    ((32, (6, 7, 20), 30, (3, 3), (1, 1), SAME), "2/2"),
    ((32, (20, 20, 16), 40, (3, 3), (1, 1), SAME), None),
]


@pytest.mark.parametrize(("shape", "pool"), BATCHES, ids=str)
def test_bits_do_not_depend_on_threads_and_other_samples(shape, pool):
    """The first samples of a batch, alone and with any number of threads, give the same bits."""
    whole = Case(shape, pool)
    expected = whole.forward(work(whole, threads=1))
    dx = whole.backward_input(work(whole, threads=1), expected[1])
    for n, threads in ((1, 1), (1, 8), (5, 2), (5, 3), (32, 3), (32, 8)):
        case = Case((n, *shape[1:]), pool)
        case.x, case.dy, case.w, case.b = whole.x[:n], whole.dy[:n], whole.w, whole.b
        results = case.forward(work(case, threads))
        equal(results, [array[:n] for array in expected])
        equal([case.backward_input(work(case, threads), results[1])], [dx[:n]])


def test_few_tiles_are_divided_by_filters_among_threads():
    """Each thread then reads only its part of the transformed weights."""
    shape = Shape((8, 8, 256), (8, 8, 256), (3, 3), (1, 1), (1, 1))
    for batch_size, threads, expected in ((8, 8, 4), (8, 1, 1), (256, 8, 1)):
        for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
            algorithm = winograd.plan(shape, phase, Work(batch_size, threads))
            assert algorithm.geometry.parts == expected
    many = Shape((4, 4, 512), (4, 4, 512), (3, 3), (1, 1), (1, 1))
    assert winograd.plan(many, Phase.FORWARD, Work(128, 16)).geometry.parts > 1


def test_gradients_of_many_channels_are_divided_by_filters_among_threads():
    """The sums of a thread then stay near its core; micro-shards fix their number."""
    few, many = (
        Shape((side, side, c), (side, side, c), (3, 3), (1, 1), (1, 1))
        for side, c in ((32, 64), (4, 512))
    )
    work = Work(128, 16, 16, by_shape=False)
    assert winograd.plan(few, Phase.BACKWARD_WEIGHT, work).rows == 16
    divided = winograd.plan(many, Phase.BACKWARD_WEIGHT, work)
    assert divided.rows < 16
    assert divided.rows * divided.units >= 16
    by_shape = replace(work, by_shape=True)
    assert winograd.plan(many, Phase.BACKWARD_WEIGHT, by_shape).rows == 16


@pytest.mark.parametrize(("shape", "pool"), BATCHES, ids=str)
def test_rows_of_partial_sums_have_the_same_bits_for_any_number_of_threads(shape, pool):
    case = Case(shape, pool)
    _, argmax = case.forward(work(case))
    bounds = np.array([0, 3, 3, 32])
    expected = case.backward_weight(work(case, threads=1, rows=3), argmax, bounds)
    assert not expected[1].any()
    for threads in (2, 3, 8):
        equal([case.backward_weight(work(case, threads, rows=3), argmax, bounds)], [expected])
    # A row does not depend on the other rows, nor on the position of its samples in the batch.
    case.x, case.dy = case.x[3:], case.dy[3:]
    equal([case.backward_weight(work(case, rows=1), argmax[3:])], [expected[2:]])


def test_two_rows_of_partial_sums_have_work_for_eight_threads():
    shape = Shape((12, 12, 64), (12, 12, 64), (3, 3), (1, 1), (1, 1))
    algorithm = winograd.plan(shape, Phase.BACKWARD_WEIGHT, Work(2, 8, 2))
    assert 2 * algorithm.units >= 8


def test_large_maps_need_scratch_for_few_rows():
    """A thread never holds the whole padded maps, nor the whole maps before pooling."""
    maps = (224, 224, 64)
    shape = Shape(maps, maps, (3, 3), (1, 1), (1, 1), 2, halved=True)
    whole = np.prod(maps)
    for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
        algorithm = winograd.plan(shape, phase, Work(1, 8))
        geometry = algorithm.geometry
        assert geometry.sums_offset - geometry.padded_offset < whole / 8
        assert algorithm.units >= 56


def test_small_batches_have_work_for_every_thread():
    shape = Shape((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1))
    for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
        assert winograd.plan(shape, phase, Work(1, 4)).units == 4


@pytest.mark.parametrize("name", with_tiers(["blocks that end in samples", "five"]))
def test_rms_errors_are_as_documented(name):
    """RMS errors are at most 4 times those of PyTorch in float32."""
    case = Case(name)
    y, _ = case.forward(work(case))
    x, w, b = (t.float() for t in (case.tx, case.tw, case.tb))
    padding = CASES[name][5][0][0]
    usual = vectors.nhwc(vectors.functional.conv2d(x, w, b, padding=padding))
    error, usual = (np.sqrt(np.mean((a - vectors.nhwc(case.ty)) ** 2)) for a in (y, usual))
    assert error < 4 * usual


@pytest.mark.parametrize(
    ("taps", "stride", "c", "k", "refusal"),
    [
        (3, 1, 40, 96, ""),
        (3, 1, 16, 12, ""),
        (3, 1, 32, 8, ""),
        (4, 1, 20, 44, "4×4: no Winograd"),
        (3, 1, 16, 8, "16 channels, 8 filters: no Winograd"),
        (3, 2, 64, 64, "stride 2×2: no Winograd"),
        (7, 1, 64, 64, "7×7: no Winograd"),
    ],
)
def test_supported_shapes(taps, stride, c, k, refusal):
    pads = (taps - 1) // 2, (taps - 1) // 2
    shape = Shape((8, 8, c), (8, 8, k), (taps, taps), (stride, stride), pads)
    case = Selected(shape, Phase.FORWARD)
    assert winograd.refusal(case) == refusal
    assert winograd.supports(taps, case) == (not refusal)
