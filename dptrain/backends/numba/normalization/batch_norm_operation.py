"""BatchNorm2d bound to arrays, optionally fused with a following Add and ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.normalization import batch_norm
from dptrain.backends.numba.normalization.channel_passes import (
    ADDS,
    COMPUTED,
    COPIED,
    DY,
    RELU,
    STORED,
    SUM,
)
from dptrain.backends.numba.operations import Operation, grain_of
from dptrain.backends.numba.programs import HostCall, StageKernel
from dptrain.backends.numba.reduction import sum_partials
from dptrain.backends.replica import Context
from dptrain.native.threads import Launch, ThreadPool
from dptrain.network.activations import ReLU
from dptrain.network.combining import Add
from dptrain.network.network import Node
from dptrain.network.normalization import BatchNorm2d, Normalization
from dptrain.plan.lowering import Access, BufferSpec, Explanation, Group, GroupNeeds, Phase, Setting
from dptrain.plan.shards import addition_steps

N = TypeVar("N", bound=Normalization)


class ChannelNormalization(Operation[N]):
    """A normalisation with a weight and a bias per channel, whose gradients are sums of samples.

    Attributes:
        channels, map_pixels: of a sample.
        parts: float64 (micro-shards, 1 + 2·C), see `batch_norm`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.channels, height, width = self.group.head.output_maps
        self.map_pixels = height * width
        self.parts = np.zeros((max(self.shards, 1), 1 + 2 * self.channels))

    def maps(self, name: str) -> NDArray[Any]:
        """Return an array as (N, H·W, C)."""
        array = self.arrays[name]
        return array.reshape(len(array), -1, array.shape[-1])

    def samples_launch(self, partial: str, bands: int) -> Launch:
        """Return the launch that adds the rows of the bands of each micro-shard to `parts`."""
        a = self.arrays
        launch = self.thread_pool.bind(
            batch_norm.sum_samples,
            a[partial],
            a["bounds"],
            bands,
            self.map_pixels,
            self.parts,
            grain=grain_of(len(a[partial])),
        )
        launch.set_items(2 * self.channels)
        return launch

    def merges(self) -> NDArray[np.int64]:
        """Return the order in which the micro-shards of this rank are added."""
        return self.arrays["merges"] if self.shards else np.zeros(1, np.int64)

    def gradient_launches(self) -> tuple[Launch, Launch]:
        """Return the launches that turn `parts` into the gradients of weight and bias.

        Ranks add parameter gradients in float32.
        """
        c, alone = self.channels, ThreadPool(1)
        rounded = np.zeros((len(self.parts), 2 * c), np.float32)
        launches = (
            alone.bind(batch_norm.round_parts, self.parts, rounded),
            alone.bind(
                sum_partials,
                rounded,
                *addition_steps(self.merges()),
                self.gradient_slots(c),
            ),
        )
        for launch in launches:
            launch.set_items(2 * c)
        return launches


