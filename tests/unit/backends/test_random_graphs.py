"""Random graphs: what the planner shares, adds, copies and omits, compared with PyTorch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.network import LAYERS, Concatenate, Flatten, Network, NodeSpec
from dptrain.network.network import INPUT
from dptrain.plan.plan import Plan, Stage, make_plan
from tests.fuzz import networks
from tests.fuzz.networks import BATCH_SIZE, random_network
from tests.unit.backends import cases
from tests.unit.backends.cuda.gemm_tile import use_one_gemm_tile

COVERED = 400
"""Seeds whose networks together have every layer and every number of readers of the input."""


def _variants(counts: dict[str, int]) -> list[object]:
    """Seeds, backends and precisions; the emulator is slow."""
    return [
        pytest.param(
            seed, backend, precision, id=f"{seed}-{backend}-{precision}",
            marks=[] if seed < counts[backend] else [pytest.mark.more],
        )
        for backend, precision in cases.variants()
        for seed in range(3 * counts[backend])
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def one_gemm_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_gemm_tile(monkeypatch)


def test_the_networks_have_all_layers_and_up_to_four_readers_of_the_input() -> None:
    found = [random_network(seed) for seed in range(COVERED)]
    readers = {sum(node.inputs.count(INPUT) for node in each.nodes) for each in found}
    assert readers == {1, 2, 3, 4}
    expected = {cls for kind, cls in LAYERS.items() if kind not in networks.STEPPED}
    assert {type(layer) for each in found for layer in each.layers} == expected
    assert {each.loss.targets for each in found} == {"classes", "binary", "values"}


@pytest.mark.parametrize(
    ("seed", "backend", "precision"),
    _variants({"reference": 12, "numba": 12, "cuda": 2, "cudnn": 2}),
)
def test_training_and_evaluation_equal_pytorch(seed: int, backend: str, precision: str) -> None:
    assert networks.trial(seed, backend, precision) is None


def test_a_wrong_gradient_is_reported() -> None:
    """The comparison itself: a change of 1% of the largest gradient is no rounding."""
    problem = networks.random_problem(3)
    exact = networks.exact_numbers(problem)
    exact = {**exact, networks.EVALUATED: exact[networks.OUTPUT]}
    name = next(iter(problem.parameters))
    for precision in ("fp64", "fp32"):
        assert networks._judge(problem, exact, [exact], precision) == networks.Comparison()
        largest = max(np.abs(exact[each]).max() for each in problem.parameters)
        changed = {**exact, name: exact[name] + 0.01 * largest}
        found = networks._judge(problem, exact, [changed], precision)
        assert found.error is not None
        assert name in found.error


def _readers(plan: Plan, stage: Stage, name: str) -> list[Stage]:
    return [each for each in plan.stages[stage.index + 1 :] if name in each.reads]


@pytest.mark.parametrize(("backend", "precision"), cases.variants())
def test_every_input_gradient_that_a_stage_writes_is_read(backend: str, precision: str) -> None:
    """Plans only, so that many networks take little time."""
    lowering = load_backend(backend)
    for seed in range(25):
        plan = make_plan(random_network(seed), lowering, BATCH_SIZE, precision=precision)
        trained = {f"d{name}" for group in plan.groups for name in group.inputs}
        untrained = {
            f"d{name}"
            for group in plan.groups
            for local, name in group.tensors.items()
            if local in group.untrained
        }
        assert plan.buffers.keys().isdisjoint(untrained), seed
        names = {plan.resolve(name) for name in trained - untrained}
        # A group may replace the gradient of its own output.
        own = {group.name: plan.tensor_name(group, "dy") for group in plan.groups}
        for stage in plan.stages:
            for name in names.intersection(stage.writes) - {own.get(stage.group)}:
                assert _readers(plan, stage, name), (seed, stage.name, name)


@pytest.mark.parametrize("backend", ["reference", "numba", "cuda", "cudnn"])
def test_the_first_layer_may_concatenate_the_input_with_itself(backend: str) -> None:
    nodes = [NodeSpec(Concatenate(), "both", (INPUT, INPUT)), NodeSpec(Flatten())]
    nodes = [*nodes, NodeSpec(networks.Dense(3))]
    problem = networks.random_problem(1, Network.from_nodes((4, 3, 2), nodes))
    precision = next(iter(load_backend(backend).precisions))
    assert networks.compare(problem, backend, precision) == networks.Comparison()


def test_bindings_follow_the_stages_of_the_plan() -> None:
    """A replica asks a backend for the phases that the plan lists, and for no others."""
    lowering = load_backend("null")
    network = random_network(7)
    plan = make_plan(network, lowering, BATCH_SIZE)
    shorter = dataclasses.replace(plan, stages=plan.stages[:3])
    stages = [stage for stage, _ in lowering.make_replica(shorter).stages]
    assert stages == [stage for stage in shorter.stages if stage.group != INPUT]
