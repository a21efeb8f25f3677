"""Frozen parameters in plans: their stages, buffers and slots, and the patterns that name them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.backends import load_backend
from dptrain.errors import UserError
from dptrain.network import get_network
from dptrain.plan import SGD, make_buckets
from dptrain.plan.flat import ALIGNMENT
from dptrain.plan.freezing import rate_factors
from dptrain.plan.lowering import BACKWARD_ORDER, GRADIENT_PHASES, STATISTICS_PHASES, Phase
from dptrain.plan.plan import Plan, make_plan
from tests.fuzz.networks import BATCH_SIZE, random_freeze, random_network

BACKENDS = ("reference", "numba", "cuda", "cudnn")
RESNET = get_network("resnet20")


def plan_of(network: str, backend: str, freeze: str, **options: object) -> Plan:
    rule = SGD(momentum=0.9, clip_norm=1.0, freeze=freeze)
    lowering = load_backend(backend)
    return make_plan(get_network(network), lowering, 8, optimizer=rule, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_output_layer_alone_needs_the_memory_of_inference(backend: str) -> None:
    head, inference = (
        plan_of("resnet20", backend, "all-but-head", training=training)
        for training in (True, False)
    )
    backward = [stage.name for stage in head.stages if stage.phase in BACKWARD_ORDER]
    assert backward == ["fc.backward_weight"]
    assert {stage.phase for stage in head.stages}.isdisjoint(STATISTICS_PHASES)
    assert [slot.name for slot in head.trained.slots] == ["fc.weight", "fc.bias"]
    assert len(head.layout.slots) == len(RESNET.parameters)
    size = head.trained.size
    assert head.memory["gradients"] == (size + ALIGNMENT) * head.itemsize
    assert head.memory["optimizer"] == size * head.itemsize + 8 * (size // ALIGNMENT)
    assert head.arena_bytes < 0.6 * plan_of("resnet20", backend, "").arena_bytes
    assert [group.name for group in head.groups] == [group.name for group in inference.groups]


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=st.integers(0, 10**6))
def test_stages_and_slots_are_those_of_trained_parameters(backend: str, seed: int) -> None:
    network = random_network(seed)
    freeze = random_freeze(seed, network)
    rule = SGD(momentum=0.9, freeze=freeze)
    plan = make_plan(network, load_backend(backend), BATCH_SIZE, optimizer=rule)
    trained = {name for name, factor in rate_factors(network, rule).items() if factor}
    assert {slot.name for slot in plan.trained.slots} == trained
    finished = [n for s in plan.stages if s.phase in GRADIENT_PHASES for n in s.parameters]
    assert sorted(finished) == sorted(trained)
    assert make_buckets(plan)[-1].stop == plan.layout.gradient_size
    groups = {group.name: group for group in plan.groups}
    for stage in plan.stages:
        if stage.phase in (Phase.STATISTICS, *BACKWARD_ORDER):
            assert groups[stage.group].trained, stage.name
    # The slots of gradients that are not read are within the pitch, after the sums.
    for slot in plan.layout.slots:
        if plan.layout.has_gradient(slot):
            start = plan.layout.gradient_start(slot)
            assert start + slot.parameter.size <= plan.layout.gradient_pitch
            is_read = start < plan.trained.size
            assert is_read == (slot.name in trained)


def test_a_frozen_first_part_is_not_computed_again() -> None:
    plan = plan_of("resnet20", "numba", "conv1,bn1,layer1.*,layer2.*", recompute=True)
    again = {stage.group for stage in plan.stages if stage.phase is Phase.BACKWARD_RECOMPUTE}
    assert all(name.startswith("layer3.") for name in again)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SGD(freeze="layr1.*"), r"--freeze: 'layr1\.\*' matches no layer with .*'layer1\.\*' or"),
        (SGD(freeze="relu"), "--freeze: 'relu' matches no layer with parameters"),
        (SGD(rate_factor="fcc=2"), "--rate-factor: 'fcc' matches no .*; did you mean 'fc'"),
        (SGD(freeze="zzz"), "its layers are conv1, bn1, layer1.0.conv1, layer1.0.bn1, …"),
        (SGD(freeze="*"), r"--freeze \* freezes all parameters of network resnet20; leave some"),
        (SGD(rate_factor="fc=0"), "--rate-factor has 'fc=0'; expected PATTERN=FACTOR with a fact"),
        (SGD(rate_factor="fc"), "--rate-factor has 'fc'; expected PATTERN=FACTOR"),
        (SGD(rate_factor="fc=nan"), "--rate-factor has 'fc=nan'; expected PATTERN=FACTOR"),
    ],
)
def test_wrong_patterns_are_named(rule: SGD, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rate_factors(RESNET, rule)


def test_patterns_match_layers_and_parameters() -> None:
    def frozen(freeze: str) -> set[str]:
        factors = rate_factors(RESNET, SGD(freeze=freeze))
        return {name for name, factor in factors.items() if not factor}

    names = {parameter.name for parameter in RESNET.parameters}
    assert frozen("") == set()
    assert frozen("conv1, bn1") == {"conv1.weight", "bn1.weight", "bn1.bias"}
    assert frozen("*.bias") == {name for name in names if name.endswith(".bias")}
    assert frozen("layer1.*") == {name for name in names if name.startswith("layer1.")}
    assert frozen("all-but-head") == names - {"fc.weight", "fc.bias"}
