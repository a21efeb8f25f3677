"""Batch normalisation, with addition and a function fused; see ``batch_norm_*.cu``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dptrain.backends.cuda.channels import ChannelLaunch
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import Array, Function, Macro
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.elementwise.activations import fused_macros
from dptrain.backends.cuda.operation import Operation
from dptrain.backends.device_replica import SummedStatistics
from dptrain.backends.replica import Context, Kernel
from dptrain.network.combining import Add
from dptrain.network.elementwise import Activation
from dptrain.network.normalization import BatchNorm2d, FrozenBatchNorm2d
from dptrain.plan.lowering import Access, BufferSpec, Explanation, Group, GroupNeeds, Phase, Setting

NO_ACTIVATION, FROM_X, FROM_Y = range(3)
"""How backward kernels undo a fused function, ``ACTIVATION_FROM`` of ``activation.cuh``."""


def activation_source(group: Group) -> int:
    """Return how the gradient before a fused function is computed.

    Without an addition, its input follows from x, which is read anyway.
    """
    if not _activates(group):
        return NO_ACTIVATION
    return FROM_Y if Add in group.kinds else FROM_X


def activation_macros(group: Group) -> dict[str, Macro]:
    """Return the macros of backward kernels for the function of a group."""
    layers = (node.layer for node in group.nodes)
    return {"ACTIVATION_FROM": activation_source(group), **fused_macros(layers)}


def _activates(group: Group) -> bool:
    return any(isinstance(node.layer, Activation) for node in group.nodes)


STATISTICS_FILE, BACKWARD_FILE = "batch_norm_statistics.cu", "batch_norm_backward_statistics.cu"

SUMS_LAUNCH = {"CHANNEL_THREADS": 512, "CHANNEL_VECTORS": 2, "VECTOR": 4}
SUMMED_CHANNELS = 8
"""Macros and channels of a block that adds the sums of another group's blocks. Few channels leave
many threads for each, and are a sector of memory of 32 bytes."""


def stored_gradient(group: Group) -> tuple[str, ...]:
    """Return the local name of the gradient before the function if a phase stores it, or ().

    It is the gradient of the other tensor. If no stage reads that, it replaces dy, unless dy is the
    gradient before the function already.
    """
    if Add not in group.kinds:
        return ()
    if "dx2" in group.gradients:
        return ("dx2",)
    return ("dy",) if _activates(group) and not group.gradient_sums_of else ()


@dataclass(frozen=True)
class SumKernel:
    """A kernel that adds statistics over samples, and over ranks if it is compiled for that.

    Attributes:
        compile: returns the kernel, compiled with further macros.
        enqueue: enqueues the compiled kernel for a number of samples, with its last arguments,
            which are about the ranks.
        column_channels: channels that the last block of a sum adds.
    """

    compile: Callable[..., Function]
    enqueue: Callable[[Function, int, Sequence[Any]], None]
    column_channels: int

    def compile_across_ranks(self) -> Function:
        """Return the kernel that adds over several ranks."""
        return self.compile(ACROSS_RANKS=1)


class BatchNormOperation(Operation[BatchNorm2d]):
    """BatchNorm2d, optionally with the addition of another tensor, optionally with a function.

    With an addition, the gradient before the function is that of the other tensor. It is written
    while the statistics are computed, and the gradient of x continues from it
    (`stored_gradient`).
    """

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        return local == "dx"

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        channels, *sides = group.head.output_maps
        pixels, found = setting.batch_size * math.prod(sides), dict[Phase, Explanation]()
        for phase in cls.needs(group, setting).phases:
            sums = phase in (Phase.STATISTICS, Phase.BACKWARD_STATISTICS)
            layout = ChannelLaunch.of(channels, setting, sums=sums)
            algorithm = "channel sums" if sums else "channel map"
            writers = {
                Phase.STATISTICS: (group.sums_of, "its output"),
                Phase.BACKWARD_STATISTICS: (group.gradient_sums_of, "the gradient of its input"),
            }
            writer, summed = writers.get(phase, ("", ""))
            if writer:
                found[phase] = Explanation("sums of blocks", reason=f"{writer} sums {summed}")
                continue
            found[phase] = Explanation(algorithm, layout.tile(pixels), reason="the only kernel")
        return found

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        channels, *sides = group.head.output_maps
        adds = Add in group.kinds
        inputs = ("x", "x2") if adds else ("x",)
        if not setting.training:
            return GroupNeeds({Phase.FORWARD: Access(inputs, ("y",))})
        sums = ChannelLaunch.of(channels, setting, sums=True)
        pixels, pair = setting.batch_size * math.prod(sides), (2, channels)
        own = () if group.gradient_sums_of else ("backward_partial", "tickets")
        partial = {} if group.sums_of else {"partial": sums.partial(pixels, 3, channels)}
        if own:
            partial["backward_partial"] = sums.partial(pixels, 2, channels)
        statistics = ("input_sums",) if group.sums_of else ("x", "tickets")
        written = () if group.sums_of else ("partial", "tickets")
        buffers = {
            "moments": BufferSpec(pair, "float32"),
            "totals": BufferSpec((1 + 2 * channels,), "float64"),
            **partial,
            "backward_sums": BufferSpec(pair, "float32"),
            "backward_totals": BufferSpec(pair, "float64"),
            "tickets": sums.tickets,
        }
        stored = stored_gradient(group)
        # With sums of another group, dy is the gradient before the function, and dx2 is dy.
        gradients = ("gradient_sums",) if group.gradient_sums_of else ("dy", "x", "tickets")
        mask = ("y",) if own and activation_source(group) == FROM_Y else ()
        phases = {
            Phase.STATISTICS: Access(statistics, ("moments", "totals", *written)),
            Phase.FORWARD: Access((*inputs, "moments"), ("y",)),
            Phase.BACKWARD_STATISTICS: Access(
                (*gradients, *mask, "moments", "totals"),
                ("backward_sums", "backward_totals", *own, *stored),
            ),
        }
        if "dx" in group.gradients:
            dz = next(iter(stored), "dy")
            phases[Phase.BACKWARD_INPUT] = Access((dz, "x", "moments", "backward_sums"), ("dx",))
        overwrites = "dx2" if "dx2" in stored else None
        return GroupNeeds(phases, buffers, kept=("tickets",), overwrites_dy=overwrites)

    @property
    def _channels(self) -> int:
        channels: int = self.group.head.output_maps[0]
        return channels

    @property
    def _pixels(self) -> int:
        """Pixels of a sample."""
        return math.prod(self.group.head.output_maps[1:])

    @property
    def _adds(self) -> bool:
        return Add in self.group.kinds

    def _launch(self, *, sums: bool) -> ChannelLaunch:
        return ChannelLaunch.of(self._channels, self.setting, sums=sums)

    def statistics(self) -> Kernel:
        """Return the stage that writes the moments of x."""
        size = np.int32(self._channels)
        moments = self.arrays["moments"], self.arrays["running_mean"], self.arrays["running_var"]
        constants = np.float32(self.layer.epsilon), np.float32(self.layer.momentum)
        totals, layout = self.arrays["totals"], self._launch(sums=True)
        function = layout.function(self, STATISTICS_FILE, "batch_norm_moments")
        results = [totals, *moments, *constants]
        kernel = self._add_input_sums(results) if self.group.sums_of else self._sum_input(results)

        def finish() -> None:
            launch(function, self._channels, totals, *moments, size, *constants)

        enqueue = self._add_over_ranks(Phase.STATISTICS, totals, kernel, finish)

        def run(context: Context) -> None:
            if context.training:
                enqueue(context.n)

        return run

    def _add_over_ranks(
        self, phase: Phase, totals: Array, kernel: SumKernel, finish: Callable[[], None]
    ) -> Callable[[int], None]:
        """Return a function that enqueues sums over some samples and over the ranks.

        Args:
            phase: of the sums.
            totals: receives them.
            kernel: adds over samples, and over the ranks if it can.
            finish: enqueues what follows from the sums, if another kernel adds over the ranks.
        """
        replica, alone = self.replica, kernel.compile()
        # The stages of several input buffers have the same statistics.
        key = self.group.name, phase, self.device.address(totals)
        summed = replica.summed_statistics.setdefault(
            key,
            SummedStatistics(
                totals, self._channels, kernel.column_channels, kernel.compile_across_ranks
            ),
        )

        def enqueue(samples: int) -> None:
            ranks = replica.statistics_ranks
            if ranks > 1:
                kernel.enqueue(kernel.compile_across_ranks(), samples, summed.arguments)
            else:
                kernel.enqueue(alone, samples, [np.int32(ranks)])
            if ranks == 0:
                assert replica.enqueue_statistics_sum is not None
                replica.enqueue_statistics_sum(summed)
                finish()

        return enqueue

    def _sum_input(self, results: list[Any]) -> SumKernel:
        """Return the kernel that sums over x."""
        a, layout = self.arrays, self._launch(sums=True)
        arrays = a["x"], a["partial"], a["tickets"]
        channels, pixels = np.int32(self._channels), self._pixels

        def enqueue(function: Function, samples: int, ranks: Sequence[Any]) -> None:
            count = samples * pixels
            layout.enqueue(function, count, [*arrays, np.int32(count), channels, *results, *ranks])

        compiled = partial(layout.function, self, STATISTICS_FILE, "batch_norm_statistics")
        return SumKernel(compiled, enqueue, layout.vectors * layout.width)

    def _add_input_sums(self, results: list[Any]) -> SumKernel:
        """Return the kernel that adds the sums that the group before has written."""
        return self._sum_rows(
            STATISTICS_FILE, "batch_norm_statistics_of_sums", "input_sums", results
        )

    def _sum_rows(self, file: str, name: str, sums: str, arguments: Sequence[Any]) -> SumKernel:
        """Return a kernel that adds rows of sums."""
        rows, channels = self.arrays[sums], np.int32(self._channels)
        grid = 1, ceil_div(self._channels, SUMMED_CHANNELS), 1
        first = rows, np.int32(rows.shape[0]), channels

        def enqueue(function: Function, samples: int, ranks: Sequence[Any]) -> None:
            block = SUMS_LAUNCH["CHANNEL_THREADS"], 1, 1
            function(grid, block, [*first, *arguments, *ranks])

        compiled = partial(self.function, file, name, **SUMS_LAUNCH)
        return SumKernel(compiled, enqueue, SUMMED_CHANNELS)

    def forward(self) -> Kernel:
        """Return the stage that writes y."""
        a, layout, channels = self.arrays, self._launch(sums=False), self._channels
        function = layout.function(
            self,
            "batch_norm_forward.cu",
            "batch_norm_forward",
            ADD=int(self._adds),
            ACTIVATES=int(_activates(self.group)),
            **fused_macros(node.layer for node in self.group.nodes),
        )
        arrays = a["x"], a["x2"] if self._adds else a["x"], a["y"]
        parameters = a["weight"], a["bias"]
        running: tuple[Any, ...] = a["running_mean"], a["running_var"]
        trains = self.setting.training and not isinstance(self.layer, FrozenBatchNorm2d)
        minibatch = (a["moments"][0], a["moments"][1]) if trains else running

        def run(context: Context) -> None:
            count, training = context.n * self._pixels, context.training and trains
            if count:
                layout.enqueue(function, count, [
                    *arrays, *(minibatch if training else running), *parameters, np.int32(count),
                    np.int32(channels), np.float32(self.layer.epsilon), np.int32(not training),
                ])  # fmt: skip

        return run

    def backward_statistics(self) -> Kernel:
        """Return the stage that writes the gradients of the parameters, and that before the
        function if it is stored.
        """
        a, layout, channels = self.arrays, self._launch(sums=True), self._channels
        count = a["totals"][:1]
        function = layout.function(self, BACKWARD_FILE, "batch_norm_backward_sums")
        totals, backward_sums = a["backward_totals"].reshape(-1), a["backward_sums"]
        results = [totals, count, backward_sums, a["dweight"], a["dbias"]]
        of_sums = self.group.gradient_sums_of
        kernel = self._add_gradient_sums(results) if of_sums else self._sum_gradient(results)

        def finish() -> None:
            arguments = totals, count, a["moments"], backward_sums, np.int32(channels)
            launch(function, channels, *arguments)

        enqueue = self._add_over_ranks(Phase.BACKWARD_STATISTICS, totals, kernel, finish)
        return lambda context: enqueue(context.n)

    def _sum_gradient(self, results: list[Any]) -> SumKernel:
        """Return the kernel that sums over the gradient."""
        a, layout = self.arrays, self._launch(sums=True)
        y = a["y"] if activation_source(self.group) == FROM_Y else a["dy"]
        maps = [a["dy"], y, a["x"], a[self._before_activation]]
        constants = [a["moments"], a["weight"], a["bias"], a["backward_partial"], a["tickets"]]
        channels, pixels = np.int32(self._channels), self._pixels

        def enqueue(function: Function, samples: int, ranks: Sequence[Any]) -> None:
            count = samples * pixels
            sizes = [np.int32(count), channels, *ranks]
            layout.enqueue(function, count, [*maps, *constants, *results, *sizes])

        compiled = partial(
            layout.function,
            self,
            BACKWARD_FILE,
            "batch_norm_backward_statistics",
            **activation_macros(self.group),
            STORE_DZ=int(len(stored_gradient(self.group)) > 0),
        )
        return SumKernel(compiled, enqueue, layout.vectors * layout.width)

    def _add_gradient_sums(self, results: list[Any]) -> SumKernel:
        """Return the kernel that adds the sums that the group after this one has written."""
        return self._sum_rows(
            BACKWARD_FILE,
            "batch_norm_backward_statistics_of_sums",
            "gradient_sums",
            [self.arrays["moments"], *results],
        )

    @property
    def _before_activation(self) -> str:
        """The array of the gradient before the function, if it is stored."""
        return next(iter(stored_gradient(self.group)), "dy")

    def backward_input(self) -> Kernel:
        """Return the stage that writes dx."""
        a, layout, channels = self.arrays, self._launch(sums=False), self._channels
        is_undone = self._adds or self.group.gradient_sums_of
        macros = {} if is_undone else activation_macros(self.group)
        macros |= self._adding("dx")
        function = layout.function(
            self, "batch_norm_backward_input.cu", "batch_norm_backward_input", **macros
        )
        dz = a[self._before_activation]
        arrays = (
            dz,
            dz,
            a["x"],
            a["dx"],
            a["moments"],
            a["weight"],
            a["bias"],
            a["backward_sums"],
        )

        def run(context: Context) -> None:
            count = context.n * self._pixels
            if count:
                layout.enqueue(function, count, [*arrays, np.int32(count), np.int32(channels)])

        return run


class FrozenBatchNormOperation(BatchNormOperation):
    """FrozenBatchNorm2d, optionally with a function."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        reads = ("dy", "x") if _activates(group) else ("dy",)
        forward = Access(("x",), ("y",))
        phases = {Phase.FORWARD: forward, Phase.BACKWARD_INPUT: Access(reads, ("dx",))}
        return GroupNeeds(phases, overwrites_dy="dx")

    def backward_input(self) -> Kernel:
        """Return the stage that writes dx."""
        a, layout, channels = self.arrays, self._launch(sums=False), self._channels
        file, name = "batch_norm_backward_input.cu", "frozen_batch_norm_backward_input"
        function = layout.function(
            self, file, name, **activation_macros(self.group), **self._adding("dx")
        )
        running = a["running_mean"], a["running_var"]
        arrays = a["dy"], a["x"], a["dx"], *running, a["weight"], a["bias"]

        def run(context: Context) -> None:
            count = context.n * self._pixels
            if count:
                sizes = np.int32(count), np.int32(channels), np.float32(self.layer.epsilon)
                layout.enqueue(function, count, [*arrays, *sizes])

        return run
