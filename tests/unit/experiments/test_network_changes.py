"""Sweeps over changes of a network, and what their training says."""

from __future__ import annotations

import csv
import json
import random
import re
import signal
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import dptrain
from dptrain.cli.study import EXAMPLES
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.experiments import sweep, sweep_cases
from dptrain.experiments.case_runs import CaseRuns
from dptrain.experiments.network_changes import AXES, change_layers
from dptrain.experiments.sweep_cases import UNCHANGED, Case, Design, list_cases, point_name
from dptrain.experiments.sweep_results import PointResult, kind_times
from dptrain.experiments.sweep_tables import sweep_table
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network
from dptrain.network.files import write_network
from dptrain.training import trainer
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.settings import load_settings
from tests.tiers import tiered

SMALL = {"network": "model-small", "data": "digits", "steps": "4", "batch_size": "8",
         "baseline_steps": "0"}  # fmt: skip
CHANGES = {"stride": ("1", "2"), "first-pool": ("3/1",)}


def study(
    axes: Mapping[str, Sequence[str]], folder: Path, *, verbose: bool = False, **flags: str
) -> Any:
    """Train the unchanged network and each change alone."""
    chosen = {**SMALL, **flags}
    design = Design(axes, (0,), one_at_a_time=True, has_unchanged=True)
    return sweep.run_sweep(lambda r: load_settings({**chosen, **r}, {}), design, folder,
                           World.single(), verbose=verbose)  # fmt: skip


