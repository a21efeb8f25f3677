"""Micro-shards on a GPU: sums over samples whose bits do not depend on the rank that has them.

Kernels compute the outputs and input gradients of a sample without regard to other samples, if
their configuration follows from the size of a micro-shard (`Setting.kernel_samples`). So all
samples of a rank are in one launch. Sums over samples are made for each micro-shard, and a kernel
adds them along the tree of `dptrain.plan.shards`: see ``headers/micro_shards.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.backends.cuda.device.device import Array, Macro
from dptrain.backends.cuda.device.launching import launch, launch_reduction
from dptrain.backends.cuda.operation import Operation, vector_width
from dptrain.backends.replica import Arrays, Context, Kernel, ReplacedArrays
from dptrain.plan.flat import padded
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase
from dptrain.plan.shards import MicroShards, sum_expression

if TYPE_CHECKING:
    from dptrain.backends.cuda.replica import CudaReplica

GRADIENTS = "shard_gradients"
"""Buffer of the gradients of the micro-shards of a group, a row for each of them."""


def shard_macros(shards: MicroShards) -> dict[str, Macro]:
    """Return the macros of kernels that add micro-shards."""
    (total,) = sum_expression(MicroShards.of_rank(shards.total).merges)
    own = enumerate(sum_expression(shards.merges))
    return {"ALL_SHARDS": total, "OWN_SHARDS": "".join(f"take({s},{each});" for s, each in own)}


def shard_arguments(context: Context) -> list[np.int32]:
    """Return the last arguments of a kernel that sums all micro-shards of this rank."""
    sizes = np.diff(context.bounds)
    smaller = int(sizes[-1])
    return [np.int32(smaller), np.int32(np.count_nonzero(sizes > smaller))]


def sharded_needs(needs: GroupNeeds, group: Group, shards: int) -> GroupNeeds:
    """Return the needs of a group with a launch for the weight gradient of each micro-shard."""
    access = needs.phases.get(Phase.BACKWARD_WEIGHT)
    if access is None:
        return needs
    written = Access(access.reads, (*access.writes, GRADIENTS))
    return replace(
        needs,
        phases={**needs.phases, Phase.BACKWARD_WEIGHT: written},
        buffers={**needs.buffers, GRADIENTS: BufferSpec((shards, _row_size(group)), "float32")},
    )


def _gradient_sizes(group: Group) -> tuple[int, int]:
    """Return the elements of the gradients of weight and bias.

    The kernels of layers without bias write a gradient for one.
    """
    weight, *bias = group.head.parameters
    return weight.size, bias[0].size if bias else group.head.output_maps[0]


def _row_size(group: Group) -> int:
    return sum(map(padded, _gradient_sizes(group)))


def bind_sum(
    group: Group, arrays: Arrays, replica: CudaReplica, rows: Array, start: int, parts: int = 1
) -> Callable[[], None]:
    """Return a function that enqueues the sum over the micro-shards of each gradient slot.

    Args:
        group: has weights.
        arrays: of the group.
        replica: its plan has micro-shards.
        rows: gradients, a row for each micro-shard; with split-K one for each of its parts.
        start: of the gradient of the bias in a row.
        parts: of split-K, after whose weights the biases follow.
    """
    shards, (weights, *bias) = replica.plan.micro_shards, group.head.parameters
    assert shards is not None
    dw, biases = arrays["dweight_slots"], bias[0].size if bias else 0
    db = arrays["dbias_slots"] if bias else dw
    width = vector_width(math.gcd(weights.size, biases), 4)
    vectors, pitch = (weights.size + biases) // width, np.int32(rows.shape[1])
    last = dw, np.int32(weights.size), db, np.int32(biases)
    slot_pitch = np.int32(replica.gradient_slots.shape[1])
    macros = {"VECTOR": width, **shard_macros(shards)}
    if parts == 1:
        add = replica.device.function("micro_shards.cu", "add_gradients", **macros)
        return lambda: launch(add, vectors, rows, pitch, np.int32(start), *last, slot_pitch)
    add = replica.device.function("micro_shards.cu", "add_split_gradients", **macros)
    return lambda: launch_reduction(add, vectors, rows, np.int32(parts), pitch, *last, slot_pitch)


class _ShardArrays(ReplacedArrays):
    """The arrays of the samples of a micro-shard.

    Args:
        arrays: of the whole batch.
        replaced: arrays that are used instead, by local name.
        cut: names of the arrays that have rows for each sample.
        rows: of a whole batch.
        samples: of the micro-shard.
    """

    def __init__(
        self, arrays: Arrays, replaced: Mapping[str, Array], cut: Collection[str], rows: int,
        samples: slice,
    ) -> None:  # fmt: skip
        super().__init__(arrays, replaced)
        self._cut, self._rows, self._samples = cut, rows, samples

    def __getitem__(self, name: str, /) -> Any:
        array = super().__getitem__(name)
        if name not in self._cut:
            return array
        rows = array.shape[0] // self._rows
        return array[self._samples.start * rows : self._samples.stop * rows]


class ShardedWeightGradient:
    """The weight gradient of a group, by a launch of its kernels for each of several micro-shards.

    Args:
        bind: returns the operation of the group for some arrays.
        group: the layers.
        access: of the stage.
        arrays: of the whole batch.
        replica: its plan has micro-shards.
    """

    def __init__(
        self, bind: Callable[[Arrays], Operation[Any]], group: Group, access: Access,
        arrays: Arrays, replica: CudaReplica,
    ) -> None:  # fmt: skip
        self._bind, self._group, self._arrays, self._replica = bind, group, arrays, replica
        self._cut = set(access.reads) - set(access.writes)
        self._sizes = _gradient_sizes(group)
        self._kernels: dict[tuple[int, int], Kernel] = {}
        shards = replica.plan.micro_shards
        assert shards is not None
        self._add = bind_sum(group, arrays, replica, arrays[GRADIENTS], padded(self._sizes[0]))
        smaller, larger = divmod(replica.plan.batch_size, shards.count)
        for shard in range(shards.count):
            self._kernel(shard, shard * smaller + min(shard, larger))

    def __call__(self, context: Context) -> None:
        for shard, (start, stop) in enumerate(pairwise(context.bounds.tolist())):
            self._kernel(shard, start)(replace(context, n=stop - start))
        self._add()

    def _kernel(self, shard: int, start: int) -> Kernel:
        """Return the kernel of a micro-shard that begins at sample `start`, which is bound once."""
        if (shard, start) not in self._kernels:
            plan = self._replica.plan
            stop = min(start + plan.setting.shard_size, plan.batch_size)
            arrays = _ShardArrays(
                self._arrays, self._rows(shard), self._cut, plan.batch_size, slice(start, stop)
            )
            kernels = self._bind(arrays).kernels((Phase.BACKWARD_WEIGHT,))
            self._kernels[shard, start] = kernels[Phase.BACKWARD_WEIGHT]
        return self._kernels[shard, start]

    def _rows(self, shard: int) -> dict[str, Array]:
        """Return the arrays that receive the gradients of a micro-shard, by local name."""
        row, (weights, biases) = self._arrays[GRADIENTS][shard], self._sizes
        start = padded(weights)
        return {
            "dweight": row[:weights].reshape(self._arrays["dweight"].shape),
            "dbias": row[start : start + biases],
        }
