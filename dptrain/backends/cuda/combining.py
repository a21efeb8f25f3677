"""Layers with several inputs, and the mean over pixels; see ``combining.cu``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dptrain.backends.cuda.channels import ChannelLaunch
from dptrain.backends.cuda.device.device import Array, Function
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.operation import Operation, SingleLayerOperation, vector_width
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.products import OTHER, product_needs
from dptrain.backends.replica import Context, GradientAddition, Kernel
from dptrain.network.activations import ReLU
from dptrain.network.combining import Add, Concatenate, GlobalPool2d, Multiply
from dptrain.network.maps.channels import ChannelLayer, Selection
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting, input_name


def addition(replica: CudaReplica, x: Array, x2: Array, y: Array, *, relu: bool = False) -> Kernel:
    """Return the stage y = x + x2 or its ReLU for the samples of a minibatch; y may be x or x2."""
    size = math.prod(y.shape[1:])
    width = vector_width(size, y.dtype.itemsize)
    precision = 2 if y.dtype == np.uint16 else 0
    defines = {"VECTOR": width, "PRECISION": precision, "RELU": int(relu)}
    function = replica.device.function("combining.cu", "add", **defines)

    def run(context: Context) -> None:
        count = context.n * size
        launch(function, count // width, x, x2, y, np.int32(count))

    return run


def copying(replica: CudaReplica, source: Array, target: Array) -> Kernel:
    """Return the stage that copies the samples of a minibatch."""
    size = math.prod(target.shape[1:])
    width = vector_width(size, target.dtype.itemsize)
    precision = 2 if target.dtype == np.uint16 else 0
    function = replica.device.function("elementwise.cu", "copy", VECTOR=width, PRECISION=precision)

    def run(context: Context) -> None:
        count = context.n * size
        launch(function, count // width, source, target, np.int32(count))

    return run


def bind_additions(replica: CudaReplica, additions: Sequence[GradientAddition]) -> Kernel:
    """Return the stage that adds contributions to gradients, one after another."""
    return _sequence(
        [
            copying(replica, each.source, each.target)
            if each.copies
            else addition(replica, each.target, each.source, each.target)
            for each in additions
        ]
    )


class AddOperation(Operation[Add]):
    """Sum of all inputs, whose gradients equal that of the output; in inference also its ReLU."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        assert not (setting.training and ReLU in group.kinds), "the gradient needs the sum's sign"
        return GroupNeeds(
            {Phase.FORWARD: Access(_inputs(group), ("y",))}, shares_gradient=setting.training
        )

    def forward(self) -> Kernel:
        """Return the stage that writes y."""
        x, x2, *others = [self.arrays[local] for local in _inputs(self.group)]
        y, last = self.arrays["y"], len(others)
        stages = [
            addition(self.replica, *terms, y, relu=ReLU in self.group.kinds and number == last)
            for number, terms in enumerate([(x, x2), *((y, other) for other in others)])
        ]
        return _sequence(stages)


