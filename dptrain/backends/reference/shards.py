"""Stages with micro-shards: results of a sample that do not depend on other samples.

NumPy selects the order of summation by the shapes of the operands. Therefore outputs and input
gradients are computed sample by sample, and parameter gradients micro-shard by micro-shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from numpy.typing import NDArray

from dptrain.backends.reference.gradient_slots import write_gradient_slots
from dptrain.backends.reference.operation import Operation
from dptrain.backends.replica import Arrays, Context, Kernel
from dptrain.plan.lowering import Phase

OperationFactory = Callable[[Arrays], Operation[Any]]
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


def sharded_kernels(
    bind: OperationFactory, phases: Collection[Phase], arrays: Arrays
) -> Mapping[Phase, Kernel]:
    """Return the kernels of an operation in a plan with micro-shards.

    Args:
        bind: makes the operation.
        phases: those of the kernels.
        arrays: of the whole batch.
    """
    kernels: dict[Phase, Kernel] = {}
    for phase, kernel in bind(arrays).kernels(phases).items():
        if phase in _STATISTICS:
            kernels[phase] = kernel
        else:
            run = _sum_shards if phase is Phase.BACKWARD_WEIGHT else _run_samples
            kernels[phase] = run(bind, arrays, phase)
    return kernels


class _Part:
    """The arrays of the samples start … stop."""

    def __init__(self, arrays: Arrays, start: int, stop: int) -> None:
        self._arrays, self._samples = arrays, slice(start, stop)

    def __getitem__(self, name: str, /) -> NDArray[Any]:
        array = self._arrays[name]
        return array if name in _SHARED else array[self._samples]


def _run_samples(bind: OperationFactory, arrays: Arrays, phase: Phase) -> Kernel:
    def run(context: Context) -> None:
        for n in range(context.n):
            kernel = bind(_Part(arrays, n, n + 1)).kernels((phase,))[phase]
            kernel(replace(context, n=1, samples=context.samples[n : n + 1]))

    return run


def _sum_shards(bind: OperationFactory, arrays: Arrays, phase: Phase) -> Kernel:
    names = [f"d{p.name.rpartition('.')[2]}" for p in bind(arrays).group.parameters]

    def run(context: Context) -> None:
        gradients = []
        for start, stop in pairwise(context.bounds.tolist()):
            kernel = bind(_Part(arrays, start, stop)).kernels((phase,))[phase]
            kernel(replace(context, n=stop - start))
            gradients.append([arrays[name].copy() for name in names])
        for index, name in enumerate(names):
            write_gradient_slots(arrays, name, [shard[index] for shard in gradients])

    return run
