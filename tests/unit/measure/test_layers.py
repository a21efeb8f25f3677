"""Rows of layers side by side: every stage is in one of them, whatever a backend fuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dptrain.backends import load_backend
from dptrain.cli.main import run
from dptrain.measure.layers import (
    BACKWARD,
    FORWARD,
    StageTime,
    TimedLayers,
    _rows,
    _with_least,
    layers_table,
    time_layers,
)
from dptrain.measure.profile.explanations import algorithms
from dptrain.measure.profile.profile import Roofs
from dptrain.measure.profile.rooflines import least_work
from dptrain.network import get_network
from dptrain.plan import Phase, make_plan


def test_rows_end_where_every_backend_ends_a_group() -> None:
    """Numba computes conv, ReLU and pooling as one, reference each alone."""
    plans = {
        name: make_plan(get_network("model-small"), load_backend(name), 4, precision="fp32")
        for name in ("numba", "reference")
    }
    times = {
        name: {stage.name: StageTime(2.0, 1.0, 3.0) for stage in plan.stages}
        for name, plan in plans.items()
    }
    rows = _rows(plans, times)
    assert [row.layers for row in rows[:2]] == ["conv1+relu1+pool1"] * 2
    assert [row.direction for row in rows[:2]] == [FORWARD, BACKWARD]
    for name, plan in plans.items():
        stages = [stage for stage in plan.stages if stage.phase is not Phase.LOAD]
        counted = [row.by_backend[name] for row in rows if name in row.by_backend]
        assert sum(alone.median for alone in counted) == 2.0 * len(stages)
        assert sum(alone.low for alone in counted) == len(stages)
    total = sum(row.flops for row in rows)
    assert total == max(sum(stage.flops for stage in plan.stages) for plan in plans.values())


@pytest.mark.more
def test_the_command_times_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--backends", "numba,reference", "--precision", "fp32"]
    assert (
        run(["layers", "model-small", *options, "--batch-size", "2", "--json"], is_rank_zero=True)
        == 0
    )
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        for alone in row["by_backend"].values():
            assert 0 < alone["low"] <= alone["median"] <= alone["high"]
            share = alone["roofline_share"]
            assert alone["is_low"] == (share is not None and share < 1 / 3)
    assert {row["layers"] for row in rows} >= {"conv2+relu2+pool2", "dense2", "loss", "update"}


def test_the_first_backend_is_compared_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dptrain.measure.layers.measure_roofs", lambda *_: LIMITS)
    timed = time_layers(get_network("mlp-5"), ["numba", "reference"], batch_size=2)
    table = layers_table(timed, "title")
    assert [column.heading for column in table.columns][2:] == [
        "numba µs",
        "reference µs",
        "numba GFLOP/s",
        "numba / reference",
    ]
    first = timed.rows[0].by_backend
    ratio = first["numba"].median / first["reference"].median
    assert table.texts[0][-1] == f"{ratio:.2f}"


def test_what_cannot_be_timed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layers", "mlp-5", "--precision", "fp8"], is_rank_zero=True) == 2
    assert "has no precision 'fp8'" in capsys.readouterr().err


LIMITS = Roofs(100.0, 10.0, "assumed")


def timed_at(share: float, roofs: Roofs = LIMITS) -> TimedLayers:
    """Return the layers of a network whose stages all reach a share of the roofline."""
    plan = make_plan(get_network("model-small"), load_backend("numba"), 4)
    least = {
        stage.name: roofs.least_ms(*least_work(plan, stage, algorithms(plan).get(stage.name, "")))
        for stage in plan.stages
    }
    times = {name: StageTime(*[time / share or 1.0] * 3) for name, time in least.items()}
    found, limits = _with_least(plan, times, roofs)
    return TimedLayers(tuple(_rows({"numba": plan}, {"numba": found})), {"numba": limits})


@pytest.mark.parametrize(("share", "is_marked"), [(0.3, True), (0.4, False)])
def test_times_of_less_than_a_third_of_the_roofline_are_marked(
    share: float, is_marked: bool
) -> None:
    timed = timed_at(share)
    assert timed.rows
    table = layers_table(timed, "title")
    assert [row[2].endswith(" !") for row in table.texts[:-1]] == [is_marked] * len(timed.rows)
    assert table.note.startswith("! marks times of more than three times the roofline") == is_marked
    for row in timed.values():
        assert row["by_backend"]["numba"]["roofline_share"] == pytest.approx(share)
        assert row["by_backend"]["numba"]["is_low"] == is_marked


def test_uncertain_limits_mark_nothing() -> None:
    """Neither if a stage is faster than they allow, nor if their measurements differ."""
    for timed, reason in (
        (timed_at(1.1), "took less time than the measured limits allow"),
        (timed_at(0.1, replace(LIMITS, withheld="they differ")), "they differ"),
    ):
        table = layers_table(timed, "title")
        assert "!" not in str(table.texts)
        assert "No time on numba is compared with the roofline, because" in table.note
        assert reason in table.note
        assert all(not row["by_backend"]["numba"]["is_low"] for row in timed.values())
