"""Batch normalisation whose statistics are summed for each micro-shard; see ``batch_norm.cuh``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from dptrain.backends.cuda.channels import ChannelLaunch
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.normalization.batch_norm import (
    BACKWARD_FILE,
    FROM_Y,
    STATISTICS_FILE,
    BatchNormOperation,
    activation_macros,
    activation_source,
    stored_gradient,
)
from dptrain.backends.cuda.shards import shard_arguments, shard_macros
from dptrain.backends.device_replica import SummedStatistics
from dptrain.backends.replica import Context, Kernel
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting
from dptrain.plan.shards import MicroShards

ROWS, BACKWARD_ROWS = "shard_totals", "backward_shard_totals"
"""Buffers of the sums of all micro-shards, with three and two sums of each channel."""


OTHER_KERNEL = np.int32(0)
"""The number of ranks that the kernels receive: other kernels add over the ranks."""


class ShardedBatchNorm(BatchNormOperation):
    """BatchNorm2d like `BatchNormOperation`, in a plan with micro-shards.

    A kernel sums each micro-shard of this rank. The rows of the other ranks' micro-shards are 0,
    until the sum over the ranks collects them; then another kernel adds all rows along the tree.
    """

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        needs = super().needs(group, setting)
        if not setting.training:
            return needs
        channels, *sides = group.head.output_maps
        sums = ChannelLaunch.of(channels, setting, sums=True)
        blocks = setting.shards * sums.blocks(setting.shard_size * math.prod(sides))
        buffers = dict(needs.buffers)
        del buffers["backward_totals"]
        buffers |= {
            "partial": BufferSpec((blocks, 3, channels), "float32"),
            "backward_partial": BufferSpec((blocks, 2, channels), "float32"),
            "tickets": BufferSpec(((setting.shards + 1) * sums.columns,), "uint32"),
            ROWS: BufferSpec((setting.all_shards, _row_size(3, channels)), "float64"),
            BACKWARD_ROWS: BufferSpec((setting.all_shards, _row_size(2, channels)), "float64"),
        }
        phases = dict(needs.phases)
        forward, backward = phases[Phase.STATISTICS], phases[Phase.BACKWARD_STATISTICS]
        phases[Phase.STATISTICS] = replace(forward, writes=(*forward.writes, ROWS))
        kept = (name for name in backward.writes if name != "backward_totals")
        phases[Phase.BACKWARD_STATISTICS] = Access(backward.reads, (*kept, BACKWARD_ROWS))
        return replace(needs, phases=phases, buffers=buffers)

    @property
    def _shards(self) -> MicroShards:
        shards = self.replica.plan.micro_shards
        assert shards is not None
        return shards

    def _summed(self, phase: Phase, rows: Array) -> SummedStatistics:
        """Return the rows as the sum over ranks knows them: as pairs of numbers."""
        key = self.group.name, phase, self.device.address(rows)
        pairs = rows.size // 2
        summed = SummedStatistics(rows.reshape(-1), pairs, pairs, lambda: None)
        return self.replica.summed_statistics.setdefault(key, summed)

    def _stage(
        self, phase: Phase, kernel: tuple[str, str, str], rows: Array,
        arguments: tuple[list[Any], list[Any]], finishing: list[Any], **macros: Any,
    ) -> Kernel:  # fmt: skip
        """Return the stage that sums each micro-shard, collects the rows of all ranks and adds.

        Args:
            phase: of the sums.
            kernel: file, name of the kernel that sums, and of the one that adds the rows. The
                former also adds them if no other rank has any.
            rows: receives the sums.
            arguments: of the kernel that sums, before and after the number of pixels.
            finishing: arguments of the kernel that adds rows.
            macros: of the kernel that sums.
        """
        layout, shards, pixels = self._launch(sums=True), self._shards, self._pixels
        file, name, finish_name = kernel
        macros = {**macros, **shard_macros(shards), "MICRO_SHARDS": 1}
        alone = layout.function(self, file, name, FINISHES=1, **macros)
        across = layout.function(self, file, name, **macros)
        finish = layout.function(self, file, finish_name, **macros)
        blocks, summed = layout.blocks(self.setting.shard_size * pixels), self._summed(phase, rows)
        sizes = [np.int32(size) for size in (pixels, shards.start, shards.total)]
        grid, block = (blocks, layout.columns, shards.count), (layout.threads, 1, 1)
        replica, (before, after) = self.replica, arguments

        def run(context: Context) -> None:
            is_alone, count = replica.statistics_ranks == 1, np.int32(context.n * pixels)
            last = *shard_arguments(context), *sizes
            (alone if is_alone else across)(grid, block, [*before, count, *after, *last])
            if not is_alone:
                assert replica.enqueue_statistics_sum is not None
                replica.enqueue_statistics_sum(summed)
                launch(finish, self._channels, *finishing)

        return run

    def statistics(self) -> Kernel:
        a, channels, rows = self.arrays, np.int32(self._channels), self.arrays[ROWS]
        results = a["moments"], a["running_mean"], a["running_var"]
        constants = np.float32(self.layer.epsilon), np.float32(self.layer.momentum)
        after = [channels, rows, *results, *constants, OTHER_KERNEL, a["totals"]]
        enqueue = self._stage(
            Phase.STATISTICS,
            (STATISTICS_FILE, "batch_norm_statistics", "batch_norm_moments_of_shards"), rows,
            ([a["x"], a["partial"], a["tickets"]], after),
            [rows, a["totals"], *results, channels, *constants],
        )  # fmt: skip

        def run(context: Context) -> None:
            if context.training:
                enqueue(context)

        return run

    def backward_statistics(self) -> Kernel:
        a, channels, rows = self.arrays, np.int32(self._channels), self.arrays[BACKWARD_ROWS]
        y = a["y"] if activation_source(self.group) == FROM_Y else a["dy"]
        maps = a["dy"], y, a["x"], a[self._before_activation]
        constants = a["moments"], a["weight"], a["bias"], a["backward_partial"], a["tickets"]
        results = a["backward_sums"], a["dweight_slots"], a["dbias_slots"]
        pitch, first = np.int32(self.replica.gradient_slots.shape[1]), np.int32(self._shards.start)
        before = [*maps, *constants, rows, a["totals"], *results]
        return self._stage(
            Phase.BACKWARD_STATISTICS,
            (BACKWARD_FILE, "batch_norm_backward_statistics", "batch_norm_gradients_of_shards"),
            rows, (before, [channels, OTHER_KERNEL, pitch]),
            [rows, first, a["totals"], a["moments"], *results, pitch, channels],
            STORE_DZ=int(len(stored_gradient(self.group)) > 0), **activation_macros(self.group),
        )  # fmt: skip


def _row_size(sums: int, channels: int) -> int:
    """Return the elements of a row: an even number, because sums over ranks transfer pairs."""
    return (sums * channels + 1) // 2 * 2
