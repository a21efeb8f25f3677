"""Group normalisation, and layer normalisation over channels; see ``group_norm.cu``."""

from __future__ import annotations

import math

import numpy as np

from dptrain.backends.cuda.channels import ChannelLaunch
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.hardware import WARP_SIZE, limits_of
from dptrain.backends.cuda.device.launching import THREADS
from dptrain.backends.cuda.operation import Operation, vector_width
from dptrain.backends.replica import Context, Kernel
from dptrain.network.normalization import GroupNorm, Normalization
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting

MAX_WARP_ELEMENTS = 2048
"""Largest instance, in elements, that a warp processes alone; larger ones have a block."""

MAX_HELD_ELEMENTS = 32
"""Most elements of an instance that a thread keeps in registers."""

BLOCKS_PER_SM = 16
"""Most blocks for each multiprocessor, about twice as many as are resident."""


def instance_threads(vectors: int, width: int) -> tuple[int, int]:
    """Return the threads of an instance, and the vectors that each of them keeps in registers.

    Args:
        vectors: of the instance.
        width: elements of a vector.

    Example:
        >>> instance_threads(12, 8), instance_threads(96, 8), instance_threads(1000, 8)
        ((4, 3), (32, 3), (256, 0))
    """
    if vectors * width > MAX_WARP_ELEMENTS:
        return THREADS, 0
    counts = [WARP_SIZE >> shift for shift in range(4)]
    held = {threads: ceil_div(vectors, threads) for threads in counts}
    fits = [threads for threads in counts if held[threads] * width <= MAX_HELD_ELEMENTS]
    if not fits:
        return WARP_SIZE, 0
    # Of equally many idle threads, those with the most threads for an instance.
    threads = min(fits, key=lambda count: count * held[count] - vectors)
    return threads, held[threads]


def instance_shape(group: Group) -> tuple[int, int, int]:
    """Return groups of channels, pixels of an instance, and instances per sample and group."""
    pixels = math.prod(group.head.output_shape[1:])
    layer = group.head.layer
    return (layer.groups, pixels, 1) if isinstance(layer, GroupNorm) else (1, 1, pixels)


class GroupNormOperation(Operation[Normalization]):
    """GroupNorm, or LayerNorm, for which each pixel is a sample of one pixel and one group.

    The elements of a vector are the channels of one pixel, in the order in which it is stored.
    """

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        groups, _, repeats = instance_shape(group)
        channels, *sides = group.head.output_shape
        buffers = {
            "moments": BufferSpec((setting.batch_size * repeats * groups, 2), "float32"),
        }
        phases = {Phase.FORWARD: Access(("x",), ("y", "moments"))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        sums = ChannelLaunch.of(channels, setting, sums=True)
        buffers["partial"] = sums.partial(setting.batch_size * math.prod(sides), 2, channels)
        buffers["tickets"] = sums.tickets
        reads = "dy", "x", "moments"
        phases[Phase.BACKWARD_WEIGHT] = Access((*reads, "tickets"), ("partial", "tickets"))
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(reads, ("dx",))
        return GroupNeeds(phases, buffers, kept=("tickets",))

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        return local == "dx"

    @property
    def _is_layer(self) -> int:
        """1 if an instance consists of the channels of a pixel."""
        return int(not isinstance(self.layer, GroupNorm))

    def forward(self) -> Kernel:
        """Return the stage that writes y."""
        a = self.arrays
        arrays = a["x"], a["y"], a["weight"], a["bias"], a["moments"]
        epsilon = np.float32(self.layer.epsilon)
        return self._by_instance("group_norm_forward", *arrays, last=(epsilon,))

    def backward_input(self) -> Kernel:
        """Return the stage that writes dx."""
        a = self.arrays
        arrays = a["dy"], a["x"], a["dx"], a["weight"], a["moments"]
        return self._by_instance("group_norm_backward_input", *arrays)

    def _sizes(self, n: int) -> list[np.int32]:
        """Return samples, pixels, channels and groups as the kernels receive them."""
        groups, pixels, repeats = instance_shape(self.group)
        channels = self.group.head.output_shape[0]
        return [np.int32(size) for size in (n * repeats, pixels, channels, groups)]

    def _by_instance(self, name: str, *arrays: object, last: tuple[np.generic, ...] = ()) -> Kernel:
        """Return a stage in which threads share the elements of an instance."""
        groups, pixels, repeats = instance_shape(self.group)
        group_channels = self.group.head.output_shape[0] // groups
        width = vector_width(group_channels, self.itemsize)
        threads, held = instance_threads(group_channels * pixels // width, width)
        adding = self._adding("dx") if name == "group_norm_backward_input" else {}
        function = self.function(
            "group_norm.cu", name, GROUP_THREADS=threads, HELD=held, VECTOR=width,
            IS_LAYER=self._is_layer, **adding,
        )  # fmt: skip
        most = limits_of(self.setting).multiprocessors * BLOCKS_PER_SM

        def run(context: Context) -> None:
            instances = context.n * repeats * groups
            if instances:
                grid = min(ceil_div(instances, THREADS // threads), most), 1, 1
                function(grid, (THREADS, 1, 1), [*arrays, *self._sizes(context.n), *last])

        return run

    def backward_weight(self) -> Kernel:
        """Return the stage that writes the gradients of the parameters."""
        a, channels = self.arrays, self.group.head.output_shape[0]
        layout = ChannelLaunch.of(channels, self.setting, sums=True)
        function = layout.function(
            self, "group_norm.cu", "group_norm_backward_weight", IS_LAYER=self._is_layer
        )
        arrays = (
            a["dy"],
            a["x"],
            a["moments"],
            a["partial"],
            a["tickets"],
            a["dweight"],
            a["dbias"],
        )
        size = math.prod(self.group.head.output_shape[1:])

        def run(context: Context) -> None:
            layout.enqueue(function, context.n * size, [*arrays, *self._sizes(context.n)])

        return run
