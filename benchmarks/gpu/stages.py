"""Every stage of a training step alone, against the roofline; and the layers of the study's table.

A stage runs many times in a row, on the same numbers. Where they fit into the cache of the second
level, as a small batch's do, it finds them there, as it does for the most part in a step.
"""

from __future__ import annotations

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
    """A stage and how long it took.

    Attributes:
        network, batch_size, backend, precision: the case.
        group, phase: of the stage.
        flops, bytes_moved: as the plan counts them.
        us: median.
        wide: a convolution with so many filters that its share of the GEMM rate has a target.
        operation: what computes the group: backends that share one run the same kernels.
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
        """As `Stage.name`."""
        return self.group if self.group == self.phase else f"{self.group}.{self.phase}"

    def share_of_roof(self, limits: Limits) -> float:
        """The time that the roofline allows over the time it took."""
        return limits.seconds(self.flops, self.bytes_moved, self.precision) / (1e-6 * self.us)

    def share_of_gemm(self, limits: Limits) -> float | None:
        """Its rate over that of a large matrix product; None where that was not measured."""
        rate = limits.gemm.get(self.precision)
        return None if rate is None else self.flops / (1e-6 * self.us) / rate


def is_wide(plan: Plan, stage: Stage) -> bool:
    """Whether the target of wide convolutions is this stage's."""
    heads = {group.name: group.head.layer for group in plan.groups}
    layer = heads.get(stage.group)
    return (
        kind_of(plan, stage) == "convolution"
        and isinstance(layer, Conv2d)
        and layer.filters >= targets.WIDE_CHANNELS
        and plan.batch_size >= targets.WIDE_BATCH
    )


def operation_of(step: Step, stage: Stage) -> str:
    """What computes a stage's group, by name; the backend where that has one way for all."""
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
    """Time every stage of a step but loading, in order."""
    step = Step(network, backend, precision, batch_size)
    plan, results = step.replica.plan, []
    for index, stage in enumerate(step.stages()):
        # What stages change in place, such as the gradient behind dropout, is made anew.
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


# The study's table: each layer, forward and backward.


@dataclass(frozen=True)
class LayerRow:
    """A layer, or a run of layers that is computed as one, in one direction.

    Attributes:
        network, batch_size, precision: the case.
        layers: such as ``conv1``, or ``conv1+relu1+pool1``.
        direction: ``forward`` or ``backward``.
        us: by program; ``PyTorch`` is its own calls of cuDNN, in the faster of its layouts.
        operations: by backend, what computes it: see `StageResult`.
    """

    network: str
    batch_size: int
    precision: str
    layers: str
    direction: str
    us: dict[str, float]
    operations: dict[str, list[str]]

    @property
    def shared(self) -> bool:
        """Whether `cuda` and `cudnn` run the same kernels, so that they differ by chance alone."""
        mine = self.operations.get("cuda")
        return mine is not None and mine == self.operations.get("cudnn")

    @property
    def ratio(self) -> float | None:
        """Time of `cuda` over that of `cudnn`; of PyTorch's cuDNN where the backend is missing."""
        other = self.us.get("cudnn", self.us.get("PyTorch"))
        return None if other is None or "cuda" not in self.us else self.us["cuda"] / other


def unfused(network: Network) -> Network:
    """`network` with sigmoids for ReLUs, which no backend fuses: each layer is a stage."""
    layers = [Sigmoid() if isinstance(n.layer, ReLU) else n.layer for n in network.nodes]
    return Network(network.input_shape, layers, network.loss, f"{network.name} unfused")


def layer_rows(
    stages: Iterable[StageResult], torch_us: dict[tuple[str, str], float], runs: Sequence[str]
) -> list[LayerRow]:
    """Rows of one network at one batch size and precision.

    Args:
        stages: of every backend.
        torch_us: PyTorch's times by layers and direction.
        runs: which layers, in order, such as ``conv1+relu1+pool1``. Where a backend computes a run
            as several groups, their times add up.
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
    """Names of each convolution and pooling layer, and of each run that is computed as one."""
    names = [node.name for node in network.nodes]
    convolutions = [i for i, node in enumerate(network.nodes) if isinstance(node.layer, Conv2d)]
    alone = [name for i in convolutions for name in (names[i], names[i + 2])]
    return alone, ["+".join(names[i : i + 3]) for i in convolutions]