class MultiplyOperation(Operation[Multiply]):
    """Product of two inputs, one of which may be a gate of one pixel or one channel."""

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        return True

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        return product_needs(group)

    def forward(self) -> Kernel:
        """Return the stage that writes y."""
        return self._product("x", "x2", "y")

    def backward(self) -> Kernel:
        """Return the stage that writes the gradients of the inputs, if possible in one pass."""
        gradients = self.group.gradients
        gates = [local for local in gradients if self._is_channel_gate(local)]
        if len(gates) == 1 and len(gradients) == 2:
            (factor,) = (local for local in gradients if local not in gates)
            return self._gate_gradient(gates[0], factor)
        return _sequence([self._gradient(local) for local in gradients])

    def _is_channel_gate(self, local: str) -> bool:
        """Return whether a gradient is that of a gate with one pixel."""
        own, whole = self.arrays[local].shape, self.arrays["dy"].shape
        return own != whole and bool(own[-1] == whole[-1])

    def _gate_gradient(self, gate: str, factor: str | None = None) -> Kernel:
        """Return the stage that writes the gradient of a gate, and of the other factor if named."""
        whole, other = self.arrays["dy"], self.arrays[OTHER[gate]]
        pixels, channels = math.prod(whole.shape[1:-1]), whole.shape[-1]
        sums = ChannelLaunch.of(channels, self.setting, sums=True)
        product = factor or gate
        defines = {
            "BOTH_FACTORS": int(factor is not None),
            "ADD_SUM": int(gate in self.group.adds),
            **self._adding(product),
        }
        function = sums.function(self, "combining.cu", "sum_products_of_pixels", **defines)
        arrays = whole, other, self.arrays[OTHER[product]], self.arrays[product], self.arrays[gate]
        return _launch_samples(function, sums, (*arrays, np.int32(pixels), np.int32(channels)))

    def _gradient(self, local: str) -> Kernel:
        """Return the stage that writes the gradient of an input."""
        own, whole, other = self.arrays[local], self.arrays["dy"], self.arrays[OTHER[local]]
        if own.shape == whole.shape:
            return self._product("dy", OTHER[local], local)
        if self._is_channel_gate(local):
            return self._gate_gradient(local)
        pixels, channels = math.prod(whole.shape[1:-1]), whole.shape[-1]
        width, adds = self.vector_width(channels), int(local in self.group.adds)
        function = self.function(
            "combining.cu", "sum_products_of_channels", VECTOR=width, ADD_SUM=adds
        )

        def run(context: Context) -> None:
            count = context.n * pixels
            launch(function, 32 * count, whole, other, own, np.int32(channels), np.int32(count))

        return run

    def _product(self, one: str, two: str, result: str) -> Kernel:
        """Return the stage that writes a product, of which either factor may be a gate."""
        if self.arrays[one].shape != self.arrays[result].shape:
            one, two = two, one
        x, factor = self.arrays[one], self.arrays[two]
        channels = x.shape[-1]
        width = self.vector_width(channels)
        repeats = math.prod(x.shape[1:-1]) // math.prod(factor.shape[1:-1])
        gate = int(factor.shape[-1] != channels)
        defines = {"CHANNEL_GATE": gate, **self._adding(result)}
        function = self.function("combining.cu", "multiply", VECTOR=width, **defines)
        arguments = x, factor, self.arrays[result], np.int32(channels), np.int32(repeats)
        size = math.prod(x.shape[1:])

        def run(context: Context) -> None:
            count = context.n * size
            launch(function, count // width, *arguments, np.int32(count))

        return run


class ConcatenateOperation(Operation[Concatenate]):
    """Channels of all inputs, one after another."""

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        return True

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        inputs = _inputs(group)
        phases = {Phase.FORWARD: Access(inputs, ("y",))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy",), group.gradients)
        return GroupNeeds(phases)

    def forward(self) -> Kernel:
        """Return the stage that writes y."""
        return self._copies("y", _inputs(self.group), backward=False)

    def backward(self) -> Kernel:
        """Return the stage that writes the gradients of the inputs."""
        return self._copies("dy", self.group.gradients, backward=True)

    def _copies(self, whole: str, parts: Sequence[str], *, backward: bool) -> Kernel:
        """Return the stage that copies the channels of `parts` of inputs to y, or from dy."""
        stages, first = list[Kernel](), 0
        for name in _inputs(self.group):
            channels = self.arrays[name].shape[-1]
            local = f"d{name}" if backward else name
            if local in parts:
                stages.append(self._copy(local, whole, channels, first, backward=backward))
            first += channels
        return _sequence(stages)

    def _copy(self, local: str, name: str, channels: int, first: int, *, backward: bool) -> Kernel:
        part, whole = self.arrays[local], self.arrays[name]
        gradient, all_channels = local if backward else "", whole.shape[-1]
        width = self.vector_width(math.gcd(channels, first, all_channels))
        defines = self._adding(gradient)
        function = self.function("combining.cu", "copy_channels", VECTOR=width, **defines)
        places = (part, 0, channels), (whole, first, all_channels)
        source, target = reversed(places) if backward else places
        sizes = map(np.int32, (channels, *source[1:], *target[1:]))
        arguments = source[0], target[0], *sizes
        size = math.prod(self.group.head.output_maps[1:]) * channels

        def run(context: Context) -> None:
            count = context.n * size
            launch(function, count // width, *arguments, np.int32(count))

        return run


class ChannelSelectionOperation(SingleLayerOperation[ChannelLayer]):
    """Channels of x, at other positions."""

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        return True

    def forward(self) -> Kernel:
        return self._stage("x", "y", self.layer.selection(self.arrays["x"].shape[-1]))

    def backward(self) -> Kernel:
        return self._stage("dy", "dx", self.layer.transposed(self.arrays["dx"].shape[-1]))

    def _stage(self, source: str, target: str, selection: Selection) -> Kernel:
        x, y = self.arrays[source], self.arrays[target]
        sizes = x.shape[-1], y.shape[-1]
        common = math.gcd(*sizes, selection.first) if selection.groups == 1 else y.shape[-1]
        width, defines = self.vector_width(common), self._adding(target)
        function = self.function("combining.cu", "select_channels", VECTOR=width, **defines)
        arguments = x, y, *map(np.int32, (*sizes, *selection))
        size = math.prod(y.shape[1:])

        def run(context: Context) -> None:
            count = context.n * size
            launch(function, count // width, *arguments, np.int32(count))

        return run


class _GlobalPoolOperation(SingleLayerOperation[GlobalPool2d]):
    """A number of all pixels of each map.

    Class attributes:
        name: start of the names of the kernels.
        saved: buffers with the shape of the output that forward writes for backward, with dtypes.
    """

    name: ClassVar[str]
    saved: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        return True

    @classmethod
    def buffers(cls, shape: tuple[int, ...], setting: Setting) -> dict[str, BufferSpec]:
        return {name: BufferSpec(shape, dtype) for name, dtype in cls.saved.items()}

    def forward(self) -> Kernel:
        channels, pixels = self._sizes()
        layout = ChannelLaunch.of(channels, self.setting, sums=True)
        function = layout.function(self, "combining.cu", f"{self.name}_forward")
        arguments = *self._arrays("x", "y", *self.saved), np.int32(pixels), np.int32(channels)
        return _launch_samples(function, layout, arguments)

    def backward(self) -> Kernel:
        channels, pixels = self._sizes()
        width = self.vector_width(channels)
        defines = self._adding("dx")
        name = f"{self.name}_backward"
        function = self.function("combining.cu", name, VECTOR=width, **defines)
        arguments = *self._arrays("dy", *self.saved, "dx"), np.int32(pixels), np.int32(channels)

        def run(context: Context) -> None:
            count = context.n * pixels * channels
            launch(function, count // width, *arguments, np.int32(count))

        return run

    def _arrays(self, *names: str) -> list[Array]:
        return [self.arrays[name] for name in names]

    def _sizes(self) -> tuple[int, int]:
        """Return channels, and pixels of a sample."""
        channels, *sides = self.group.head.input_maps
        return channels, math.prod(sides)


class GlobalAveragePoolOperation(_GlobalPoolOperation):
    """Mean of each map over all pixels."""

    name: ClassVar[str] = "global_average_pool"


class GlobalMaxPoolOperation(_GlobalPoolOperation):
    """Maximum of each map. The gradient goes to the first maximum."""

    name: ClassVar[str] = "global_max_pool"
    saved: ClassVar[Mapping[str, str]] = {"argmax": "int32"}


def _launch_samples(function: Function, layout: ChannelLaunch, arguments: Sequence[Any]) -> Kernel:
    """Return the stage that launches a block for each sample and each column of channels."""

    def run(context: Context) -> None:
        if context.n:
            function((context.n, layout.columns, 1), (layout.threads, 1, 1), arguments)

    return run


def _inputs(group: Group) -> tuple[str, ...]:
    return tuple(input_name(number) for number in range(1, len(group.inputs) + 1))


def _sequence(stages: Sequence[Kernel]) -> Kernel:
    """Return a stage that runs stages one after another."""

    def run(context: Context) -> None:
        for stage in stages:
            stage(context)

    return run
