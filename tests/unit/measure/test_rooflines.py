"""Shares of the roofline are at most 1: what counts is needed, and the limits are bounds."""

from __future__ import annotations

import timeit
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from dptrain.backends import load_backend
from dptrain.measure.profile.explanations import algorithms
from dptrain.measure.profile.profile import Profile, Roofs
from dptrain.measure.profile.profile_lines import profile_report
from dptrain.measure.profile.rooflines import highest_roofs, least_products, least_work, with_roofs
from dptrain.measure.roofs import _host_sizes
from dptrain.native.bandwidth import bandwidths
from dptrain.native.caches import cache_bytes
from dptrain.network.layers import Conv2d, Dense, Flatten
from dptrain.network.network import Network, Node
from dptrain.network.zoo import NETWORKS, build_network
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import make_plan
from tests.unit.scaling.synthetic import Law, make_profile

BATCH = 4
CAPACITIES, RATES = (10_000, 200_000, 5_000_000), (500.0, 100.0, 40.0, 9.0)
"""Bytes of the caches of a made-up machine, and GB/s of these and of memory."""


def time_ms(nbytes: float) -> float:
    """Return the least time to read data of which each cache holds as much as it can."""
    found, start = 0.0, 0.0
    for stop, rate in zip((*CAPACITIES, np.inf), RATES, strict=True):
        found += max(min(nbytes, stop) - start, 0.0) / rate
        start = stop
    return found / 1e6


def measured_roofs() -> Roofs:
    """Return the limits of that machine: repeated passes over data that one cache holds whole."""
    sizes = [1 << power for power in range(13, 25)]
    levels = np.searchsorted(CAPACITIES, sizes)
    rates = tuple((size, RATES[level]) for size, level in zip(sizes, levels, strict=True))
    return Roofs(100.0, RATES[-1], "made up", rates)


