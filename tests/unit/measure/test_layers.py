"""Rows of layers side by side: every stage is in one of them, whatever a backend fuses."""

from __future__ import annotations

import json

import pytest

from dptrain.backends import load_backend
from dptrain.cli.main import run
from dptrain.measure.layers import BACKWARD, FORWARD, StageTime, _rows, layers_table, time_layers
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
    assert {row["layers"] for row in rows} >= {"conv2+relu2+pool2", "dense2", "loss", "update"}


def test_the_first_backend_is_compared_with_the_others() -> None:
    rows = time_layers(get_network("mlp-5"), ["numba", "reference"], batch_size=2)
    table = layers_table(rows, "title")
    assert [column.heading for column in table.columns][2:] == [
        "numba µs",
        "reference µs",
        "numba GFLOP/s",
        "numba / reference",
    ]
    first = rows[0].by_backend
    ratio = first["numba"].median / first["reference"].median
    assert table.texts[0][-1] == f"{ratio:.2f}"


def test_what_cannot_be_timed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layers", "mlp-5", "--precision", "fp8"], is_rank_zero=True) == 2
    assert "has no precision 'fp8'" in capsys.readouterr().err
