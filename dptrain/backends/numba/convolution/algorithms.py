"""The algorithms of a convolution, and the selection among them.

To add an algorithm, add a module that defines `supports`, `estimate` and `plan`, and a row here
(docs/developers/adding-a-layer.md). All modules define kernels of the same names with the same
arguments, except for the type of the geometry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

from dptrain.backends.numba.convolution import (
    direct_convolution,
    folded_rgb_convolution,
    gathered_convolution,
    pointwise_convolution,
    winograd_convolution,
    winograd_rgb_convolution,
)
from dptrain.backends.numba.convolution.planning import (
    MIN_INFERENCE_MULTIPLY_ADDS,
    MIN_MULTIPLY_ADDS,
    SAVED_IN_INFERENCE,
    Case,
    KernelPlan,
    Shape,
    Work,
)
from dptrain.plan.lowering import Phase
from dptrain.plan.selection import Algorithm, Choice, Gain, KernelSelection, fastest, select

PHASES = Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT

EPYC, EPYC_512 = (
    f"one thread of an AMD EPYC ({vectors}), processor time, other programs running, 29 November "
    "2026"
    for vectors in ("AVX2", "AVX-512")
)
"""Conditions of gains that were measured by ``benchmarks.step.gains``."""

CONVOLUTION: tuple[Algorithm[Case], ...] = (
    Algorithm(
        "Winograd F(4×4, 3×3)", PHASES, partial(winograd_convolution.supports, 3),
        winograd_convolution.estimate, winograd_convolution.plan,
        (Gain("model2", 1.63, f"batch size 32, 31 pairs, {EPYC}"),),
    ),
    Algorithm(
        "Winograd F(2×2, 5×5)", PHASES, partial(winograd_convolution.supports, 5),
        winograd_convolution.estimate, winograd_convolution.plan,
        (Gain("cifar", 1.51, f"batch size 32, 15 pairs, {EPYC}"),),
    ),
    Algorithm(
        "GEMM", PHASES, pointwise_convolution.supports,
        pointwise_convolution.estimate, pointwise_convolution.plan,
        (Gain("mobilenet-v1", 1.14, f"batch size 4, 25 pairs, {EPYC}"),),
    ),
    Algorithm(
        "GEMM of gathered pixels", (Phase.FORWARD, Phase.BACKWARD_INPUT),
        gathered_convolution.supports, gathered_convolution.estimate, gathered_convolution.plan,
        (Gain("resnet18-cifar", 1.17, f"batch size 1, 21 pairs, {EPYC}"),),
    ),
    Algorithm(
        "implicit GEMM of colour images", (Phase.FORWARD, Phase.BACKWARD_WEIGHT),
        folded_rgb_convolution.supports, folded_rgb_convolution.estimate,
        folded_rgb_convolution.plan,
        (Gain("model-small", 1.32, "batch size 32, one thread of an Intel Xeon (AVX-512), 71 "
              "pairs, 29 November 2026"),),
    ),
    Algorithm(
        "Winograd F(4×4, 3×3) of colour images", (Phase.FORWARD, Phase.BACKWARD_WEIGHT),
        winograd_rgb_convolution.supports, winograd_rgb_convolution.estimate,
        winograd_rgb_convolution.plan,
        (Gain("model0", 1.08, f"batch size 32, 61 pairs, {EPYC}"),
         Gain("model1", 1.07, f"batch size 32, 61 pairs, {EPYC}"),
         Gain("model0", 1.15, f"batch size 32, 21 pairs, {EPYC_512}"),
         Gain("model1", 1.15, f"batch size 32, 21 pairs, {EPYC_512}")),
    ),
    Algorithm(
        "implicit GEMM", PHASES, direct_convolution.supports,
        direct_convolution.estimate, direct_convolution.plan,
    ),
)  # fmt: skip
"""The algorithms, the last of which computes every case. Estimates are in ns."""

MAX_SELECTIONS = 4096
"""Selections that are kept; most layers of a deep network have the shape of another one."""


def choose(case: Case, selection: KernelSelection | None = None, stage: str = "") -> Choice[Case]:
    """Return the algorithm of a case; see `dptrain.plan.selection.select`."""
    return select(CONVOLUTION, case.phase, case, selection, stage)


def candidates(case: Case) -> list[Choice[Case]]:
    """Return the algorithms that support a case, the fastest first."""
    return fastest(CONVOLUTION, case.phase, case)


@lru_cache(MAX_SELECTIONS)
def plan_kernel(choice: Choice[Case], case: Case) -> KernelPlan:
    """Return the kernel of a choice, with one range if a stage takes only a few microseconds."""
    found: KernelPlan = choice.algorithm.bind(case.shape, case.phase, case.work)
    least = MIN_MULTIPLY_ADDS * found.saved
    if case.work.keeps_weights:
        least = MIN_INFERENCE_MULTIPLY_ADDS * min(found.saved, SAVED_IN_INFERENCE)
    work = replace(case.work, rows=found.rows or case.work.rows)
    units = work.worthwhile_units(case.shape, case.phase, found.units, least)
    return replace(found, rows=work.rows, grain=max(found.grain, units))


def select_kernels(
    shape: Shape, work: Work | None = None, *, winograd: bool = True
) -> Mapping[Phase, KernelPlan]:
    """Return the kernels of all phases of a convolution.

    Args:
        shape: the convolution. With `Work.by_shape`, the algorithm and the order of its sums follow
            from the shape alone.
        work: the samples and threads, from which the number of units follows.
        winograd: see `Case`.
    """
    cases = {phase: Case(shape, phase, work or Work(), winograd) for phase in PHASES}
    return {phase: plan_kernel(choose(case), case) for phase, case in cases.items()}
