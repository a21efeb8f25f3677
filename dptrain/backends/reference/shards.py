"""Stages with micro-shards: results of a sample that do not depend on other samples.

NumPy selects the order of summation by the shapes of the operands. Therefore outputs and input
gradients are computed sample by sample, and parameter gradients micro-shard by micro-shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from dptrain.backends.reference.gradient_slots import write_gradient_slots
from dptrain.backends.reference.operation import Operation
from dptrain.backends.replica import Arrays, Context, Kernel
from dptrain.plan.lowering import Phase

OperationFactory = Callable[[Arrays], Operation]
"""Binds an operation to arrays."""

_GRADIENTS = ("dweight", "dbias")
_SHARED = frozenset({
    "weight", "bias", *_GRADIENTS, *(f"{name}_slots" for name in _GRADIENTS),
    "running_mean", "running_var", "moments", "backward_sums",
    "bounds", "merges", "gradient_slots",
})  # fmt: skip
"""Arrays without a dimension of samples."""

_STATISTICS = (Phase.STATISTICS, Phase.BACKWARD_STATISTICS)
"""Phases whose kernels sum micro-shard by micro-shard themselves."""


def sharded_kernels(bind: OperationFactory, arrays: Arrays) -> Mapping[Phase, Kernel]:
    """Return the kernels of an operation in a plan with micro-shards.

    Args:
        bind: makes the operation.
        arrays: of the whole batch.
    """
    kernels: dict[Phase, Kernel] = {}
    for phase, kernel in bind(arrays).kernels().items():
        if phase in _STATISTICS:
            kernels[phase] = kernel
        else:
            run = _sum_shards if phase is Phase.BACKWARD_WEIGHT else _run_samples
            kernels[phase] = run(bind, arrays, phase)
    return kernels


def _part(arrays: Arrays, start: int, stop: int) -> Arrays:
    """Return the arrays of the samples start … stop."""
    return {k: a if k in _SHARED else a[start:stop] for k, a in arrays.items()}


def _run_samples(bind: OperationFactory, arrays: Arrays, phase: Phase) -> Kernel:
    def run(context: Context) -> None:
        for n in range(context.n):
            kernel = bind(_part(arrays, n, n + 1)).kernels()[phase]
            kernel(replace(context, n=1, samples=context.samples[n : n + 1]))

    return run


def _sum_shards(bind: OperationFactory, arrays: Arrays, phase: Phase) -> Kernel:
    names = [name for name in _GRADIENTS if name in arrays]

    def run(context: Context) -> None:
        gradients = []
        for start, stop in pairwise(context.bounds.tolist()):
            bind(_part(arrays, start, stop)).kernels()[phase](replace(context, n=stop - start))
            gradients.append([arrays[name].copy() for name in names])
        for index, name in enumerate(names):
            write_gradient_slots(arrays, name, [shard[index] for shard in gradients])

    return run
