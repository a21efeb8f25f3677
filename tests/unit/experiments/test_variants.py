"""Variants of a network, and what their training says."""

from __future__ import annotations

import csv
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dptrain
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.experiments import study as module
from dptrain.experiments.study import kind_times, study_variants
from dptrain.experiments.variants import UNCHANGED, list_variants
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network
from dptrain.training import trainer
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.settings import GivenSettings, Settings
from tests.tiers import tiered

CONFIG = GivenSettings(network="model-small", data="digits", steps=4, batch_size=8).with_recipe()
AXES = {"stride": ("1", "2"), "first-pool": ("3/1",)}


def defined_in(heading: str) -> set[str]:
    """Names in the first column of a table of docs/reference/bench.md."""
    text = (Path(dptrain.__file__).parents[1] / "docs/reference/bench.md").read_text(
        encoding="utf-8"
    )
    section = text[text.index(heading) + len(heading) :].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return {name for line in lines for name in re.findall("`([a-z0-9_]+)`", line.split("|")[1])}


def layers_of(network: Network | None, kind: type) -> list[Any]:
    assert network is not None
    return [layer for layer in network.layers if isinstance(layer, kind)]


def test_layers_that_cannot_have_a_value_make_a_variant_impossible() -> None:
    layers = [Conv2d(8), Conv2d(8, groups=8), Conv2d(12, groups=4), Flatten(), Dense(3)]
    network = Network((3, 9, 9), layers)
    variants = list_variants(network, {"filters": ("5", "16"), "width": ("2", "0.3")})
    names = [UNCHANGED, "filters 5", "filters 16", "width 2", "width 0.3"]
    assert [v.name for v in variants] == names
    assert [v.network is None for v in variants] == [False, True, False, False, True]
    assert variants[1].why == (
        "conv has 5 filters in 4 groups; expected a multiple of the number of groups"
    )
    # Depthwise convolutions stay depthwise.
    assert [conv.groups for conv in layers_of(variants[2].network, Conv2d)] == [1, 16, 4]
    with pytest.raises(UserError, match="--filters has the value 'x'"):
        list_variants(network, {"filters": ("x",)})


def test_each_change_alone() -> None:
    cifar = dptrain.get_network("cifar")
    axes = {"stride": ("1", "2", "3", "5"), "filters": ("64", "32"), "kernel": ("5", "3"),
            "pool": ("3", "5"), "first-pool": ("5/4",)}  # fmt: skip
    variants = list_variants(cifar, axes)
    # 64 filters, kernel 5, stride 1 and windows of 3 are what the network has.
    assert [v.name for v in variants] == [
        UNCHANGED, "stride 2", "stride 3", "stride 5", "filters 32", "kernel 3", "pool 5",
        "first-pool 5/4",
    ]  # fmt: skip
    by_name = {v.name: v.network for v in variants}
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


def test_changes_combined() -> None:
    variants = list_variants(
        dptrain.get_network("cifar"), {"filters": ("64", "32"), "stride": ("1", "2")}, cross=True
    )
    names = [v.name for v in variants]
    assert names == [UNCHANGED, "stride 1, filters 32", "stride 2, filters 64",
                     "stride 2, filters 32"]  # fmt: skip
    assert len({v.slug for v in variants}) == 4


def test_what_is_not_possible_is_said() -> None:
    *_, variant = list_variants(dptrain.get_network("model0"), {"stride": ("2",)})
    assert variant.network is None
    assert "is not a whole number" in variant.why
    *_, variant = list_variants(dptrain.get_network("model0"), {"kernel": ("40",)})
    assert "kernel 40 is larger than the input" in variant.why


