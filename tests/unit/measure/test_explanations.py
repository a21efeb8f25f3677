"""`dptrain layers --explain`: the algorithm of each stage, and why it was selected."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from dptrain.backends import load_backend
from dptrain.cli.main import run
from dptrain.describe import plan_for
from dptrain.measure.profile.explanations import UNKNOWN, explain_stages, explanation_table
from dptrain.network import Conv2d, Dense, Flatten, Network, ReLU, get_network
from dptrain.plan.plan import with_selection
from dptrain.plan.selection import MEASURED, KernelSelection, RankedSelection

STRIDED = Network((16, 33, 33), [Conv2d(24, 3, stride=2), ReLU(), Flatten(), Dense(10)])


def stages(network: Network, **choices: object) -> dict[tuple[str, str], object]:
    plan = plan_for(network, **{"backend": "numba", "batch_size": 4, **choices})  # type: ignore[arg-type]
    return {(row.layers, row.phase): row for row in explain_stages(plan)}


@pytest.mark.parametrize("precision", ["fp32", "fp32-direct"])
def test_the_precision_without_winograd_is_the_reason(precision: str) -> None:
    found = stages(get_network("model2"), precision=precision)
    row = found["conv2+relu2+pool2", "forward"]
    winograd = precision == "fp32"
    assert row.algorithm == ("Winograd F(4×4, 3×3)" if winograd else "implicit GEMM")
    assert ("excludes Winograd" in row.reason) is not winograd


def test_a_stride_is_the_reason_for_direct_convolution() -> None:
    row = stages(STRIDED)["conv1+relu1", "backward_weight"]
    assert row.algorithm == "implicit GEMM"
    assert "stride 2×2" in row.reason


def test_units_follow_from_batch_size_and_threads() -> None:
    few = stages(STRIDED, batch_size=1, threads=8)["conv1+relu1", "forward"]
    many = stages(STRIDED, batch_size=8, threads=8)["conv1+relu1", "forward"]
    assert few.units == "1 sample × 8 bands"
    assert many.units == "8 samples × 1 band"


def test_every_stage_of_a_network_is_explained() -> None:
    plan = plan_for(get_network("cifar"), backend="numba", batch_size=2)
    names = {f"{row.layers}.{row.phase}" for row in explain_stages(plan)}
    assert names == {s.name for s in plan.stages if s.group in {g.name for g in plan.groups}}
    assert all(row.algorithm and row.reason for row in explain_stages(plan))


def test_a_backend_that_selects_on_the_device_says_so() -> None:
    plan = plan_for(get_network("model0"), backend="cudnn", batch_size=2)
    rows = {f"{row.layers}.{row.phase}": row for row in explain_stages(plan)}
    [row] = [
        row for name, row in rows.items() if name.startswith("conv1") and name.endswith(".forward")
    ]
    assert row.reason == UNKNOWN.reason


def test_kernels_of_a_gpu_are_explained_without_one() -> None:
    plan = plan_for(get_network("cifar"), backend="cuda", batch_size=2, precision="tf32")
    assert {row.reason for row in explain_stages(plan)} == {
        "lowest estimated time", "the only kernel",
    }  # fmt: skip
    ranked = RankedSelection()
    with_selection(plan, load_backend("cuda"), ranked)
    stage = "conv2+relu2+lrn2+pool2.forward"
    name = str(ranked.found[stage][1][1])
    for names in ((stage, name), (stage, "of another version")):
        setting = replace(plan.setting, selection=KernelSelection((names,), MEASURED))
        [row] = [
            row for row in explain_stages(replace(plan, setting=setting))
            if f"{row.layers}.{row.phase}" == stage
        ]  # fmt: skip
        assert row.algorithm in ("halo-tile implicit GEMM", "wgmma GEMM")
        assert (row.reason == MEASURED) == (names[1] == name)
        assert row.tile.startswith(name) == (names[1] == name)


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_fits_the_terminal(width: int) -> None:
    plan = plan_for(get_network("model2"), backend="numba", batch_size=32, threads=24)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(explanation_table(plan, explain_stages(plan)))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert text.count("forward") == sum(row.phase == "forward" for row in explain_stages(plan))


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--explain", "--batch-size", "1", "--threads", "4", "--json"]
    assert run(["layers", "model-small", *options], is_rank_zero=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["threads"] for row in rows} == {4}
    assert {"algorithm", "tile", "units", "reason", "layers", "phase"} <= set(rows[0])
