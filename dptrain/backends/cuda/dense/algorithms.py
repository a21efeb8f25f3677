"""The algorithms of a dense layer on a GPU.

To add an algorithm, add a subclass of `DenseGemm` and a row. An algorithm computes all products of
a layer, because they share operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dptrain.backends.cuda.dense import skinny_gemm, wgmma_gemm_tiles
from dptrain.backends.cuda.dense.dense import DenseGemm, SkinnyDenseGemm, dense_shape
from dptrain.backends.cuda.dense.dense_wgmma import WgmmaDenseGemm
from dptrain.backends.cuda.dense.gemm_tiles import GemmTile
from dptrain.backends.cuda.device.hardware import limits_of
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import Explanation, Group, Phase, Setting
from dptrain.plan.selection import Algorithm, Gain, alone, fastest, select

PRODUCTS = Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT

H200 = "H200, 2026-11-29"
"""Conditions of measured gains, which `python -m benchmarks.step.gains` measures."""

SKINNY, WGMMA = 0.9, 0.95
"""Order of the algorithms within the bounds of `is_worthwhile`, which were measured. The estimates
of their tiles were fitted separately and cannot be compared."""


@dataclass(frozen=True)
class Case:
    """A dense layer, for which an algorithm is selected.

    Attributes:
        precision: of the products.
        samples: largest number of samples.
        inputs, outputs: shape of the weights.
        limits: of the GPU.
        is_sharded: True if gradients are summed for each micro-shard.
    """

    precision: str
    samples: int
    inputs: int
    outputs: int
    limits: DeviceLimits
    is_sharded: bool = False

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a product."""
        return self.samples * self.inputs * self.outputs


def _is_skinny(case: Case) -> bool:
    weights = case.inputs * case.outputs
    return skinny_gemm.is_worthwhile(case.precision, case.samples, weights, case.limits)


def _uses_wgmma(case: Case) -> bool:
    # A stage sums the bias gradient over blocks of samples, which micro-shards would cut.
    return not case.is_sharded and wgmma_gemm_tiles.is_worthwhile(
        case.precision, case.samples, case.inputs, case.outputs, case.limits
    )


DENSE: Sequence[Algorithm[Case]] = (
    Algorithm("skinny GEMM", PRODUCTS, _is_skinny,
              lambda case: alone(SKINNY * case.multiply_adds), lambda: SkinnyDenseGemm,
              (Gain("solar", 1.21, f"batch size 8 in fp32, 11 pairs, {H200}"),)),
    Algorithm("wgmma GEMM", PRODUCTS, _uses_wgmma,
              lambda case: alone(WGMMA * case.multiply_adds), lambda: WgmmaDenseGemm,
              (Gain("alexnet", 1.19, f"batch size 256 in bf16, 15 pairs, {H200}"),)),
    Algorithm(GemmTile.ALGORITHM, PRODUCTS, lambda case: True,
              lambda case: alone(case.multiply_adds), lambda: DenseGemm),
)  # fmt: skip
"""The algorithms. Estimates are in multiply-adds of general products."""


def _case(group: Group, setting: Setting) -> Case:
    product = setting.precision, setting.kernel_samples, *dense_shape(group)
    return Case(*product, limits_of(setting), is_sharded=setting.shards > 0)


def operation_of(group: Group, setting: Setting) -> type[DenseGemm]:
    """Return the class that computes a dense layer."""
    choice = select(DENSE, Phase.FORWARD, _case(group, setting))
    operation: type[DenseGemm] = choice.algorithm.bind()
    return operation


def explain(group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
    """Return how the products of a dense layer are computed, and the other algorithms."""
    chosen, *others = fastest(DENSE, Phase.FORWARD, _case(group, setting))
    listed = tuple((each.algorithm.name, each.estimate / chosen.estimate) for each in others)
    found = operation_of(group, setting).explain(group, setting)
    return {phase: replace(each, others=listed) for phase, each in found.items()}
