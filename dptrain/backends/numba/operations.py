"""Operations: groups of layers bound to arrays, with the kernels that each phase launches.

Activations are (N, H, W, C) and contiguous, so they can be viewed as flat, as rows or as pixels.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.axis_taps import axis_taps
from dptrain.backends.numba import activations, dropout, elementwise, resampling
from dptrain.backends.numba.convolution.fused_pooling import Pool
from dptrain.backends.numba.normalization import normalization
from dptrain.backends.numba.pooling import pooling
from dptrain.backends.numba.programs import StageKernel, joined
from dptrain.backends.numba.reduction import GradientSlots
from dptrain.backends.pooling import sum_factor
from dptrain.backends.replica import Arrays, Context, Replica, SumStatistics
from dptrain.native.jit import Kernel
from dptrain.native.threads import Launch, ThreadPool
from dptrain.network.biases import BiasAdd
from dptrain.network.elementwise import Activation
from dptrain.network.layers import (
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    Pool2d,
    Reshape,
    StochasticDepth,
)
from dptrain.network.maps.resampling import Resampling
from dptrain.network.network import Node
from dptrain.philox import dropout_keep, threshold
from dptrain.plan.lowering import (
    Access,
    BufferSpec,
    Explanation,
    Group,
    GroupNeeds,
    Phase,
    Setting,
)

Kernels = Mapping[Phase, StageKernel]
L = TypeVar("L", bound=Layer)

DIRECT = "fp32-direct"
"""Name of the precision without Winograd convolutions."""

GRAIN = 8192
"""Elements of an elementwise kernel that are worth one more thread: 1 to 3 µs."""

WORD = 2**32 - 1
"""Largest random word."""


class ReplicaStatisticsSum:
    """The sum of statistics over ranks that the engine of a replica selects.

    Args:
        replica: is not kept alive.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica, self._local = weakref.ref(replica), replica.sum_statistics

    def _current(self) -> SumStatistics:
        replica = self._replica()
        return self._local if replica is None else replica.sum_statistics

    def is_local(self) -> bool:
        """Return whether only the micro-shards of this rank are added."""
        return self._current() is self._local

    def add(self, parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
        """Add the rows of all micro-shards of all ranks."""
        self._current()(parts, totals)


class Operation(ABC, Generic[L]):
    """A group of layers bound to arrays; L is the type of the first layer.

    Args:
        group: the layers.
        arrays: memory by local name.
        thread_pool: the threads that run the kernels.
        replica: has the seed of the dropout masks, the plan's setting and the sum of statistics.
    """

    def __init__(
        self, group: Group, arrays: Arrays, thread_pool: ThreadPool, replica: Replica
    ) -> None:
        self.group, self.arrays, self.thread_pool = group, arrays, thread_pool
        self.seed, setting = replica.context.seed, replica.plan.setting.of(group)
        self.statistics_sum = ReplicaStatisticsSum(replica)
        self.setting, self.precision, self.shards = setting, setting.precision, setting.shards
        # The table of operations has their types.
        self.layer = cast("L", group.head.layer)
        self.size = math.prod(group.tail.output_shape)

    @classmethod
    @abstractmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        """Return the phases and buffers that the group needs."""

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        """Return the algorithm of each phase for which there are several."""
        return {}

    def kernels(self, phases: Iterable[Phase]) -> Kernels:
        """Return the compiled kernel of each phase, from the method with the name of the phase."""
        return {phase: getattr(self, phase.value)() for phase in phases}

    def flat(self, name: str) -> NDArray[Any]:
        """Return an array in one dimension."""
        return self.arrays[name].reshape(-1)

    def rows(self, name: str) -> NDArray[Any]:
        """Return an array as (N, elements per sample)."""
        array = self.arrays[name]
        return array.reshape(len(array), -1)

    def gradient_slots(self, size: int, *, bias: bool = True) -> GradientSlots:
        """Return the gradients of a layer with `size` weights; without biases, db is dw."""
        dw, (slots, pitch) = self.arrays["dweight_slots"], self.arrays["gradient_slots"].shape
        return GradientSlots(dw, self.arrays["dbias_slots"] if bias else dw, size, pitch, slots)

    def pixels(self, name: str) -> NDArray[Any]:
        """Return an array as (N·H·W, C)."""
        array = self.arrays[name]
        return array.reshape(-1, array.shape[-1])


def grain_of(elements: int) -> int:
    """Return the items that are worth one more thread, from the elements that an item computes."""
    return -(-GRAIN // elements)


def each(launch: Launch, items: int) -> StageKernel:
    """Return a stage with one launch over `items` items per sample."""
    return StageKernel((launch,), lambda context: launch.set(context.n * items))


class _Single(Operation[L]):
    """One layer without parameters: y is computed from x, dx from dy and `backward_reads`."""

    in_place: ClassVar[bool] = False

    @classmethod
    def buffers(cls, shape: tuple[int, ...]) -> dict[str, BufferSpec]:
        """Return the buffers other than x and y; `shape` is that of the output, with the batch."""
        return {}

    @classmethod
    def backward_reads(cls, group: Group) -> tuple[str, ...]:
        """Return the arrays that backward reads in addition to dy and the buffers."""
        return ()

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        shape = (setting.batch_size, *group.tail.output_maps)
        buffers = cls.buffers(shape)
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy", *cls.backward_reads(group), *buffers), ("dx",))
        return GroupNeeds(phases, buffers, in_place=cls.in_place)

    @abstractmethod
    def forward(self) -> StageKernel:
        """Return the stage that writes y."""

    @abstractmethod
    def backward(self) -> StageKernel:
        """Return the stage that writes dx."""


class Alias(Operation[Flatten | Reshape]):
    """Flatten and Reshape: the same memory in another shape."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        return GroupNeeds(alias=True)


class BiasAddition(Operation[BiasAdd]):
    """y = x + bias of the channel or unit."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        assert not setting.training, "biases are layers only in inference"
        return GroupNeeds({Phase.FORWARD: Access(("x",), ("y",))})

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        x, bias, y = self.pixels("x"), self.arrays["bias"], self.pixels("y")
        launch = self.thread_pool.bind(elementwise.add_bias, x, bias, y, grain=grain_of(bias.size))
        return each(launch, self.size // bias.size)


class ActivationOperation(_Single[Activation]):
    """A function of each element."""

    @classmethod
    def backward_reads(cls, group: Group) -> tuple[str, ...]:
        return (group.head.layer_of(Activation).formula.reads,)

    def forward(self) -> StageKernel:
        kernel = activations.forward(self.layer.kind, str(self.layer.formula.output()))
        return self._stage(kernel, "x", "y")

    def backward(self) -> StageKernel:
        formula = self.layer.formula
        gradient = str(formula.gradient(first=True))
        kernel = activations.backward(self.layer.kind, gradient, formula.reads)
        return self._stage(kernel, "dy", formula.reads, "dx")

    def _stage(self, kernel: Kernel, *arrays: str) -> StageKernel:
        bind = self.thread_pool.bind
        return each(bind(kernel, *map(self.flat, arrays), grain=GRAIN), self.size)


class DropoutMask:
    """Dropout of the samples of a step, and of their gradients with the same mask.

    Args:
        layer: the layer, which has the dropout rate.
        index: position of the layer in the network.
        bits: uint8 (N, `dropout.mask_bytes`).
    """

    def __init__(
        self, layer: Dropout, index: int, bits: NDArray[Any], thread_pool: ThreadPool, seed: int
    ) -> None:
        self._bits, self._thread_pool = bits, thread_pool
        self._samples = np.zeros(len(bits), np.int64)
        limit, factor = threshold(layer.rate), 1.0 / (1.0 - layer.rate)
        if limit > WORD:  # By a rate that rounds to 1 nothing is kept.
            limit, factor = 0, 0.0
        self._factor = factor
        self._key = (limit, index, self._samples, seed & WORD, (seed >> 32) & WORD)

    @staticmethod
    def spec(shape: tuple[int, ...]) -> BufferSpec:
        """Return the buffer of the mask for activations of `shape`, which includes the batch."""
        return BufferSpec((shape[0], dropout.mask_bytes(math.prod(shape[1:]))), "uint8")

    def forward(self, x: NDArray[Any], y: NDArray[Any]) -> StageKernel:
        """Return the stage that draws a mask and writes y from x, both (N, elements) and possibly
        the same. Outside training it does nothing.
        """
        launch = self._thread_pool.bind(
            dropout.dropout_forward, x, y, self._bits, self._factor, self._key, varying=(0,),
            grain=grain_of(x.shape[1]),
        )  # fmt: skip

        def prepare(context: Context) -> None:
            self._samples[: context.n] = context.samples
            launch.set(context.n if context.training else 0, context.step)

        return StageKernel((launch,), prepare, every_step=True)

    def backward(self, dy: NDArray[Any], dx: NDArray[Any]) -> StageKernel:
        """Return the stage that writes dx from dy with the stored mask."""
        launch = self._thread_pool.bind(
            dropout.dropout_backward, dy, dx, self._bits, self._factor, grain=grain_of(dy.shape[1])
        )
        return each(launch, 1)


class Drop(_Single[Dropout]):
    """Dropout by `dptrain.philox`, in place if possible. Outside training the output is x."""

    in_place: ClassVar[bool] = True

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        return super().needs(group, setting) if setting.training else GroupNeeds(alias=True)

    @classmethod
    def buffers(cls, shape: tuple[int, ...]) -> dict[str, BufferSpec]:
        return {"mask": DropoutMask.spec(shape)}

    def _mask(self) -> DropoutMask:
        index, bits = self.group.head.index, self.arrays["mask"]
        return DropoutMask(self.layer, index, bits, self.thread_pool, self.seed)

    def forward(self) -> StageKernel:
        x, y = self.rows("x"), self.rows("y")
        draw = self._mask().forward(x, y)
        if np.may_share_memory(x, y):
            return draw
        copy = self.thread_pool.bind(elementwise.assign, x.reshape(-1), y.reshape(-1), grain=GRAIN)

        def prepare(context: Context) -> None:
            copy.set(0 if context.training else context.n * self.size)

        return joined(draw, StageKernel((copy,), prepare))

    def backward(self) -> StageKernel:
        return self._mask().backward(self.rows("dy"), self.rows("dx"))


class DropSamples(_Single[StochasticDepth]):
    """Stochastic depth: one choice of `dptrain.philox` for each sample, in place if possible.

    Backward draws again, because with recomputation it belongs to another instance.
    """

    in_place: ClassVar[bool] = True

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        return super().needs(group, setting) if setting.training else GroupNeeds(alias=True)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # No buffer of the plan, because it is written before the first stage of a step runs.
        self._factors = np.ones(self.setting.batch_size, np.float32)

    def forward(self) -> StageKernel:
        return self._stage("x", "y")

    def backward(self) -> StageKernel:
        return self._stage("dy", "dx")

    def _stage(self, source: str, target: str) -> StageKernel:
        bind, grain = self.thread_pool.bind, grain_of(self.size)
        arrays = self.rows(source), self.rows(target), self._factors
        launch = bind(elementwise.scale_samples, *arrays, grain=grain)
        factors, rate = self._factors, self.layer.rate
        draw = partial(dropout_keep, rate, 1, seed=self.seed, layer=self.group.head.index)

        def prepare(context: Context) -> None:
            factors[:] = 1.0
            if context.training:
                kept = draw(step=context.step, samples=context.samples)
                factors[: context.n] = kept[:, 0] / (1.0 - rate)
            launch.set(context.n)

        return StageKernel((launch,), prepare, every_step=True)


def pool_of(node: Node, *argmax: NDArray[Any]) -> Pool:
    """Return the geometry of a pooling layer, and its positions of the maxima."""
    layer = node.layer_of(Pool2d)
    (top, _), (left, _) = layer.pads(node.input_shape)
    _, height, width = node.input_shape
    return Pool(top, left, *layer.strides, *layer.windows, height, width, *argmax)


class _Pooling(_Single[Pool2d]):
    """Pooling, whose items are rows of the maps that a kernel writes."""

    def rows_stage(self, kernel: Any, result: str, *operands: Any) -> StageKernel:
        """Return a stage over the rows of `result`."""
        _, height, width, channels = self.arrays[result].shape
        launch = self.thread_pool.bind(kernel, *operands, grain=grain_of(width * channels))
        return each(launch, height)


class MaxPooling(_Pooling):
    """Maximum of each window; its gradient goes to the maximum only."""

    @classmethod
    def buffers(cls, shape: tuple[int, ...]) -> dict[str, BufferSpec]:
        return {"argmax": BufferSpec(shape, "int32")}

    def forward(self) -> StageKernel:
        a, pool = self.arrays, pool_of(self.group.head, self.arrays["argmax"])
        return self.rows_stage(pooling.max_forward, "y", a["x"], a["y"], pool)

    def backward(self) -> StageKernel:
        a, pool = self.arrays, pool_of(self.group.head, self.arrays["argmax"])
        return self.rows_stage(pooling.max_backward, "dx", a["dy"], a["dx"], pool)


class SumPooling(_Pooling):
    """Sum or mean of each window."""

    def forward(self) -> StageKernel:
        operands = (
            self.arrays["x"],
            self.arrays["y"],
            pool_of(self.group.head),
            sum_factor(self.layer),
        )
        return self.rows_stage(pooling.sum_forward, "y", *operands)

    def backward(self) -> StageKernel:
        operands = (
            self.arrays["dy"],
            self.arrays["dx"],
            pool_of(self.group.head),
            sum_factor(self.layer),
        )
        return self.rows_stage(pooling.sum_backward, "dx", *operands)


class Resampled(_Single[Resampling]):
    """Sums of rows and columns, such as padding and resizing."""

    def forward(self) -> StageKernel:
        return self._stage("x", "y", backward=False)

    def backward(self) -> StageKernel:
        return self._stage("dy", "dx", backward=True)

    def _stage(self, source: str, target: str, *, backward: bool) -> StageKernel:
        x, y = self.arrays[source], self.arrays[target]
        taps, grain = axis_taps(self.group.head, backward=backward), grain_of(y[0, 0].size)
        return each(self.thread_pool.bind(resampling.resample, x, y, *taps, grain=grain), len(y[0]))


class ResponseNorm(_Single[LocalResponseNorm]):
    """y = x · s^−beta with s = bias + alpha · Σ x² over neighbouring channels."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        layer, (channels, *_) = group.head.layer_of(LocalResponseNorm), group.head.output_maps
        shape = normalization.scratch_shape(setting.threads, channels, layer.radius)
        # Two buffers, each of which is needed in one stage only.
        buffers = {"scratch": BufferSpec(shape, "float32")}
        phases = {Phase.FORWARD: Access(("x",), ("y", "scratch"))}
        if group.gradients:
            buffers["backward_scratch"] = buffers["scratch"]
            phases[Phase.BACKWARD] = Access(("dy", "x"), ("dx", "backward_scratch"))
        return GroupNeeds(phases, buffers)

    def _launch(self, kernel: Any, *arrays: NDArray[Any]) -> StageKernel:
        layer, (_, height, width) = self.layer, self.group.head.output_maps
        formula = layer.radius, float(layer.bias), float(layer.alpha), float(layer.beta)
        grain = grain_of(arrays[0].shape[1])
        launch = self.thread_pool.bind(kernel, *arrays, formula, grain=grain)
        return each(launch, height * width)

    def forward(self) -> StageKernel:
        x, y = self.pixels("x"), self.pixels("y")
        return self._launch(normalization.lrn_forward, x, y, self.arrays["scratch"])

    def backward(self) -> StageKernel:
        x, dy, dx = self.pixels("x"), self.pixels("dy"), self.pixels("dx")
        scratch = self.arrays["backward_scratch"]
        return self._launch(normalization.lrn_backward, x, dy, dx, scratch)