@pytest.fixture
def cases_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the cases of a network that needs no data."""

    def cases(network: Network, axes: Mapping[str, Sequence[str]], *, cross: bool = False) -> Any:
        monkeypatch.setattr(sweep_cases, "open_network", lambda *_: network)
        design = Design(axes, (0,), one_at_a_time=not cross, has_unchanged=True)
        return list_cases(lambda r: load_settings({**SMALL, **r}, {}), design)

    return cases


def names_of(cases: Sequence[Case]) -> list[str]:
    return [point_name(case.point) for case in cases]


def documented() -> set[str]:
    """Return the columns that docs/how-to/runs.md defines."""
    text = (Path(dptrain.__file__).parents[1] / "docs/how-to/runs.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return {name for line in lines for name in re.findall("`([a-z0-9_]+)`", line.split("|")[1])}


def layers_of(network: Network | None, kind: type) -> list[Any]:
    assert network is not None
    return [layer for layer in network.layers if isinstance(layer, kind)]


def test_layers_that_cannot_have_a_value_make_a_point_impossible(cases_of: Any) -> None:
    layers = [Conv2d(8), Conv2d(8, groups=8), Conv2d(12, groups=4), Flatten(), Dense(3)]
    network = Network((3, 9, 9), layers)
    cases = cases_of(network, {"filters": ("5", "16"), "width": ("2", "0.3")})
    assert names_of(cases) == [UNCHANGED, "filters 5", "filters 16", "width 2", "width 0.3"]
    assert [case.network is None for case in cases] == [False, True, False, False, True]
    assert cases[1].why == (
        "conv has 5 filters in 4 groups; expected a multiple of the number of groups"
    )
    # Depthwise convolutions stay depthwise.
    assert [conv.groups for conv in layers_of(cases[2].network, Conv2d)] == [1, 16, 4]
    with pytest.raises(UserError, match="filters has the value 'x'"):
        cases_of(network, {"filters": ("x",)})


def test_each_change_alone(cases_of: Any) -> None:
    cifar = dptrain.get_network("cifar")
    axes = {"stride": ("1", "2", "3", "5"), "filters": ("64", "32"), "kernel": ("5", "3"),
            "pool": ("3", "5"), "first-pool": ("5/4",)}  # fmt: skip
    cases = cases_of(cifar, axes)
    # 64 filters, kernel 5, stride 1 and windows of 3 are what the network has.
    assert names_of(cases) == [
        UNCHANGED, "stride 2", "stride 3", "stride 5", "filters 32", "kernel 3", "pool 5",
        "first-pool 5/4",
    ]  # fmt: skip
    by_name = {point_name(case.point): case.network for case in cases}
    assert by_name[UNCHANGED] == cifar
    assert [conv.stride for conv in layers_of(by_name["stride 3"], Conv2d)] == [3, 3]
    assert [conv.filters for conv in layers_of(by_name["filters 32"], Conv2d)] == [32, 32]
    pools = layers_of(by_name["pool 5"], MaxPool2d)
    assert [(pool.window, pool.stride) for pool in pools] == [(5, 2), (5, 2)]
    pools = layers_of(by_name["first-pool 5/4"], MaxPool2d)
    assert [(pool.window, pool.stride) for pool in pools] == [(5, 4), (3, 2)]
    # Everything that is not changed is as it was, initial values included.
    before, after = layers_of(cifar, Conv2d)[1], layers_of(by_name["stride 3"], Conv2d)[1]
    assert (after.weight_init, after.bias_init) == (before.weight_init, before.bias_init)


def test_changes_combined(cases_of: Any) -> None:
    axes = {"filters": ("64", "32"), "stride": ("1", "2")}
    cases = cases_of(dptrain.get_network("cifar"), axes, cross=True)
    assert names_of(cases) == [UNCHANGED, "filters 64, stride 2", "filters 32, stride 1",
                               "filters 32, stride 2"]  # fmt: skip
    assert len({case.slug for case in cases}) == 4


def test_the_order_of_changes_has_no_effect() -> None:
    """A change of the first pooling follows that of all, whatever the order of the axes."""
    cifar = dptrain.get_network("cifar")
    values = {"filters": "32", "width": "0.5", "pool": "4", "first-pool": "5/4", "kernel": "3"}
    assert set(values) < set(AXES)
    expected = change_layers(cifar, values)
    for seed in range(20):
        names = random.Random(seed).sample(list(values), len(values))
        assert change_layers(cifar, {name: values[name] for name in names}) == expected


@pytest.mark.parametrize("seed", range(30))
def test_a_design_has_each_point_once_and_trains_each_network_once(
    seed: int, cases_of: Any
) -> None:
    random_ = random.Random(seed)
    values = {"stride": "12", "filters": "48", "kernel": "35", "pool": "34"}
    axes = {name: random_.sample(values[name], random_.randint(1, 2))
            for name in random_.sample(list(values), random_.randint(1, 3))}  # fmt: skip
    network, cross = dptrain.get_network("model-small"), random_.random() < 0.5
    cases = cases_of(network, axes, cross=cross)
    points = Design(axes, (0,), not cross, has_unchanged=True).points()
    count = 1
    for own in axes.values():
        count *= len(own)
    assert len(points) == 1 + (count if cross else sum(map(len, axes.values())))
    assert [case.point for case in cases if case.point not in points] == []
    assert cases[0].network == network
    trained = [repr(case.network.layers) for case in cases if case.network is not None]
    assert len(trained) == len(set(trained))


def test_what_is_not_possible_is_said(cases_of: Any) -> None:
    *_, case = cases_of(dptrain.get_network("model0"), {"stride": ("2",)})
    assert case.network is None
    assert "is not a whole number" in case.why
    *_, case = cases_of(dptrain.get_network("model0"), {"kernel": ("40",)})
    assert "kernel 40 is larger than the input" in case.why


@pytest.mark.parametrize(
    ("network", "axes", "message"),
    [
        ("model0", {"stride": ("0",)}, "stride has the value '0'; expected whole numbers"),
        ("model0", {"pool": ("3/x",)}, "pool has the value 'x'; expected .* window/stride"),
        ("mlp-50", {"kernel": ("3",)}, "kernel 3: the network has no convolution"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    network: str, axes: dict[str, tuple[str, ...]], message: str, cases_of: Any
) -> None:
    with pytest.raises(UserError, match=message):
        cases_of(dptrain.get_network(network), axes)


def stage(kind: str, phase: str, ms: float, nbytes: int) -> dict[str, Any]:
    return {"kind": kind, "phase": phase, "time_ms": {"median": ms}, "bytes_moved": nbytes}


def test_kinds_are_sorted_by_time_and_add_up() -> None:
    stages = [
        stage("input", "load", 1.0, 9),
        stage("conv+relu", "forward", 2.0, 10),
        stage("dense", "forward", 5.0, 20),
        stage("conv+relu", "forward", 1.0, 30),
        stage("conv+relu", "backward_weight", 4.0, 50),
        stage("conv+relu", "backward_input", 3.0, 50),
    ]
    dense, conv = kind_times(stages)
    assert (dense.kind, dense.forward_ms, dense.share, dense.forward_bytes) == (
        "dense",
        5,
        0.625,
        20,
    )
    assert (conv.kind, conv.forward_ms, conv.backward_ms) == ("conv+relu", 3, 7)
    assert conv.cumulative_share == pytest.approx(1.0)
    assert conv.forward_bytes == 40


@pytest.mark.parametrize("number", tiered([signal.SIGINT, signal.SIGTERM], []))
def test_a_stopped_study_continues(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assemble, jobs = trainer.assemble, []

    def assemble_and_stop(*arguments: Any, **options: Any) -> Any:
        # The signal comes before the first step of the second point.
        jobs.append(assemble(*arguments, **options))
        if len(jobs) == 2:
            signal.raise_signal(number)
        return jobs[-1]

    monkeypatch.setattr(trainer, "assemble", assemble_and_stop)
    stopped = study(CHANGES, tmp_path, verbose=True)
    assert stopped["stopped"]
    assert [result["runs"] for result in stopped["results"]] == [1, 0, 0]
    found = study(CHANGES, tmp_path, verbose=True)
    assert not found["stopped"]
    assert [job.first_step for job in jobs] == [0, 0, 1]
    base, refused, larger = found["results"]
    assert [r["stride"] + r["first-pool"] for r in (base, refused, larger)] == ["", "2", "3/1"]
    assert (refused["runs"], refused["score"]) == (0, None)
    assert "is not a whole number" in refused["why"]
    for result in (base, larger):
        assert (result["runs"], result["failed"], result["why"]) == (1, 0, "")
        assert 0.0 <= result["score"] <= 1.0
        assert 0.0 < result["conv_forward_ms"] < result["conv_step_ms"]
        assert 0.0 < result["conv_step_share"] < 1.0
        assert result["step_q1_ms"] <= result["step_ms"] <= result["step_q3_ms"]
    # A larger map after the first pooling: more parameters in the first dense layer, more memory.
    assert larger["parameters"] > base["parameters"]
    assert larger["memory_bytes"] > base["memory_bytes"]
    again = study(CHANGES, tmp_path, verbose=True)
    assert again["results"] == found["results"]
    json.dumps(again)
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert [row["first-pool"] for row in rows] == ["", "", "3/1"]
    kinds = list(csv.DictReader((tmp_path / "kinds.csv").read_text().splitlines()))
    assert {kind["kind"] for kind in kinds} == {"conv+relu+pool", "dense+relu", "dense"}
    assert {*rows[0], *kinds[0]} - set(CHANGES) <= documented()
    assert (tmp_path / "accuracy-by-time.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "stride 2: network model-small, layer 1 (conv1)" in text
    assert "0 runs to train (2 are trained already)" in text
    # Training prints its progress; the sweep prints the results.
    assert "Where a step goes" not in text
    assert "summary.json" not in text
    with pytest.raises(UserError, match="measured with steps 4, but this command has 5;"):
        study(CHANGES, tmp_path, steps="5")


def test_the_step_of_a_point_is_the_median(tmp_path: Path) -> None:
    """Its name and the table say median; the mean of few steps contains the first, slow ones."""
    [result] = study({}, tmp_path)["results"]
    summary = json.loads((tmp_path / "runs/seed=0/summary.json").read_text())
    assert result["step_ms"] == summary["step_ms"]["median"]
    assert result["training_s"] == summary["steps"] * summary["step_ms"]["median"] / 1e3


def test_a_network_file_that_changed_needs_another_folder(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    text = dptrain.get_network("model-small")
    write_network(text, file)
    study({}, tmp_path / "out", network=str(file))
    write_network(change_layers(text, {"filters": "4"}), file)
    with pytest.raises(UserError, match="was measured with network files"):
        study({}, tmp_path / "out", network=str(file))


@pytest.mark.more
def test_a_killed_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = study({}, tmp_path / "whole", checkpoint_every="2")

    class KilledError(Exception):
        pass

    save = RunDirectory.save_checkpoint

    def save_and_die(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", save_and_die)
        with pytest.raises(KilledError):
            study({}, tmp_path / "killed", checkpoint_every="2")
    resumed = study({}, tmp_path / "killed", checkpoint_every="2")
    assert [run.name for run in (tmp_path / "killed/runs").iterdir() if run.is_dir()] == ["seed=0"]
    assert resumed["results"][0]["runs"] == 1
    assert resumed["results"][0]["score"] == whole["results"][0]["score"]


def test_a_point_whose_training_fails_does_not_end_the_sweep(tmp_path: Path) -> None:
    train = CaseRuns.train

    def train_or_fail(runs: Any, name: str, *arguments: Any) -> dict[str, Any]:
        if not name.startswith(UNCHANGED):
            raise UserError("the loss is nan at step 3")
        return train(runs, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaseRuns, "train", train_or_fail)
        found = study({"filters": ("2",)}, tmp_path)["results"]
    assert [(r["runs"], r["failed"]) for r in found] == [(1, 0), (0, 1)]
    assert found[1]["why"] == "the loss is nan at step 3"


def test_what_is_wrong_with_the_first_point_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        study(CHANGES, tmp_path, data="mnist:nowhere")


@pytest.mark.more
def test_a_device_without_steps_timed_by_stage_has_no_times_by_operation(tmp_path: Path) -> None:
    """On a device only some steps are timed by stage, and none of the first."""
    [result] = study({}, tmp_path, network="mlp-5", data="irradiance?samples=64", backend="cuda",
                     steps="10")["results"]  # fmt: skip
    assert result["runs"] == 1
    assert result["score"] is not None
    assert (result["conv_forward_ms"], result["kinds"]) == (None, [])


def _examples() -> list[tuple[str, str, list[str]]]:
    """Return network, change and values in the examples of `dptrain study`."""
    found = []
    for line in EXAMPLES.splitlines():
        words = line.split()
        network = words[words.index("--network") + 1] if "--network" in words else "model0"
        pairs = [(w.removeprefix("--").replace("-", "_"), v) for w, v in pairwise(words)]
        pairs += [tuple(w.split("=")) for w in words if "=" in w]
        found += [(network, name, value.split(",")) for name, value in pairs if name in AXES]
    return found


def test_the_examples_of_the_help_are_possible() -> None:
    examples = _examples()
    assert len(examples) >= 8
    for network, name, values in examples:
        for value in values:
            change_layers(dptrain.get_network(network), {name: value})


@pytest.mark.parametrize(
    ("points", "title"),
    [
        ([{}, {"stride": "2"}], "Variants of the network"),
        ([{"stride": "2", "seed": "1"}], "Points of the sweep"),
        ([{"learning_rate": "0.1"}], "Points of the sweep"),
    ],
)
def test_a_table_of_variants_is_called_so(points: list[dict[str, str]], title: str) -> None:
    results = [
        PointResult(point, 1, 0, None, "", step_ms=1.0, training_s=1.0, memory_bytes=1.0)
        for point in points
    ]
    assert sweep_table(results).title == title
