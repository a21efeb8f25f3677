"""Plans that compute activations again in the backward pass."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.network import Conv2d, Dense, Flatten, Network, ReLU, get_network
from dptrain.plan.lowering import Group, Phase
from dptrain.plan.plan import Plan, make_plan
from dptrain.plan.recomputation import SECOND, Recomputer

REFERENCE = load_backend("reference")


def plan_of(network: Network, batch_size: int, *, recompute: bool = True) -> Plan:
    return make_plan(network, REFERENCE, batch_size, precision="fp32", recompute=recompute)


@pytest.fixture(scope="module")
def resnet() -> Network:
    return get_network("resnet20")


def test_cuts_are_the_outputs_of_residual_blocks(resnet: Network) -> None:
    plan = plan_of(resnet, 4, recompute=False)
    needs = {group.name: REFERENCE.needs(group, plan.setting) for group in plan.groups}

    def buffer_of(group: Group, local: str) -> str:
        return plan.tensor_name(group, local)

    recomputer = Recomputer(plan.groups, needs, frozenset(), buffer_of)
    cuts = [plan.groups[position].tail for position in recomputer.cuts()]
    readers = dict.fromkeys((node.name for node in resnet.nodes), 0)
    for node in resnet.nodes:
        for name in node.inputs:
            readers[name] = readers.get(name, 0) + 1
    # Within a block, the shortcut is live. After its end, two layers read its output.
    ends = [node.name for node in cuts if readers[node.name] > 1]
    assert len(ends) == 9
    assert all(node.layer == ReLU() for node in cuts if node.name in ends)


def test_memory_shrinks_and_the_forward_pass_runs_once_more_at_most(resnet: Network) -> None:
    kept, again = (plan_of(resnet, 16, recompute=r) for r in (False, True))
    assert again.arena_bytes < 0.4 * kept.arena_bytes
    forward = sum(stage.flops for stage in kept.stages if stage.phase is Phase.FORWARD)
    added = sum(stage.flops for stage in again.stages) - sum(stage.flops for stage in kept.stages)
    assert 0 < added <= forward
    assert again.memory["buffers"] == again.arena_bytes


def test_statistics_are_computed_once(resnet: Network) -> None:
    plan = plan_of(resnet, 16)
    statistics = [stage for stage in plan.stages if stage.phase is Phase.STATISTICS]
    assert len(statistics) == sum(1 for node in resnet.nodes if node.statistics)
    assert not any(name.endswith(".moments") for name in plan.recomputed)


def test_second_buffers_are_written_before_they_are_read(resnet: Network) -> None:
    plan = plan_of(resnet, 16)
    written: set[str] = set()
    order = {group.name: position for position, group in enumerate(plan.groups)}
    again = [stage for stage in plan.stages if stage.phase is Phase.BACKWARD_RECOMPUTE]
    assert again
    assert len({stage.group for stage in again}) == len(again)
    for stage in plan.stages:
        seconds = {name for name in stage.reads if name.startswith(SECOND)}
        assert seconds <= written, stage.name
        written.update(name for name in stage.writes if name.startswith(SECOND))
        if stage.phase is Phase.FORWARD:
            assert not seconds
    # A segment runs again only when the backward pass of all later groups has ended.
    position = len(plan.groups)
    for stage in plan.stages:
        if stage.phase is Phase.BACKWARD_RECOMPUTE:
            assert order[stage.group] < position
        elif stage.phase.value.startswith("backward"):
            position = min(position, order[stage.group])


def test_buffers_that_are_needed_at_the_same_time_do_not_overlap(resnet: Network) -> None:
    buffers = list(plan_of(resnet, 16).buffers.values())
    starts, ends = (
        np.array([[buffer.offset, buffer.first] for buffer in buffers]),
        np.array([[buffer.offset + buffer.nbytes, buffer.last + 1] for buffer in buffers]),
    )
    common = (starts[:, None] < ends[None]) & (starts[None] < ends[:, None])
    pairs = np.argwhere(common.all(axis=-1))
    assert (pairs[:, 0] == pairs[:, 1]).all()


def test_plans_of_other_sizes_can_have_the_same_stages(resnet: Network) -> None:
    plan = plan_of(resnet, 16)
    assert plan.cuts
    other = make_plan(resnet, REFERENCE, 3, recompute=True, cuts=plan.cuts[1::2])
    assert other.cuts == plan.cuts[1::2]
    again = make_plan(resnet, REFERENCE, 16, precision="fp32", recompute=True, cuts=plan.cuts)
    assert again.stages == plan.stages
    assert not make_plan(resnet, REFERENCE, 3, recompute=True, cuts=()).recomputed


def test_a_plan_that_would_not_shrink_keeps_all_activations() -> None:
    network = Network((3, 4, 4), [Conv2d(4), ReLU(), Flatten(), Dense(2)])
    plan = plan_of(network, 4)
    assert not plan.recomputed
    assert plan.stages == plan_of(network, 4, recompute=False).stages


def test_inference_recomputes_nothing(resnet: Network) -> None:
    plan = make_plan(resnet, REFERENCE, 4, training=False, recompute=True)
    assert not plan.setting.recompute
    assert not plan.recomputed
