"""Time every stage of a training step separately and compare it with the roofline; compare layers.

A stage runs many times in a row on the same data. With a small batch the data stays in L2, which is
mostly the case in a step as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.gpu import targets
from benchmarks.gpu.clock import take_turns
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.ours import Step
from benchmarks.kinds import kind_of
from dptrain.network import Conv2d, Network, ReLU, Sigmoid
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan, Stage

TIMES, BLOCKS = 20, 5
"""Repetitions of a stage for each launch, and blocks of launches."""


@dataclass(frozen=True)
class StageResult:
    """A stage and its time.

    Attributes:
        network, batch_size, backend, precision: the case.
        group, phase: of the stage.
        flops, bytes_moved: as the plan counts them.
        us: median time in µs.
        wide: whether it is a convolution whose share of the GEMM rate has a target.
        operation: class that computes the group; equal operations run the same kernels.
    """

    network: str
    batch_size: int
    backend: str
    precision: str
    group: str
    phase: str
    flops: int
    bytes_moved: int
    us: float
    wide: bool
    operation: str

    @property
    def name(self) -> str:
        """Name of the stage, as `Stage.name`."""
        return self.group if self.group == self.phase else f"{self.group}.{self.phase}"

    def share_of_roof(self, limits: Limits) -> float:
        """Return the shortest time of the roofline model divided by the measured time."""
        return limits.seconds(self.flops, self.bytes_moved, self.precision) / (1e-6 * self.us)

    def share_of_gemm(self, limits: Limits) -> float | None:
        """Return the stage's rate divided by that of a large matrix product, if measured."""
        rate = limits.gemm.get(self.precision)
        return None if rate is None else self.flops / (1e-6 * self.us) / rate


def is_wide(plan: Plan, stage: Stage) -> bool:
    """Return whether the target of wide convolutions applies to this stage."""
    heads = {group.name: group.head.layer for group in plan.groups}
    layer = heads.get(stage.group)
    return (
        kind_of(plan, stage) == "convolution"
        and isinstance(layer, Conv2d)
        and layer.filters >= targets.WIDE_CHANNELS
        and plan.batch_size >= targets.WIDE_BATCH
    )


def operation_of(step: Step, stage: Stage) -> str:
    """Return the class that computes a stage's group, or the backend if it has none."""
    plan, backend = step.replica.plan, step.replica.backend
    find = getattr(backend, "operation", None)
    for group in plan.groups:
        if group.name == stage.group and find is not None:
            kind = find(group, plan.setting)
            return f"{kind.__module__}.{kind.__qualname__}"
    return backend.name


def measure_stages(
    network: Network, backend: str, precision: str, batch_size: int, *, times: int = TIMES
) -> list[StageResult]:
    """Time the stages of a step in order, without loading the batch."""
    step = Step(network, backend, precision, batch_size)
    plan, results = step.replica.plan, []
    for index, stage in enumerate(step.stages()):
        # Recompute arrays that stages change in place, such as gradients after dropout.
        step.run_stages(index)
        laps = take_turns({stage.name: step.stage_program(index, times)}, BLOCKS)[stage.name]
        results.append(
            StageResult(
                network.name, batch_size, backend, precision, stage.group, stage.phase.value,
                stage.flops, stage.bytes_moved, laps.median / times, is_wide(plan, stage),
                operation_of(step, stage),
            )
        )  # fmt: skip
    return results


# Comparison of layers, forward and backward.


@dataclass(frozen=True)
class LayerRow:
    """A layer, or several fused layers, in one direction.

    Attributes:
        network, batch_size, precision: the case.
        layers: such as ``conv1``, or ``conv1+relu1+pool1``.
        direction: ``forward`` or ``backward``.
        us: times in µs by program; ``PyTorch`` calls cuDNN, in the faster memory layout.
        operations: classes that compute the layers, by backend (see `StageResult`).
    """

    network: str
    batch_size: int
    precision: str
    layers: str
    direction: str
    us: dict[str, float]
    operations: dict[str, list[str]]

    @property
    def study_name(self) -> str:
        """Name in table 5.1 of study A, such as ``convolution 0 forward``; else empty."""
        found = re.fullmatch(r"(conv|pool)(\d+)", self.layers)
        if found is None:
            return ""
        kind = {"conv": "convolution", "pool": "pooling"}[found[1]]
        return f"{kind} {int(found[2]) - 1} {self.direction}"

    @property
    def shared(self) -> bool:
        """Whether `cuda` and `cudnn` run the same kernels, so that differences are noise."""
        mine = self.operations.get("cuda")
        return mine is not None and mine == self.operations.get("cudnn")

    @property
    def ratio(self) -> float | None:
        """Time of `cuda` divided by that of `cudnn`, or of PyTorch if that is missing."""
        other = self.us.get("cudnn", self.us.get("PyTorch"))
        return None if other is None or "cuda" not in self.us else self.us["cuda"] / other


def unfused(network: Network) -> Network:
    """Return `network` with sigmoids instead of ReLUs, which prevents fusion."""
    layers = [Sigmoid() if isinstance(n.layer, ReLU) else n.layer for n in network.nodes]
    return Network(network.input_shape, layers, network.loss, f"{network.name} unfused")


def layer_rows(
    stages: Iterable[StageResult], torch_us: dict[tuple[str, str], float], runs: Sequence[str]
) -> list[LayerRow]:
    """Return the rows of one network at one batch size and precision.

    Args:
        stages: of every backend.
        torch_us: PyTorch's times by layers and direction.
        runs: layers in order, such as ``conv1+relu1+pool1``. Times are added if a backend computes
            them in several groups.
    """
    rows: dict[tuple[str, str], LayerRow] = {}
    owners = {layer: run for run in runs for layer in run.split("+")}
    for stage in stages:
        run = owners.get(stage.group.partition("+")[0])
        if run is None or not set(stage.group.split("+")) <= set(run.split("+")):
            continue
        key = run, "forward" if stage.phase == Phase.FORWARD.value else "backward"
        if key not in rows:
            us = {"PyTorch": torch_us[key]} if key in torch_us else {}
            rows[key] = LayerRow(stage.network, stage.batch_size, stage.precision, *key, us, {})
        us = rows[key].us
        us[stage.backend] = us.get(stage.backend, 0.0) + stage.us
        rows[key].operations.setdefault(stage.backend, []).append(stage.operation)
    order = {run: i for i, run in enumerate(runs)}
    return sorted(rows.values(), key=lambda row: (order[row.layers], row.direction == "backward"))


def study_runs(network: Network) -> tuple[list[str], list[str]]:
    """Return the names of convolution and pooling layers, and of the fused layers."""
    names = [node.name for node in network.nodes]
    convolutions = [i for i, node in enumerate(network.nodes) if isinstance(node.layer, Conv2d)]
    alone = [name for i in convolutions for name in (names[i], names[i + 2])]
    return alone, ["+".join(names[i : i + 3]) for i in convolutions]
