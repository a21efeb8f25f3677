"""The algorithms of a dense layer.

To add an algorithm, add a kernel with the arguments of `matmul` and a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.backends.numba.dense import dense_shards, matmul
from dptrain.backends.numba.dense.matmul import DenseKernel
from dptrain.plan.lowering import Phase
from dptrain.plan.selection import Algorithm, Choice, KernelSelection, alone, fastest, select

PHASES = Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT


@dataclass(frozen=True)
class Case:
    """A phase of a dense layer, for which an algorithm is selected.

    Attributes:
        phase: the phase.
        samples, threads: the largest numbers of samples and of threads of a launch.
        inputs, outputs: shape of w.
        shards: micro-shards that are summed in a fixed order; 0 without them.
    """

    phase: Phase
    samples: int
    threads: int
    inputs: int
    outputs: int
    shards: int

    @property
    def sums_shards(self) -> bool:
        """True for the weight gradient of micro-shards."""
        return self.phase is Phase.BACKWARD_WEIGHT and self.shards > 0


def _estimate(case: Case) -> Sequence[tuple[float, str]]:
    """Return the multiply-adds."""
    return alone(case.samples * case.inputs * case.outputs)


def _plan(case: Case) -> DenseKernel:
    shape = case.samples, case.threads, case.inputs, case.outputs
    return matmul.dense_kernels(*shape)[case.phase]


def _plan_shards(case: Case) -> DenseKernel:
    scratch = dense_shards.weight_shards_scratch(case.samples, case.outputs, case.shards)
    return DenseKernel(dense_shards.dense_backward_weight_shards, scratch)


DENSE: Sequence[Algorithm[Case]] = (
    Algorithm("GEMM", PHASES, lambda case: not case.sums_shards, _estimate, _plan),
    Algorithm("GEMM of micro-shards", (Phase.BACKWARD_WEIGHT,), lambda case: case.sums_shards,
              _estimate, _plan_shards),
)  # fmt: skip
"""The algorithms. Estimates are in multiply-adds."""


def choose(case: Case, selection: KernelSelection, stage: str) -> Choice[Case]:
    """Return the algorithm of a case; see `dptrain.plan.selection.select`."""
    return select(DENSE, case.phase, case, selection, stage)


def candidates(case: Case) -> list[Choice[Case]]:
    """Return the algorithms that support a case, the fastest first."""
    return fastest(DENSE, case.phase, case)
