"""Operations with several inputs, and the mean over all pixels, bound to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from dptrain.backends.numba import combining, elementwise
from dptrain.backends.numba.operations import GRAIN, Kernels, Operation, each, grain_of
from dptrain.backends.numba.programs import StageKernel, joined
from dptrain.backends.numba.threads import ThreadPool
from dptrain.backends.replica import GradientAddition
from dptrain.network.layers import ReLU
from dptrain.plan.lowering import Access, Group, GroupNeeds, Phase, Setting, input_name


def _inputs(group: Group) -> tuple[str, ...]:
    return tuple(input_name(number) for number in range(1, len(group.inputs) + 1))


class Addition(Operation):
    """y = x + x2 + …; the gradient of each input is dy. In inference a ReLU may follow."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        forward = Access(_inputs(group), ("y",))
        return GroupNeeds({Phase.FORWARD: forward}, shares_gradient=True)

    def kernels(self) -> Kernels:
        y, total, stages = self.flat("y"), self.flat("x"), []
        *others, last = _inputs(self.group)[1:]
        for name in (*others, last):
            relu = name == last and ReLU in self.group.kinds
            arrays = total, self.flat(name), y
            bound = self.thread_pool.bind(combining.add, *arrays, relu, grain=GRAIN)
            stages.append(each(bound, self.size))
            total = y
        return {Phase.FORWARD: joined(*stages)}


class Concatenation(Operation):
    """The channels of all inputs, one after another."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(_inputs(group), ("y",))}
        if setting.training:
            gradients = tuple(f"d{name}" for name in _inputs(group))
            phases[Phase.BACKWARD] = Access(("dy",), gradients)
        return GroupNeeds(phases)

    def kernels(self) -> Kernels:
        kernels = {Phase.FORWARD: self._copies("y", "", is_forward=True)}
        if "dy" in self.arrays:
            kernels[Phase.BACKWARD] = self._copies("dy", "d", is_forward=False)
        return kernels

    def _copies(self, whole: str, prefix: str, *, is_forward: bool) -> StageKernel:
        """Return the copies between the channels of a map and the maps of all inputs."""
        stages, first = [], 0
        _, height, width = self.group.head.output_maps
        for name in _inputs(self.group):
            channels = self.arrays[name].shape[-1]
            if prefix + name in self.arrays:
                part, all_ = (self.pixels(prefix + name), 0), (self.pixels(whole), first)
                source, target = (part, all_) if is_forward else (all_, part)
                launch = self.thread_pool.bind(
                    combining.copy_channels, *source, *target, channels, grain=grain_of(channels)
                )
                stages.append(each(launch, height * width))
            first += channels
        return joined(*stages)


class GlobalAverage(Operation):
    """Mean over all pixels."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if setting.training:
            phases[Phase.BACKWARD] = Access(("dy",), ("dx",))
        return GroupNeeds(phases)

    def _maps(self, name: str) -> NDArray[Any]:
        array = self.arrays[name]
        return array.reshape(len(array), -1, array.shape[-1])

    def kernels(self) -> Kernels:
        x, y = self._maps("x"), self.rows("y")
        grain = grain_of(x[0].size)
        forward = self.thread_pool.bind(combining.mean_of_pixels, x, y, grain=grain)
        kernels = {Phase.FORWARD: each(forward, 1)}
        if "dx" in self.arrays:
            backward = self.thread_pool.bind(
                combining.mean_of_pixels_backward, self.rows("dy"), self._maps("dx"), grain=grain
            )
            kernels[Phase.BACKWARD] = each(backward, 1)
        return kernels


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
