"""Products whose configuration was measured."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.outside import find_network
from benchmarks.step import measured as table
from benchmarks.step.measured import Times
from dptrain.backends.cuda import measured
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.convolution.convolution import Convolution
from dptrain.backends.cuda.dense.dense import DenseGemm, label
from dptrain.backends.cuda.device.hardware import DEVICES
from dptrain.backends.cuda.tuning import tune
from dptrain.plan.lowering import Group, Phase
from dptrain.plan.plan import Plan, make_plan, with_selection
from dptrain.plan.selection import MEASURED, RankedSelection
from tests.devices.planned import PlannedDevice
from tests.tiers import tiered


def planned(network: str, precision: str, batch_size: int) -> tuple[CudaBackend, Plan]:
    backend = CudaBackend(PlannedDevice(DEVICES["H200"]))
    return backend, make_plan(find_network(network), backend, batch_size, precision=precision)


def test_the_measured_candidate_comes_first_with_the_lowest_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, "rows", lambda: {"product": "b", "old": "removed"})
    ranked = [(3.0, "b"), (1.0, "a"), (2.0, "c")]
    h200, a100 = DEVICES["H200"], DEVICES["A100"]
    by_estimate = [(1.0, "a"), (2.0, "c"), (3.0, "b")]
    assert measured.measured_first(ranked, "product", h200) == [(1.0, "b"), (1.0, "a"), (2.0, "c")]
    assert measured.measured_first(ranked, "unknown", h200) == by_estimate
    assert measured.measured_first(ranked, "old", h200) == by_estimate
    assert measured.measured_first(ranked, "product", a100) == by_estimate
    fewer = replace(h200, multiprocessors=114)
    assert measured.measured_first(ranked, "product", fewer) == by_estimate


SELECTED = [
    ("model0", "bf16", 32), ("resnet20", "tf32", 256), ("resnet18", "bf16", 128),
    ("resnet50", "bf16", 256), ("mobilenet-v1", "bf16", 32), ("alexnet", "tf32", 32),
]  # fmt: skip


@pytest.mark.parametrize(("network", "precision", "batch_size"), tiered(SELECTED, SELECTED[:2]))
def test_plans_use_what_was_measured(network: str, precision: str, batch_size: int) -> None:
    """A row names a configuration that is selected, and the explanation says so."""
    backend, plan = planned(network, precision, batch_size)
    found = missing = 0
    for group in plan.groups:
        names = measured_names(backend, plan, group)
        explained = backend.explain(group, plan.setting) if names else {}
        for phase, name in names.items():
            is_selected = explained[phase].tile.startswith(name)
            assert (explained[phase].reason == MEASURED) == is_selected
            found += is_selected
            missing += not is_selected
    assert found >= 3
    # A tile is ranked with one split-K only, which depends on more than the label.
    assert missing <= 0.05 * found


def measured_names(backend: CudaBackend, plan: Plan, group: Group) -> dict[Phase, str]:
    """Return the measured configurations of the products of a group."""
    operation = backend.operation(group, plan.setting)
    if operation is Convolution:
        choices = Convolution.choices(group, plan.setting)
        labels = {phase: case.label for phase, (case, _) in choices.items()}
    elif issubclass(operation, DenseGemm):
        phases = operation.configs(group, plan.setting)
        labels = {phase: label(group, plan.setting, phase) for phase in phases}
    else:
        return {}
    names = {p: measured.measured_name(each, DEVICES["H200"]) for p, each in labels.items()}
    return {phase: name for phase, name in names.items() if name is not None}


@pytest.mark.more
@pytest.mark.parametrize("network", ["resnet18-cifar", "strided"])
def test_measurements_start_from_what_training_uses(network: str) -> None:
    """Before all groups are known, other candidates may have the lowest estimates."""
    backend, plan = planned(network, "bf16", 64)
    found = tune(backend, plan, budget_s=1e9, time_kernel=lambda replica, kernel: [1.0])
    first = RankedSelection(rank=0)
    assert with_selection(plan, backend, first).buffers == plan.buffers
    names = {stage: all_[0].name for stage, all_ in found.stages.items()}
    compared = 0
    for group in plan.groups:
        operation = backend.operation(group, plan.setting)
        if operation is Convolution:
            for phase, (_, choice) in Convolution.choices(group, plan.setting).items():
                assert names[group.stage(phase)] == str(choice)
                compared += 1
        elif issubclass(operation, DenseGemm):
            for phase, config in operation.configs(group, plan.setting).items():
                assert names.get(group.stage(phase), str(config)) == str(config)
    assert compared > 5


def test_rows_contain_what_gains_and_replace_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    first = [
        Times("p", "a", {"a": 1.0, "b": 0.9}), Times("p", "a", {"a": 0.95, "b": 0.8}),
        Times("q", "a", {"a": 1.0, "b": 0.98}), Times("r", "a", {"a": 2.0, "b": 1.0}),
        Times("s", "not measured", {"a": 1.0, "b": 0.5}),
    ]  # fmt: skip
    found = table.rows(first)
    assert found == {"p": ("b", pytest.approx(0.95 / 0.8)), "q": None, "r": ("b", 2.0), "s": None}
    assert table.write(path, found) == 2
    later = table.rows([Times("r", "a", {"a": 1.0, "b": 1.0}), Times("t", "a", {"a": 3, "c": 1})])
    assert table.write(path, later) == 2
    with path.open(newline="") as file:
        written = [tuple(row.values()) for row in csv.DictReader(file)]
    assert written == [("p", "b", "1.19"), ("t", "c", "3.00")]


def test_the_table_is_sorted_and_has_one_row_for_each_product() -> None:
    with measured.FILE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    labels = [row["product"] for row in rows]
    assert len(labels) > 100
    assert labels == sorted(set(labels))
    assert all(float(row["gain"]) >= 1.03 for row in rows)
