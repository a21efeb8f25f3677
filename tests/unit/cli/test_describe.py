"""`dptrain describe`: its numbers are the plan's, and nothing is allocated for them."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dptrain.backends import load_backend
from dptrain.cli.main import cli
from dptrain.describe import describe_plan, group_stages, list_networks, list_presets, plan_for
from dptrain.network import GELU, Conv2d, Dense, Flatten, Network, ReLU, get_network
from dptrain.network.files import write_network
from dptrain.network.zoo import NETWORKS
from dptrain.plan import SGD, Adam, make_plan


def described(*arguments: str) -> Any:
    result = CliRunner().invoke(cli, ["describe", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.output)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("name", ["model0", "cifar", "solar", "mlp-50-25"])
def test_layers_and_stages_count_the_same_operations(name: str, backend: str) -> None:
    plan = plan_for(get_network(name), backend=backend, batch_size=8)
    found = describe_plan(plan)
    layers, groups = found["layers"], group_stages(found["stages"])
    loss = next(stage["flops"] for stage in found["stages"] if stage["name"] == "loss")
    update = next(stage["flops"] for stage in found["stages"] if stage["name"] == "update")
    forward = sum(group["forward_flops"] for group in groups) - loss - update
    assert forward == 8 * sum(layer["forward_flops"] for layer in layers)
    backward = sum(group["backward_flops"] for group in groups)
    assert backward == 8 * sum(layer["backward_flops"] for layer in layers)
    assert sum(layer["parameters"] for layer in layers) == found["parameters"]


@pytest.mark.parametrize("backend", ["numba", "cuda", "reference"])
def test_groups_below_a_third_of_the_roofline_are_marked_by_estimates(backend: str) -> None:
    """Four filters fill a quarter of a vector, and no backend estimates activations."""
    layers = [Conv2d(64), ReLU(), Conv2d(64, dilation=2), Conv2d(4, dilation=2), GELU(), Flatten()]
    network = Network((64, 32, 32), [*layers, Dense(3)])
    found = describe_plan(plan_for(network, backend=backend, batch_size=64))
    for stage in found["stages"]:
        share = stage["estimated_roofline_share"]
        assert stage["is_low"] == (share is not None and share < 1 / 3)
        assert share is None or 0 < share <= 1
    marked = {group["group"]: group["is_low"] for group in group_stages(found["stages"])}
    is_estimated = backend != "reference"
    assert any(stage["estimated_roofline_share"] for stage in found["stages"]) == is_estimated
    assert marked["conv3"] == is_estimated
    assert not marked["gelu1"]
    if backend == "numba":
        assert not marked["conv2"]


def test_the_roofline_is_the_lower_one_of_two_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Conv2d(8, 1), Conv2d(64), Conv2d(4, 1), Flatten(), Dense(3)]
    plan = plan_for(Network((64, 32, 32), layers), backend="cuda", batch_size=64)
    backend = type(load_backend("cuda"))

    def shares(gflops: float, gb_per_s: float) -> dict[str, float]:
        found = (gflops, ((0, gb_per_s),))
        monkeypatch.setattr(backend, "estimated_roofs", lambda *_: found)
        stages = describe_plan(plan)["stages"]
        names = ("name", "estimated_roofline_share")
        return {name: share for name, share in ([row[each] for each in names] for row in stages)
                if share is not None}  # fmt: skip

    high = 1e12
    by_arithmetic, by_memory = shares(1e5, high), shares(high, 4e3)
    assert {by_arithmetic[name] > by_memory[name] for name in by_memory} == {True, False}
    for name, share in shares(1e5, 4e3).items():
        assert share == pytest.approx(max(by_arithmetic[name], by_memory[name]))


def test_a_mark_is_explained(tmp_path: Path) -> None:
    for filters, is_marked in ((4, True), (16, False)):
        path = tmp_path / f"{filters}.toml"
        write_network(Network((16, 32, 32), [Conv2d(filters, dilation=2), Flatten()]), path)
        text = CliRunner().invoke(cli, ["describe", str(path)], catch_exceptions=False).output
        assert ("conv1 !" in text) == is_marked
        assert ("! marks groups with a stage that is estimated" in text) == is_marked


def test_memory_is_what_a_replica_allocates() -> None:
    plan = plan_for(get_network("model-small"), backend="reference", batch_size=4, optimizer="adam")
    memory = describe_plan(plan)["memory_bytes"]
    replica = load_backend("reference").make_replica(plan, seed=0)
    assert memory["parameters"] == replica.flat_parameters.nbytes
    assert memory["gradients"] == replica.flat_gradients.nbytes
    assert memory["optimizer"] == sum(state.nbytes for state in replica.flat_state.values())
    assert memory["total"] == sum(memory.values()) - memory["total"]


def test_choices_reach_the_plan() -> None:
    found = described(
        "model0", "--backend", "reference", "--precision", "fp32", "--batch-size", "7",
        "--threads", "3", "--optimizer", "adam",
    )  # fmt: skip
    plan = make_plan(
        get_network("model0"), load_backend("reference"), 7, precision="fp32", optimizer=Adam(),
        threads=3,
    )  # fmt: skip
    assert found == describe_plan(plan)
    assert plan_for(get_network("model0"), backend="reference", batch_size=1).optimizer == SGD(
        momentum=0.9
    )


def test_inference_needs_no_gradients() -> None:
    found = described("model0", "--inference")
    assert set(found["memory_bytes"]) == {"parameters", "buffers", "total"}
    assert found["memory_bytes"]["total"] < described("model0")["memory_bytes"]["total"]
    assert "backward" not in CliRunner().invoke(cli, ["describe", "model0", "--inference"]).output


def test_what_does_not_fit_is_described_all_the_same() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = described("mlp-25600-12800-6656", "--batch-size", "100000000", "--optimizer", "adam")
    assert found["memory_bytes"]["total"] > 1e12
    # KiB; planning itself takes next to nothing, one parameter array would take 1.7 million.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_and_hold_the_numbers(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = CliRunner().invoke(cli, ["describe", "cifar", "--batch-size", "128"])
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "cifar: 3×24×24 → 10, softmax_cross_entropy, 1,068,298 parameters"
    row = next(line for line in lines if line.split()[:1] == ["dense1"])
    assert row.split()[1:3] == ["384", "885,120"]
    assert any(line.split()[:2] == ["conv1+relu1+pool1", "727.843"] for line in lines)


def test_files_are_described_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    write_network(get_network("model0"), path)
    assert described(str(path)) == described("model0")


def test_without_a_name_all_networks_are_listed() -> None:
    assert described() == {"networks": list_networks(), "presets": list_presets()}
    text = CliRunner().invoke(cli, ["describe"]).output
    lines = [line.split() for line in text.splitlines()]
    for name in NETWORKS:
        assert sum(words[:1] == [name] for words in lines) == 1


@pytest.mark.more
def test_a_pipe_cuts_no_names() -> None:
    text = (
        CliRunner()
        .invoke(cli, ["layers", "model-small", "--batch-size", "2", "--backend", "reference"])
        .output
    )
    text += CliRunner().invoke(cli, ["describe", "cifar"]).output
    assert "…" not in text
    assert "conv1+relu1+pool1" in text