@pytest.mark.parametrize(
    ("network", "axes", "message"),
    [
        ("model0", {"stride": ("0",)}, "--stride has the value '0'; expected whole numbers"),
        ("model0", {"pool": ("3/x",)}, "--pool has the value 'x'; expected .* window/stride"),
        ("mlp-50", {"kernel": ("3",)}, "--kernel 3: the network has no convolution"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    network: str, axes: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        list_variants(dptrain.get_network(network), axes)


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
        # The signal comes before the first step of the second variant.
        jobs.append(assemble(*arguments, **options))
        if len(jobs) == 2:
            signal.raise_signal(number)
        return jobs[-1]

    monkeypatch.setattr(trainer, "assemble", assemble_and_stop)
    stopped = study_variants(CONFIG, AXES, tmp_path, World.single())
    assert stopped["stopped"]
    assert [result["possible"] for result in stopped["results"]] == [True, False]
    found = study_variants(CONFIG, AXES, tmp_path, World.single())
    assert not found["stopped"]
    assert [job.first_step for job in jobs] == [0, 0, 1]
    results = {result["variant"]: result for result in found["results"]}
    assert list(results) == [UNCHANGED, "stride 2", "first-pool 3/1"]
    assert not results["stride 2"]["possible"]
    for name in (UNCHANGED, "first-pool 3/1"):
        result = results[name]
        assert result["steps"] == 4
        assert 0.0 <= result["accuracy"] <= 1.0
        assert 0.0 < result["conv_forward_ms"] < result["conv_step_ms"]
        assert 0.0 < result["conv_step_share"] < 1.0
    # A larger map after the first pooling: more parameters in the first dense layer, more memory.
    base, larger = results[UNCHANGED], results["first-pool 3/1"]
    assert larger["parameters"] > base["parameters"]
    assert larger["memory_bytes"] > base["memory_bytes"]
    again = study_variants(CONFIG, AXES, tmp_path, World.single())
    assert again["results"] == found["results"]
    json.dumps(again)
    rows = list(csv.DictReader((tmp_path / "variants.csv").read_text().splitlines()))
    assert [row["variant"] for row in rows] == list(results)
    assert rows[2]["changes"] == "first-pool=3/1"
    kinds = list(csv.DictReader((tmp_path / "kinds.csv").read_text().splitlines()))
    assert {kind["kind"] for kind in kinds} == {"conv+relu+pool", "dense+relu", "dense"}
    assert {*rows[0], *kinds[0]} == defined_in("## Of a line in variants.csv, or in kinds.csv")
    assert (tmp_path / "accuracy-by-time.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "stride 2: network model-small-stride-2, layer 1 (conv1)" in text
    assert "contains all 3 variants" in text
    # Training prints its progress; the study prints the results.
    assert "Where a step goes" not in text
    assert "summary.json" not in text
    longer = replace(CONFIG, steps=5)
    with pytest.raises(UserError, match="measured with steps 4, but this command has 5;"):
        study_variants(longer, AXES, tmp_path, World.single())


@pytest.mark.more
def test_a_killed_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GivenSettings(
        network="model-small", data="digits", steps=4, batch_size=8, checkpoint_every=2
    ).with_recipe()
    world = World.single()
    whole = study_variants(config, {}, tmp_path / "whole", world, verbose=False)

    class KilledError(Exception):
        pass

    save = RunDirectory.save_checkpoint

    def save_and_die(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", save_and_die)
        with pytest.raises(KilledError):
            study_variants(config, {}, tmp_path / "killed", world, verbose=False)
    resumed = study_variants(config, {}, tmp_path / "killed", world, verbose=False)
    assert [run.name for run in (tmp_path / "killed/runs").iterdir() if run.is_dir()] == [
        "unchanged"
    ]
    assert resumed["results"][0]["steps"] == 4
    assert resumed["results"][0]["test_loss"] == whole["results"][0]["test_loss"]


def test_a_variant_whose_training_fails_does_not_end_the_study(tmp_path: Path) -> None:
    train = module._Runs.train

    def train_or_fail(runs: Any, variant: Any) -> dict[str, Any]:
        if variant.name != UNCHANGED:
            raise UserError("the loss is nan at step 3")
        return train(runs, variant)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Runs, "train", train_or_fail)
        found = study_variants(CONFIG, {"filters": ("2",)}, tmp_path, World.single(), verbose=False)
    assert [r["possible"] for r in found["results"]] == [True, False]
    assert found["results"][1]["why"] == "the loss is nan at step 3"


def test_what_is_wrong_with_the_first_variant_ends_the_study(tmp_path: Path) -> None:
    config = GivenSettings(network="model-small", data="mnist:nowhere", steps=4).with_recipe()
    with pytest.raises(UserError, match="nowhere does not exist"):
        study_variants(config, AXES, tmp_path, World.single(), verbose=False)


def on_an_emulated_gpu(**changes: Any) -> Settings:
    """A small training whose layers are timed in some steps only."""
    return GivenSettings(
        network="mlp-5", data="irradiance?samples=64", backend="cuda", batch_size=8, **changes
    ).with_recipe()


@pytest.mark.more
def test_a_study_without_steps_timed_by_layer_is_refused(tmp_path: Path) -> None:
    """On a device only some steps are timed by layer, and none of the first."""
    problem = r"none of the 10 steps was timed by layer.* use --steps 20"
    with pytest.raises(UserError, match=problem):
        study_variants(on_an_emulated_gpu(steps=10), {}, tmp_path, World.single(), verbose=False)


@pytest.mark.more
def test_a_run_with_too_few_steps_left_to_time_its_layers_is_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_an_emulated_gpu(steps=24, checkpoint_every=20)
    save, world = RunDirectory.save_checkpoint, World.single()

    def save_and_die(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", save_and_die)
        with pytest.raises(KeyError):
            study_variants(config, {}, tmp_path, world, verbose=False)
    (found,) = study_variants(config, {}, tmp_path, world, verbose=False)["results"]
    assert (found["possible"], found["steps"]) == (True, 24)
    assert found["step_ms"] > 0
    names = sorted(run.name for run in (tmp_path / "runs").iterdir() if run.is_dir())
    assert names == ["unchanged", "unchanged-2"]
