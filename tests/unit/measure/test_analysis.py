"""A step taken apart: nothing lost, waiting told from being late, work counted rightly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.measure.profile.analysis import (
    Measured,
    kind_profiles,
    live_bytes,
    rank_profiles,
    stage_profiles,
    typical_steps,
)
from dptrain.measure.profile.profile import Parts, Roofs
from dptrain.measure.step_record import (
    CHECKPOINT,
    DATA_WAIT,
    EVALUATION,
    EXPOSED,
    HIDDEN,
    SPANS,
    STATISTICS,
    STEP,
)
from dptrain.network import get_network
from dptrain.plan.plan import Plan, make_plan

BATCH = 4


def planned(name: str, backend: str = "numba") -> Plan:
    return make_plan(get_network(name), load_backend(backend), BATCH, precision="fp32")


def random_times(plan: Plan, ranks: int, steps: int, seed: int = 0) -> Measured:
    """Stages, waiting and sums of 1 to 2 ms each, and half a millisecond between them."""
    names = (*(stage.name for stage in plan.stages), *SPANS)
    table = np.random.default_rng(seed).uniform(1, 2, (ranks, steps, len(names)))
    for name in (EVALUATION, CHECKPOINT, STATISTICS):
        table[:, :, names.index(name)] = 0
    hidden = table[:, :, names.index(HIDDEN)]
    table[:, :, names.index(STEP)] = table[:, :, :-1].sum(axis=2) - hidden + 0.5
    return Measured(names, table, table, (float(BATCH),) * ranks)


def values(parts: Parts) -> tuple[float, ...]:
    return parts.compute, parts.data_wait, parts.transfer, parts.imbalance, parts.other


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_add_up_to_the_mean_step(ranks: int) -> None:
    measured = random_times(planned("model0"), ranks, 20)
    parts = measured.step_parts.all_steps
    middle = np.sort(measured.step_times)[5:15]
    assert measured.parts.total == pytest.approx(middle.mean(), rel=1e-12)
    # Five sums of about a thousand numbers each: far above what rounding can do.
    assert sum(values(parts)) == pytest.approx(measured.steps.mean(), rel=1e-12)
    assert parts.total == pytest.approx(sum(values(parts)), rel=1e-12)
    assert min(values(parts)) >= 0
    assert parts.other == pytest.approx(0.5)
    assert parts.transfer + parts.imbalance == pytest.approx(measured.column(EXPOSED).mean())
    assert (parts.imbalance == 0) == (ranks == 1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        # The stages alone take 10, sums 2: more than the step, so some ran beside each other.
        (9.0, Parts(7.0, 0.0, 2.0, 0.0, 0.0)),
        # Waiting for data ends before the device does.
        (12.5, Parts(10.0, 0.5, 2.0, 0.0, 0.0)),
        (14.0, Parts(10.0, 1.5, 2.0, 0.0, 0.5)),
    ],
)
def test_parts_where_ordinary_steps_are_not_timed_by_stage(step: float, expected: Parts) -> None:
    names = ("a", "b", *SPANS)
    ordinary = np.array([[[0.0, 0.0, 1.5, 0.0, 0.0, 0.0, 0.0, 0.0, step]]])
    timed = np.array([[[4.0, 6.0, 3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 99.0]]])
    measured = Measured(names, ordinary, timed, (1.0,))
    assert values(measured.parts) == pytest.approx(values(expected))


def test_a_straggler_is_who_is_late_and_not_who_waits() -> None:
    names = ("compute", *SPANS)
    # Rank 2 computes 9 ms and the others 5; all leave the sum together, 1 ms after it came.
    early, late = [5.0, 0, 5.0, 0, 0, 0, 0, 10.0], [9.0, 0, 1.0, 0, 0, 0, 0, 10.0]
    table = np.array([[early], [early], [late]])
    measured = Measured(names, table, table, (1.0,) * 3)
    ranks = rank_profiles(measured, ["a", "a", "b"], ["cpu"] * 3)
    assert [rank.delay_ms for rank in ranks] == [0, 0, 4]
    assert [rank.imbalance_ms for rank in ranks] == [4, 4, 0]
    assert [rank.busy_ms for rank in ranks] == [5, 5, 9]
    parts = measured.parts
    assert parts.transfer == pytest.approx(1.0)
    assert parts.imbalance == pytest.approx(8 / 3)


def test_waiting_for_others_is_no_more_than_all_that_is_exposed() -> None:
    names = ("compute", *SPANS)
    table = np.array([[[5.0, 0, 1.0, 0, 0, 0, 0, 6.0]], [[9.0, 0, 1.0, 0, 0, 0, 0, 10.0]]])
    measured = Measured(names, table, table, (1.0,) * 2)
    assert measured.imbalance.tolist() == [[1.0], [0.0]]
    assert measured.parts.transfer == pytest.approx(0.5)


def test_stages_and_kinds_hold_the_same_time_and_work() -> None:
    plan = planned("model2")
    measured = random_times(plan, 3, 10)
    stages = stage_profiles(plan, measured, {plan.stages[2].name: "by hand"})
    kinds = kind_profiles(plan, measured, {})
    assert [stage.name for stage in stages] == [stage.name for stage in plan.stages]
    assert stages[2].note == "by hand"
    for found in (stages, kinds):
        assert sum(s.typical_ms for s in found) == pytest.approx(measured.parts.compute)
        assert sum(s.flops for s in found) == pytest.approx(sum(s.flops for s in plan.stages))
        assert sum(s.calls for s in found) == len(plan.stages)
        ordered = sorted(found, key=lambda s: -s.typical_ms)
        np.testing.assert_allclose(
            [s.cumulative_share for s in ordered], np.cumsum([s.share for s in ordered])
        )
    assert list(kinds) == sorted(kinds, key=lambda s: -s.typical_ms)
    assert len({(kind.kind, kind.phase) for kind in kinds}) == len(kinds)
    column = measured.column(stages[3].name)
    by_rank = column[:, typical_steps(measured.step_times)].mean(axis=1)
    assert stages[3].slowest_ms == pytest.approx(by_rank.max())
    assert stages[3].slowest_rank == by_rank.argmax()
    assert stages[3].time_ms.median == pytest.approx(np.median(column.mean(axis=0)))


def test_the_roof_is_arithmetic_or_the_fastest_copy_from_a_cache_that_is_not_too_large() -> None:
    copies = (1000, 50.0), (2000, 60.0), (10**6, 20.0), (10**7, 10.0)
    roofs = Roofs(100.0, 10.0, "made up", copies)
    assert roofs.bandwidth(800) == 60
    assert roofs.bandwidth(5000) == 60
    assert roofs.bandwidth(2 * 10**6) == 20
    assert roofs.bandwidth(10**7) == 10
    assert roofs.least_ms(2e8, 800) == pytest.approx(2.0)
    # Each part counts with the bandwidth of the largest size below it.
    parts = 2000 / 60 + (10**6 - 2000) / 60 + 9 * 10**6 / 20
    assert roofs.least_ms(0, 10**7) == pytest.approx(parts / 1e6)


def test_a_share_of_the_batch_is_a_share_of_the_work_but_for_parameters() -> None:
    plan = planned("mlp-5")
    whole = random_times(plan, 1, 3)
    half = Measured(whole.names, whole.ordinary, whole.timed, (BATCH / 2,))
    for one, other, stage in zip(
        stage_profiles(plan, whole, {}),
        stage_profiles(plan, half, {}),
        plan.stages,
        strict=True,
    ):
        assert one.roofline_share is None
        if stage.name == "update":
            assert (other.flops, other.bytes_moved) == (one.flops, one.bytes_moved)
        else:
            assert other.flops == one.flops / 2
            assert one.bytes_moved / 2 <= other.bytes_moved < one.bytes_moved
    # 50 inputs, 5 hidden units: 255 weights and biases are read whole.
    first = stage_profiles(plan, half, {})[1]
    assert first.bytes_moved == pytest.approx(4 * 255 + (plan.stages[1].bytes_moved - 4 * 255) / 2)


def test_no_stage_has_more_memory_alive_than_the_arena_holds() -> None:
    for name in ("model0", "cifar", "solar"):
        plan = planned(name)
        live = [live_bytes(plan, stage) for stage in plan.stages]
        assert 0.5 * plan.arena_bytes < max(live) <= plan.arena_bytes


# Work, counted by hand from the studies' shapes.


@dataclass(frozen=True)
class Counted:
    """A layer for one sample: elements in and out, parameters, operations."""

    x: int
    y: int
    weights: int
    biases: int
    forward: int
    by_weight: int
    by_input: int


def conv(channels: int, size: int, filters: int, window: int, out: int) -> Counted:
    weights, y = filters * channels * window**2, filters * out**2
    products = 2 * weights * out**2
    return Counted(channels * size**2, y, weights, filters, products + y, products + y, products)


def dense(inputs: int, outputs: int) -> Counted:
    weights = inputs * outputs
    return Counted(
        inputs, outputs, weights, outputs, 2 * weights + outputs, 2 * weights + outputs,
        2 * weights,
    )  # fmt: skip


def pool(channels: int, size: int, window: int, out: int) -> Counted:
    looked_at = channels * out**2 * window**2
    return Counted(channels * size**2, channels * out**2, 0, 0, looked_at, 0, looked_at)


def each(size: int, forward: int = 1, backward: int = 1) -> Counted:
    return Counted(size, size, 0, 0, forward * size, 0, backward * size)


def lrn(size: int) -> Counted:
    # Nine neighbours: a square and an addition each, and four more; backward three and eight.
    return each(size, 9 * 2 + 4, 9 * 3 + 8)


def classes(count: int) -> int:
    return 6 * count


NETWORKS: dict[str, tuple[dict[str, Counted], int]] = {
    "model0": ({
        "conv1": conv(3, 32, 16, 3, 32), "relu1": each(16 * 32**2), "pool1": pool(16, 32, 2, 16),
        "conv2": conv(16, 16, 32, 3, 16), "relu2": each(32 * 16**2), "pool2": pool(32, 16, 2, 8),
        "dense1": dense(2048, 100), "relu3": each(100), "dense2": dense(100, 10),
    }, classes(10)),
    "model1": ({
        "conv1": conv(3, 40, 16, 3, 40), "relu1": each(16 * 40**2), "pool1": pool(16, 40, 2, 20),
        "conv2": conv(16, 20, 32, 3, 20), "relu2": each(32 * 20**2), "pool2": pool(32, 20, 2, 10),
        "dense1": dense(3200, 100), "relu3": each(100), "dense2": dense(100, 10),
    }, classes(10)),
    "model2": ({
        "conv1": conv(3, 40, 16, 3, 40), "relu1": each(16 * 40**2), "pool1": pool(16, 40, 2, 20),
        "conv2": conv(16, 20, 32, 3, 20), "relu2": each(32 * 20**2), "pool2": pool(32, 20, 2, 10),
        "conv3": conv(32, 10, 32, 3, 10), "relu3": each(32 * 10**2), "pool3": pool(32, 10, 2, 5),
        "dense1": dense(800, 128), "relu4": each(128), "dense2": dense(128, 50),
        "relu5": each(50), "dense3": dense(50, 10),
    }, classes(10)),
    "cifar": ({
        "conv1": conv(3, 24, 64, 5, 24), "relu1": each(64 * 24**2), "pool1": pool(64, 24, 3, 12),
        "lrn1": lrn(64 * 12**2), "conv2": conv(64, 12, 64, 5, 12), "relu2": each(64 * 12**2),
        "lrn2": lrn(64 * 12**2), "pool2": pool(64, 12, 3, 6), "dense1": dense(2304, 384),
        "relu3": each(384), "dense2": dense(384, 192), "relu4": each(192),
        "dense3": dense(192, 10),
    }, classes(10)),
    "solar": ({
        "conv1": conv(1, 50, 32, 3, 48), "relu1": each(32 * 48**2),
        "conv2": conv(32, 48, 64, 3, 46),
        "relu2": each(64 * 46**2), "pool1": pool(64, 46, 2, 23), "dropout1": each(64 * 23**2),
        "dense1": dense(33856, 128), "relu3": each(128), "dropout2": each(128),
        "dense2": dense(128, 1), "relu4": each(1),
    }, 5),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["numba", "reference", "cuda"])
@pytest.mark.parametrize("name", NETWORKS)
def test_work_is_what_the_shapes_say(name: str, backend: str) -> None:
    plan = planned(name, backend)
    stages = {s.name: s for s in stage_profiles(plan, random_times(plan, 1, 2), {})}
    layers, loss = NETWORKS[name]
    for phases, per_sample in (
        (("forward",), sum(layer.forward for layer in layers.values())),
        (
            ("backward", "backward_weight", "backward_input"),
            # Nobody needs the gradient by the network's input.
            sum(layer.by_weight + layer.by_input for layer in layers.values())
            - layers["conv1"].by_input,
        ),
        (("loss",), loss),
    ):
        flops = sum(stage.flops for stage in stages.values() if stage.phase in phases)
        assert flops == BATCH * per_sample
    itemsize, checked = 4, 0
    for group in plan.groups:
        members = [layers[n.name] for n in group.nodes if n.name in layers]
        own = sum(
            buffer.nbytes
            for buffer_name, buffer in plan.buffers.items()
            if buffer_name.startswith(f"{group.name}.")
        )
        if not members:
            continue
        x, y = (BATCH * n * itemsize for n in (members[0].x, members[-1].y))
        weights, biases = (
            itemsize * sum(getattr(member, kind) for member in members)
            for kind in ("weights", "biases")
        )
        expected = {
            "forward": x + y + weights + biases,
            "backward_weight": x + y + weights + biases,
            "backward_input": x + y + weights,
        }
        for phase, least in expected.items():
            stage = stages.get(f"{group.name}.{phase}")
            if stage is not None and (weights or phase == "forward"):
                # What is above is memory of the backend's own, an arg-max or scratch; and, where
                # a stage differentiates the ReLU on its way, what that let through.
                passed = 2 * y if phase != "forward" and len(members) > 1 else 0
                planned_stage = next(s for s in plan.stages if s.name == stage.name)
                in_place = {*planned_stage.reads} & {*planned_stage.writes}
                least -= sum(plan.buffers[buffer].nbytes for buffer in in_place)
                assert least <= stage.bytes_moved <= least + own + passed
                checked += 1
    assert checked >= 2 * sum(1 for layer in layers.values() if layer.weights)
    # Parameters, which are updated in place, and gradients; slots are padded to 64 bytes.
    parameters = sum(layer.weights + layer.biases for layer in layers.values())
    assert parameters == plan.network.num_parameters
    padding = 64 * 2 * len(layers)
    assert 0 <= stages["update"].bytes_moved - 2 * itemsize * parameters <= 2 * padding


def test_data_wait_is_a_part_of_its_own() -> None:
    measured = random_times(planned("model0"), 2, 5)
    parts = measured.step_parts.all_steps
    assert parts.data_wait == pytest.approx(measured.column(DATA_WAIT).mean())
    assert math.isclose(parts.compute, measured.compute.mean())


def test_a_checkpoint_is_no_communication_of_the_ranks_that_wait_for_it() -> None:
    names = ("compute", *SPANS)
    # Rank 0 writes a checkpoint for 20 ms; the other rank waits in the sum, which takes 1 ms.
    table = np.array([[[5.0, 0, 1.0, 0, 0, 20.0, 0, 26.0]], [[4.0, 0, 22.0, 0, 0, 0, 0, 26.0]]])
    measured = Measured(names, table, table, (1.0,) * 2)
    assert measured.imbalance.tolist() == [[0.0], [1.0]]
    assert measured.parts == Parts(4.5, 0.0, 1.0, 0.5, 0.0, checkpoint=20.0)
    assert measured.parts.total == measured.steps.mean()


def test_waiting_is_load_imbalance_or_serialisation() -> None:
    names = ("compute", *SPANS)

    def split(first: list[float], second: list[float]) -> tuple[float, float]:
        busy = np.array([first, second])
        table = np.zeros((2, len(first), len(names)))
        table[:, :, 0], table[:, :, names.index(STEP)] = busy, busy.max(axis=0) + 1
        table[:, :, names.index(EXPOSED)] = busy.max(axis=0) + 1 - busy
        parts = Measured(names, table, table, (1.0,) * 2).step_parts
        return parts.load_imbalance, parts.serialisation

    assert split([5.0] * 4, [7.0] * 4) == (1.0, 0.0)
    assert split([5.0, 7.0] * 2, [7.0, 5.0] * 2) == (0.0, 1.0)
    assert split([5.0, 5.0, 7.0, 5.0], [7.0, 7.0, 5.0, 7.0]) == (0.5, 0.5)
    assert split([5.0] * 4, [5.0] * 4) == (0.0, 0.0)