def multiply_adds(node: Node, algorithm: str) -> float:
    """Count the multiply-adds of a sample, one by one, or those of Winograd's tiles."""
    layer = node.layer
    if isinstance(layer, Dense):
        return float(np.prod(node.input_shape)) * layer.units
    assert isinstance(layer, Conv2d)
    (top, bottom), (left, right) = layer.pads(node.input_shape)
    channels, height, width = node.input_shape
    channels //= layer.groups
    if "F(" in algorithm:
        m = int(algorithm[algorithm.index("F(") + 2])
        tile = m + layer.window[0] - 1
        tiles = np.prod([-(-size // m) for size in node.output_shape[1:]])
        return float(tiles * tile**2 * channels * layer.filters)
    padded = np.pad(np.ones((height, width), np.int64), ((top, bottom), (left, right)))
    windows = sliding_window_view(padded, layer.extents)[:: layer.strides[0], :: layer.strides[1]]
    _, rows, columns = node.output_shape
    taps = windows[:rows, :columns, :: layer.dilations[0], :: layer.dilations[1]]
    return float(taps.sum()) * channels * layer.filters


@pytest.mark.parametrize("name", [*NETWORKS, "classifier-32"])
def test_no_stage_of_the_zoo_counts_more_than_its_algorithm_computes(name: str) -> None:
    plan = make_plan(build_network(name), load_backend("numba"), BATCH, threads=2)
    found = algorithms(plan)
    products = (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT)
    counted = 0
    for stage in plan.stages:
        flops, moved = least_work(plan, stage, found.get(stage.name, ""))
        assert 0 <= flops <= stage.flops
        assert 0 < moved <= stage.bytes_moved
        members = [n for group in plan.groups if group.name == stage.group for n in group.nodes]
        heads = [node for node in members if isinstance(node.layer, Conv2d | Dense)]
        if heads and stage.phase in products:
            computed = sum(multiply_adds(node, found.get(stage.name, "")) for node in heads)
            assert flops <= 2 * BATCH * computed * (1 + 1e-12), stage.name
            counted += 1
        # Any time that the machine allows is at least the least time by its measured limits.
        roofs = measured_roofs()
        allowed = max(flops / roofs.gflops / 1e6, time_ms(moved))
        assert roofs.least_ms(flops, moved) <= allowed * (1 + 1e-12)
    assert counted


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2, (3, 2), 5])
def test_a_dilated_convolution_counts_the_products_inside_the_map(
    stride: int, dilation: int | tuple[int, int]
) -> None:
    layer = Conv2d(4, 3, stride, 2, rounding="floor", dilation=dilation, bias=False)
    network = Network((3, 11, 10), [layer, Flatten()])
    plan = make_plan(network, load_backend("reference"), BATCH)
    (stage,) = (stage for stage in plan.stages if stage.phase is Phase.FORWARD)
    flops, moved = least_work(plan, stage, "")
    assert flops == 2 * BATCH * multiply_adds(network.nodes[0], "")
    assert moved <= stage.bytes_moved


def test_the_limits_bound_data_of_any_size() -> None:
    roofs = measured_roofs()
    for nbytes in np.exp(np.random.default_rng(0).uniform(0, np.log(1e9), 2000)):
        assert roofs.moving_ms(nbytes) <= time_ms(nbytes) * (1 + 1e-12)
    # And not far below: main memory limits large data.
    assert roofs.moving_ms(1e9) > 0.8 * time_ms(1e9)


def test_the_smallest_measured_data_fit_the_first_cache_of_each_thread() -> None:
    for threads, ranks in ((1, 1), (2, 1), (8, 4)):
        sizes = _host_sizes(threads, ranks)
        assert sizes[0] <= threads * cache_bytes(1) // 2
        assert list(sizes) == sorted(set(sizes))


def test_data_in_a_cache_are_not_slower_than_a_call_of_numpy() -> None:
    """The time of the call is no part of a bandwidth: it hid that caches are faster."""
    size = 1 << 13
    source, target = np.ones((2, size // 16))
    ((_, rate),) = bandwidths([size], threads=1)
    copying = min(timeit.repeat(lambda: np.copyto(target, source), number=100, repeat=20)) / 100
    assert rate > 1.5 * size / copying / 1e9


def profiled(**changes: Any) -> Profile:
    """Return a profile on four cores whose stages have an arithmetic intensity of FLOP / byte."""
    profile = make_profile(Law(cores=4), ranks=1, batch_size=32)
    stages = tuple(
        replace(s, least_flops=s.flops, least_bytes=s.bytes_moved) for s in profile.stages
    )
    memory = {**profile.memory, "total": 10**7}
    return replace(profile, stages=stages, memory=memory, **changes)


def text_of(profile: Profile) -> str:
    return "\n".join(map(str, profile_report(profile)))


HIGH = Roofs(1e6, 1e6, "made up")


def test_shares_of_sufficient_limits_are_shown() -> None:
    found = with_roofs(profiled(other_cores=0.1), HIGH)
    assert all(0 < stage.roofline_share <= 1 for stage in (*found.stages, *found.kinds))
    assert found.shares_withheld == ""
    assert "no shares" not in text_of(found)


@pytest.mark.parametrize(
    ("other_cores", "roofs", "reason"),
    [
        (1.4, HIGH, "other programs used 1.4 cores"),
        (0.1, replace(HIGH, withheld="peaks differ"), "peaks differ"),
        (0.1, Roofs(1.0, 1e6, "made up"), "less time than the measured limits allow"),
    ],
)
def test_shares_of_uncertain_limits_are_withheld_with_the_reason(
    other_cores: float, roofs: Roofs, reason: str
) -> None:
    found = with_roofs(profiled(other_cores=other_cores), roofs)
    assert all(stage.roofline_share is None for stage in (*found.stages, *found.kinds))
    text = text_of(found)
    assert "roofline: no shares, because" in text
    assert reason in found.shares_withheld
    assert reason in text


def test_profiles_of_older_versions_keep_their_shares() -> None:
    old = make_profile(Law(), ranks=1, batch_size=32)
    assert with_roofs(old, Roofs(1.0, 1.0, "made up")) == old


def test_the_limits_of_a_study_are_the_highest_of_its_launches() -> None:
    slow = Roofs(50.0, 9.0, "slow", ((8, 30.0), (16, 20.0)), withheld="peaks differ")
    fast = Roofs(100.0, 8.0, "fast", ((8, 25.0), (32, 8.0)))
    found = highest_roofs([slow, fast])
    assert (found.gflops, found.gb_per_s, found.how) == (100.0, 9.0, "fast")
    assert found.copies == ((8, 30.0), (16, 20.0), (32, 8.0))
    assert found.withheld == ""
    # A peak that no undisturbed launch confirms is uncertain.
    assert highest_roofs([replace(fast, withheld="peaks differ"), slow]).withheld
    assert highest_roofs([fast, replace(slow, gflops=120.0)]).withheld


def test_an_algorithm_with_an_unknown_number_of_products_counts_none() -> None:
    assert least_products("WINOGRAD_NONFUSED") == least_products("FFT") == 0
    assert least_products("Winograd F(2×2, 5×5)") == pytest.approx(36 / 100)
