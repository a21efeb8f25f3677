"""Arithmetic of the benchmark: what it makes of the times it is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dptrain
from benchmarks.comparison import Comparison, flops
from benchmarks.kinds import kind_of
from benchmarks.machine import cache_bytes, caches
from benchmarks.report import Results, as_json, as_markdown, headline
from benchmarks.stages import StageResult, bytes_of
from benchmarks.targets import Target
from benchmarks.timing import Times, ratio, take_turns
from dptrain.files import dump_json, parse_json
from dptrain.plan.lowering import Phase

pytestmark = pytest.mark.more


def times(*milliseconds: float, block: int = 1) -> Times:
    array = np.array([round(1e6 * value) for value in milliseconds], np.int64)
    return Times(array, 2 * array, block)


def test_ratio_and_its_quartiles_are_over_blocks() -> None:
    slow, fast = times(30, 30, 90, 30, 60, 60, block=2), times(10, 10, 30, 10, 15, 15, block=2)
    found = ratio(slow, fast)
    # The medians of the blocks are 30/10, 60/20 and 60/15.
    assert found.value == pytest.approx(3.0)
    assert (found.low, found.high) == pytest.approx((3.0, 3.5))


def test_a_spike_in_one_block_changes_neither_ratio_nor_quartiles() -> None:
    calm = times(*[10] * 8)
    assert ratio(times(*[30] * 7, 3000), calm) == ratio(times(*[30] * 8), calm)


def test_programs_take_turns_and_are_timed_often_enough() -> None:
    calls: list[str] = []
    programs = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = take_turns(programs, 25, warm_up=1)
    block = found["a"].block
    assert all(len(found[name].cpu) >= 25 for name in "ab")
    assert calls[2:] == (["a"] * block + ["b"] * block) * (len(found["a"].cpu) // block)


@pytest.mark.parametrize(
    ("target", "figure", "verdict"),
    [
        (Target(3.0), 3.0, "reached"),
        (Target(3.0), 2.61, "0.87 of target"),
        (Target(3.0), 2.9999, "0.99 of target"),
        (Target(15.0, at_most=True), 14.0, "reached"),
        (Target(15.0, at_most=True), 30.0, "0.50 of target"),
    ],
)
def test_verdicts(target: Target, figure: float, verdict: str) -> None:
    assert target.verdict(figure) == verdict


def test_every_stage_has_the_limit_of_its_kind() -> None:
    plan = dptrain.make_replica(
        dptrain.get_network("model0"), backend="reference", batch_size=2
    ).plan
    kinds = {(stage.group, stage.phase): kind_of(plan, stage) for stage in plan.stages}
    convolutions = {group.head.name: group.name for group in plan.groups}
    for phase in (Phase.FORWARD, Phase.BACKWARD_WEIGHT):
        assert kinds[convolutions["conv1"], phase] == "first convolution"
        assert kinds[convolutions["conv2"], phase] == "convolution"
        assert kinds[convolutions["dense1"], phase] == "dense"
    alone = {("input", Phase.LOAD), ("loss", Phase.LOSS), ("update", Phase.UPDATE)}
    assert {kinds[key] for key in alone} == {"memory"}


def test_loading_counts_what_it_reads() -> None:
    plan = dptrain.make_replica(
        dptrain.get_network("model0"), backend="reference", batch_size=2
    ).plan
    load, *others = plan.stages
    assert bytes_of(load) == 2 * load.bytes_moved
    assert all(bytes_of(stage) == stage.bytes_moved for stage in others)


def test_training_takes_about_three_times_the_operations_of_inference() -> None:
    network = dptrain.get_network("model0")
    share = flops(network, 4, training=True) / flops(network, 4, training=False)
    # Less than 3, for the input's gradient is not computed.
    assert 2.5 < share < 3.0


def test_caches_without_those_of_instructions(tmp_path: Path) -> None:
    for i, (level, kind) in enumerate([("1", "Data"), ("1", "Instruction"), ("2", "Unified")]):
        (tmp_path / f"index{i}").mkdir()
        for name, text in (("level", level), ("type", kind), ("size", "48K")):
            (tmp_path / f"index{i}" / name).write_text(text + "\n")
    assert caches(tmp_path) == ["L1 48K", "L2 48K"]
    assert cache_bytes(tmp_path, "2") == 49152
    assert caches(tmp_path / "missing") == []
    assert cache_bytes(tmp_path / "missing", "2") is None


def results() -> Results:
    comparison = Comparison(
        "model0", 32, "training", "eager", {"eager": 6.0}, {}, times(*[2] * 4), times(*[6.2] * 4),
        flops=3 * 10**8, peak=2e11,
    )  # fmt: skip
    stage = StageResult(
        "model0",
        32,
        "conv1.forward",
        "convolution",
        5 * 10**7,
        10**6,
        500.0,
        (490.0, 510.0),
        0.25,
        1e11,
        2e11,
        0.5,
    )
    return Results({"date": "2026-01-02T03:04"}, comparisons=[comparison], stages=[stage])


def test_report_names_what_is_reached_and_what_is_not() -> None:
    lines = headline(results())
    assert "1 of 1 training steps reach" in lines
    assert "0 of 1 convolution stages reach 80%" in lines
    text = as_markdown(results())
    # 6.2 ms against 300 MFLOP at 200 GFLOP/s, 1.5 ms.
    assert "| 3.10 (3.10–3.10) | 3.10 | 4.13 | ≥ 3.0 | reached |" in text
    assert "| 50% | ≥ 80% | 0.62 of target |" in text


def test_json_is_read_back() -> None:
    read = parse_json(dump_json(as_json(results())))
    assert read["comparisons"][0]["ratio"] == pytest.approx(3.1)
    assert read["stages"][0]["share_of_limit"] == 0.5
