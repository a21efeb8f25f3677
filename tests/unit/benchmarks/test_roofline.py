"""The picture of stages under their roofs."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.limits import Roofs
from benchmarks.report import Results, write
from benchmarks.roofline import main, points_of, short_name
from benchmarks.stages import StageResult

pytestmark = pytest.mark.more

# 100 GFLOP/s; 100 GB/s within an L2 of 1 MB, 10 GB/s beyond.
ROOFS = Roofs("model0", 32, peak=1e11, cache_bytes=10**6, cache=1e11, memory=1e10)


def stage(
    name: str, flops: int, bytes_moved: int, time_us: float, share: float, kind: str = "dense"
) -> StageResult:
    work, limit = (bytes_moved, 8e10) if kind == "memory" else (flops, 1e11)
    rate = 1e6 * work / time_us
    return StageResult(
        "model0", 32, name, kind, flops, bytes_moved, time_us, (time_us, time_us), share,
        rate, limit, rate / limit,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flops", "bytes_moved", "allowed"),
    [
        (10**9, 10**5, 1e11),
        (10**5, 10**6, 1e10),
        # The same FLOP/byte, but beyond L2.
        (2 * 10**5, 2 * 10**6, 1e9),
        # Where the slanted roof meets the flat one.
        (2 * 10**7, 2 * 10**6, 1e11),
    ],
)
def test_a_roof_is_the_lower_of_peak_and_bandwidth(
    flops: int, bytes_moved: int, allowed: float
) -> None:
    assert ROOFS.over(flops, bytes_moved) == pytest.approx(allowed)


def test_points_say_how_far_a_stage_is_from_its_roof() -> None:
    stages = [
        stage("conv1+relu1.forward", 10**8, 10**6, 2000.0, 0.75),
        stage("input.load", 0, 10**6, 10.0, 0.05, "memory"),
        stage("update", 10**5, 10**6, 11.0, 0.2, "memory"),
    ]
    first, second = points_of(ROOFS, stages)
    assert (first.intensity, first.gflop_per_s) == pytest.approx((100.0, 50.0))
    assert first.share_of_roof == pytest.approx(0.5)
    assert second.share_of_roof == pytest.approx(10 / 11)
    assert (first.at_roof, second.at_roof) == (False, True)
    assert first.label == "conv1 forward  75% · 50%"


def test_short_names() -> None:
    assert short_name("conv1+relu1+pool1.backward_weight") == "conv1 backward weight"
    assert short_name("update") == "update"


def test_results_are_drawn_and_drawn_again_the_same(tmp_path: Path) -> None:
    stages = [
        stage("conv1.forward", 10**8, 10**6, 2000.0, 0.6),
        stage("update", 10**5, 10**6, 100.0, 0.33),
        stage("loss", 10**3, 10**6, 100.0, 0.07),
    ]
    results = Results({"date": "2026-01-02T03:04"}, stages=stages, roofs=[ROOFS])
    path, _, figure = write(results, tmp_path)
    assert figure.name == "cpu-2026-01-02-roofline-32.svg"
    drawn = figure.read_bytes()
    words = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    # The loss is 7% of the step: a point without a name.
    assert "conv1 forward  60% · 50%" in words
    assert not any(word.startswith("loss") for word in words)
    figure.unlink()
    assert CliRunner().invoke(main, [str(path)]).exit_code == 0
    assert figure.read_bytes() == drawn


def test_results_without_stages_have_no_picture(tmp_path: Path) -> None:
    path, _ = write(Results({"date": "2026-01-02T03:04"}), tmp_path)
    done = CliRunner().invoke(main, [str(path)])
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
