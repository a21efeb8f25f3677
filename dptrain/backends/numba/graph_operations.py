"""Operations with several inputs, and the mean over all pixels, bound to arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from numpy.typing import NDArray

from dptrain.backends.numba import combining, elementwise
from dptrain.backends.numba.operations import GRAIN, Operation, each, grain_of
from dptrain.backends.numba.programs import StageKernel, joined
from dptrain.backends.products import OTHER, product_needs
from dptrain.backends.replica import GradientAddition
from dptrain.native.threads import ThreadPool
from dptrain.network.activations import ReLU
from dptrain.network.combining import Add, Concatenate, GlobalPool2d, Multiply
from dptrain.network.maps.channels import ChannelLayer, Selection
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting, input_name


def _inputs(group: Group) -> tuple[str, ...]:
    return tuple(input_name(number) for number in range(1, len(group.inputs) + 1))


class Addition(Operation[Add]):
    """y = x + x2 + …; the gradient of each input is dy. In inference a ReLU may follow."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        forward = Access(_inputs(group), ("y",))
        return GroupNeeds({Phase.FORWARD: forward}, shares_gradient=True)

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        y, total, stages = self.flat("y"), self.flat("x"), []
        *others, last = _inputs(self.group)[1:]
        for name in (*others, last):
            relu = name == last and ReLU in self.group.kinds
            arrays = total, self.flat(name), y
            bound = self.thread_pool.bind(combining.add, *arrays, relu, grain=GRAIN)
            stages.append(each(bound, self.size))
            total = y
        return joined(*stages)


class Multiplication(Operation[Multiply]):
    """y = x · x2; an input of one pixel or one channel is a gate."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        return product_needs(group)

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        return self._product("x", "x2", "y")

    def backward(self) -> StageKernel:
        """Return the stage that writes the gradients of the inputs."""
        return joined(*(self._gradient(local) for local in self.group.gradients))

    def _gradient(self, local: str) -> StageKernel:
        """Return the stage that writes the gradient of an input."""
        own, whole, other = self.arrays[local], self.arrays["dy"], OTHER[local]
        if own.shape == whole.shape:
            return self._product("dy", other, local)
        if own.shape[-1] == whole.shape[-1]:
            maps = [a.reshape(len(a), -1, a.shape[-1]) for a in (whole, self.arrays[other])]
            grain = grain_of(whole[0].size)
            kernel = combining.sum_products_of_pixels
            return each(self.thread_pool.bind(kernel, *maps, self.rows(local), grain=grain), 1)
        pixels = self.pixels("dy"), self.pixels(other), self.flat(local)
        grain = grain_of(whole.shape[-1])
        bound = self.thread_pool.bind(combining.sum_products_of_channels, *pixels, grain=grain)
        return each(bound, own[0].size)

    def _product(self, one: str, two: str, result: str) -> StageKernel:
        """Return the stage that writes a product, of which either factor may be a gate."""
        if self.arrays[one].shape != self.arrays[result].shape:
            one, two = two, one
        whole, factor = self.pixels(one), self.pixels(two)
        bind, grain = self.thread_pool.bind, grain_of(whole.shape[1])
        repeats = len(whole) // len(factor)
        bound = bind(combining.multiply, whole, factor, self.pixels(result), repeats, grain=grain)
        return each(bound, len(whole) // len(self.arrays[one]))


class Concatenation(Operation[Concatenate]):
    """The channels of all inputs, one after another."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(_inputs(group), ("y",))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy",), group.gradients)
        return GroupNeeds(phases)

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        return self._copies("y", _inputs(self.group), is_forward=True)

    def backward(self) -> StageKernel:
        """Return the stage that writes the gradients of the inputs."""
        return self._copies("dy", self.group.gradients, is_forward=False)

    def _copies(self, whole: str, parts: Sequence[str], *, is_forward: bool) -> StageKernel:
        """Return the copies between the channels of a map and the maps `parts` of inputs."""
        stages, first = [], 0
        _, height, width = self.group.head.output_maps
        for name in _inputs(self.group):
            channels = self.arrays[name].shape[-1]
            local = name if is_forward else f"d{name}"
            if local in parts:
                part, all_ = (self.pixels(local), 0), (self.pixels(whole), first)
                source, target = (part, all_) if is_forward else (all_, part)
                launch = self.thread_pool.bind(
                    combining.copy_channels, *source, *target, channels, grain=grain_of(channels)
                )
                stages.append(each(launch, height * width))
            first += channels
        return joined(*stages)


class ChannelSelection(Operation[ChannelLayer]):
    """Channels of x, at other positions."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy",), ("dx",))
        return GroupNeeds(phases)

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        return self._stage("x", "y", self.layer.selection(self.arrays["x"].shape[-1]))

    def backward(self) -> StageKernel:
        """Return the stage that writes dx."""
        return self._stage("dy", "dx", self.layer.transposed(self.arrays["dx"].shape[-1]))

    def _stage(self, source: str, target: str, selection: Selection) -> StageKernel:
        x, y = self.pixels(source), self.pixels(target)
        bind, grain = self.thread_pool.bind, grain_of(y.shape[1])
        bound = bind(combining.select_channels, x, y, *selection, grain=grain)
        return each(bound, len(y) // len(self.arrays[target]))


class _GlobalPooling(Operation[GlobalPool2d]):
    """A number of all pixels of a map.

    Class attributes:
        saved: buffers with the shape of the output that forward writes for backward, with dtypes.
    """

    saved: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        shape = (setting.batch_size, *group.head.output_maps)
        buffers = {name: BufferSpec(shape, dtype) for name, dtype in cls.saved.items()}
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy", *buffers), ("dx",))
        return GroupNeeds(phases, buffers)

    def _maps(self, name: str) -> NDArray[Any]:
        array = self.arrays[name]
        return array.reshape(len(array), -1, array.shape[-1])

    def _stage(self, kernel: Any, *arrays: NDArray[Any]) -> StageKernel:
        grain = grain_of(math.prod(self.group.head.input_shape))
        bound = self.thread_pool.bind(kernel, *arrays, *map(self.rows, self.saved), grain=grain)
        return each(bound, 1)


class GlobalAverage(_GlobalPooling):
    """Mean over all pixels."""

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        return self._stage(combining.mean_of_pixels, self._maps("x"), self.rows("y"))

    def backward(self) -> StageKernel:
        """Return the stage that writes dx."""
        return self._stage(combining.mean_of_pixels_backward, self.rows("dy"), self._maps("dx"))


class GlobalMaximum(_GlobalPooling):
    """Maximum over all pixels."""

    saved: ClassVar[Mapping[str, str]] = {"argmax": "int32"}

    def forward(self) -> StageKernel:
        """Return the stage that writes y."""
        return self._stage(combining.max_of_pixels, self._maps("x"), self.rows("y"))

    def backward(self) -> StageKernel:
        """Return the stage that writes dx."""
        return self._stage(combining.max_of_pixels_backward, self.rows("dy"), self._maps("dx"))


def bind_additions(pool: ThreadPool, additions: Sequence[GradientAddition]) -> StageKernel:
    """Return the stage that adds contributions to gradients, one after another."""
    stages = []
    for target, source, copies in additions:
        size, flat = target[0].size, target.reshape(-1)
        if copies:
            launch = pool.bind(elementwise.assign, source.reshape(-1), flat, grain=GRAIN)
        else:
            launch = pool.bind(combining.add, flat, source.reshape(-1), flat, False, grain=GRAIN)
        stages.append(each(launch, size))
    return joined(*stages)