class BatchNormalization(ChannelNormalization[BatchNorm2d]):
    """BatchNorm2d, optionally fused with ReLU, with Add, or with Add and ReLU.

    The output of the normalisation before ReLU is not stored. With Add, the gradient of the second
    input is the gradient before ReLU, which the sums of the backward pass store and the gradient of
    the first input reads (`_stored_gradient`). Without Add, both compute the sign of the output
    again, from the input.
    """

    is_frozen: ClassVar[bool] = False

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        c, height, width = group.head.output_shape
        scratch = BufferSpec((setting.threads, batch_norm.ROWS * c), "float32")
        moments = BufferSpec((2, c), "float32")
        inputs = ("x", "x2") if Add in group.kinds else ("x",)
        buffers = {"moments": moments, "forward_scratch": scratch}
        written = ("y", "moments", "forward_scratch")
        if not setting.training:
            return GroupNeeds({Phase.FORWARD: Access(inputs, written)}, buffers)
        rows = setting.batch_size * batch_norm.num_bands(height * width, c)
        partial = BufferSpec((rows, 2 * c), "float64")
        buffers |= {
            "partial": partial,
            "statistics_scratch": scratch,
            "backward_sums": moments,
            "backward_partial": partial,
            "gradient_scratch": scratch,
            "input_scratch": scratch,
        }
        masks = ("y",) if Add in group.kinds and ReLU in group.kinds else ()
        stored = _stored_gradient(group)
        phases = {
            Phase.STATISTICS: Access(("x",), ("moments", "partial", "statistics_scratch")),
            Phase.FORWARD: Access((*inputs, "moments"), written),
            Phase.BACKWARD_STATISTICS: Access(
                ("dy", "x", "moments", *masks),
                ("backward_sums", "backward_partial", "gradient_scratch", *stored),
            ),
        }
        if "dx" in group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(
                ("x", *(stored or ("dy",)), "moments", "backward_sums"), ("dx", "input_scratch")
            )
        return GroupNeeds(phases, buffers, overwrites_dy="dx2" if "dx2" in stored else "dx")

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        c, height, width = group.head.output_shape
        bands = batch_norm.num_bands(height * width, c)
        units = f"{setting.batch_size} samples × {bands} band{'s' * (bands > 1)}"
        only = Explanation("channels in registers", units=units, reason="the only algorithm")
        return dict.fromkeys(Phase, only)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bands = batch_norm.num_bands(self.map_pixels, self.channels)
        self.grain = grain_of(-(-self.map_pixels // self.bands) * self.channels)
        self.totals = np.zeros(1 + 2 * self.channels)

    def _norm(self, variant: int) -> batch_norm.ChannelNorm:
        a = self.arrays
        return batch_norm.ChannelNorm(a["moments"], a["weight"], a["bias"], self.bands, variant)

    def _bind(self, kernel: Any, *operands: Any) -> Launch:
        return self.thread_pool.bind(kernel, *operands, grain=self.grain)

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        a, adds = self.arrays, Add in self.group.kinds
        variant = (SUM if adds else 0) | (RELU if ReLU in self.group.kinds else 0)
        x2 = self.maps("x2" if adds else "x")
        launch = self._bind(
            batch_norm.normalise_bands,
            self.maps("x"),
            x2,
            self.maps("y"),
            self._norm(variant),
            a["forward_scratch"],
        )
        running = ThreadPool(1).bind(
            batch_norm.running_moments,
            a["running_mean"],
            a["running_var"],
            a["moments"],
            self.layer.epsilon,
        )

        def prepare(context: Context) -> None:
            minibatch = context.training and not (self.group.infers or self.is_frozen)
            running.set_items(0 if minibatch else self.channels)
            launch.set_items(context.n * self.bands)

        return StageKernel((running, launch), prepare)

    def _total_launches(self) -> tuple[HostCall, Launch]:
        """Return the sum over all ranks, and the launch that replaces it if there is one rank."""
        parts, totals, over_ranks = self.parts, self.totals, self.statistics_sum
        exchange = HostCall(
            lambda: over_ranks.add(parts, totals), lambda: not over_ranks.is_local()
        )
        steps, results = addition_steps(self.merges())
        add = ThreadPool(1).bind(batch_norm.add_parts, parts, steps, results, totals)
        return exchange, add

    def statistics(self) -> StageKernel:
        """Return the stage that writes the moments of x."""
        a = self.arrays
        bands = self._bind(
            batch_norm.sum_bands, self.maps("x"), a["partial"], self.bands, a["statistics_scratch"]
        )
        exchange, add = self._total_launches()
        finish = ThreadPool(1).bind(
            batch_norm.finish_statistics,
            self.totals,
            a["moments"],
            a["running_mean"],
            a["running_var"],
            self.layer.epsilon,
            self.layer.momentum,
        )
        finish.set_items(self.channels)

        def prepare(context: Context) -> None:
            bands.set_items(context.n * self.bands)
            add.set_items(self.totals.size if self.statistics_sum.is_local() else 0)

        launches = bands, self.samples_launch("partial", self.bands), exchange, add, finish
        return StageKernel(launches, prepare, every_step=True)

    def _gradient_variant(self) -> int:
        if _stored_gradient(self.group):
            return STORED if ReLU in self.group.kinds else COPIED
        return COMPUTED if ReLU in self.group.kinds else DY

    @property
    def _before_relu(self) -> str:
        """The array of the gradient before the ReLU, if it is stored."""
        return next(iter(_stored_gradient(self.group)), "dy")

    def backward_statistics(self) -> StageKernel:
        """Return the stage that writes the gradients of the parameters, and that before the ReLU
        if it is stored.
        """
        a, variant = self.arrays, self._gradient_variant()
        y = "y" if variant == STORED else "x"
        bands = self._bind(
            batch_norm.sum_gradient_bands,
            self.maps("x"),
            self.maps("dy"),
            self.maps(y),
            self.maps(self._before_relu),
            self._norm(variant),
            a["backward_partial"],
            a["gradient_scratch"],
        )
        exchange, add = self._total_launches()
        means = ThreadPool(1).bind(batch_norm.store_means, self.totals, a["backward_sums"])
        means.set_items(2 * self.channels)

        def prepare(context: Context) -> None:
            bands.set_items(context.n * self.bands)
            add.set_items(self.totals.size if self.statistics_sum.is_local() else 0)

        samples = self.samples_launch("backward_partial", self.bands)
        launches = bands, samples, *self.gradient_launches(), exchange, add, means
        return StageKernel(launches, prepare, every_step=True)

    def _backward_sums(self) -> NDArray[Any]:
        """Return the means of dz · x̂ and of dz over the minibatch."""
        return self.arrays["backward_sums"]

    def backward_input(self) -> StageKernel:
        """Return the stage that writes dx."""
        a = self.arrays
        variant = DY if _stored_gradient(self.group) else self._gradient_variant()
        variant |= ADDS if "dx" in self.group.adds else 0
        launch = self._bind(
            batch_norm.propagate_bands,
            self.maps("x"),
            self.maps(self._before_relu),
            self.maps("dx"),
            self._norm(variant),
            self._backward_sums(),
            a["input_scratch"],
        )
        return StageKernel((launch,), lambda context: launch.set_items(context.n * self.bands))


class FrozenBatchNormalization(BatchNormalization):
    """FrozenBatchNorm2d, optionally fused with ReLU.

    The gradient is that of `BatchNormalization` without the terms of the statistics.
    """

    is_frozen: ClassVar[bool] = True

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        needs = super().needs(group, replace(setting, training=False))
        buffers = {**needs.buffers, "input_scratch": needs.buffers["forward_scratch"]}
        reads, writes = ("x", "dy", "moments"), ("dx", "input_scratch")
        phases = {**needs.phases, Phase.BACKWARD_INPUT: Access(reads, writes)}
        return GroupNeeds(phases, buffers, overwrites_dy="dx")

    def _backward_sums(self) -> NDArray[Any]:
        return np.zeros((2, self.channels), np.float32)


def _stored_gradient(group: Group) -> tuple[str, ...]:
    """Return the local name of the gradient before the ReLU if a phase stores it, or ().

    It is the gradient of the second input. If no stage reads that, it replaces dy.
    """
    if Add not in group.kinds:
        return ()
    if "dx2" in group.gradients:
        return ("dx2",)
    return ("dy",) if ReLU in group.kinds else ()


def fuses_batch_norm(nodes: tuple[Node, ...]) -> bool:
    """Return whether a fused Add, if there is one, has two inputs."""
    return all(node.layer.num_inputs == 2 for node in nodes if isinstance(node.layer, Add))
