"""Layers that combine several inputs."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.products import OTHER, product_needs
from dptrain.backends.reference.operation import Operation
from dptrain.backends.replica import Context
from dptrain.network.combining import Add, Concatenate, Multiply
from dptrain.network.maps.channels import ChannelLayer, Selection
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, Group, GroupNeeds, Phase, Setting, input_name


def _input_names(node: Node) -> tuple[str, ...]:
    """Return the local names of the inputs: ``x``, ``x2``, …."""
    return tuple(input_name(number) for number in range(1, len(node.inputs) + 1))


class Addition(Operation[Add]):
    """y = x + x2 + …. The gradient of each input is dy."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(_input_names(group.head), ("y",))}
        return GroupNeeds(phases, shares_gradient=True)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        first, *others = _input_names(self.node)
        total = a[first][:n].copy()
        for name in others:
            total += a[name][:n]
        a["y"][:n] = total


class Multiplication(Operation[Multiply]):
    """y = x · x2. Each input receives dy times the other, summed where it is a gate."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        return product_needs(group)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        np.multiply(a["x"][:n], a["x2"][:n], out=a["y"][:n])

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        for gradient in self.group.gradients:
            product, d = a["dy"][:n] * a[OTHER[gradient]][:n], a[gradient][:n]
            pairs = zip(product.shape, d.shape, strict=True)
            repeated = tuple(axis for axis, (whole, own) in enumerate(pairs) if whole != own)
            d[:] = product.sum(axis=repeated, keepdims=True)


class ChannelSelection(Operation[ChannelLayer]):
    """Channels of x, at other positions. A channel of x that y does not have receives 0."""

    def _select(self, x: NDArray[Any], y: NDArray[Any], selection: Selection) -> None:
        channels, groups = y.shape[1], selection.groups
        c = np.arange(channels)
        source = selection.first + c % groups * (channels // groups) + c // groups
        exists = (source >= 0) & (source < x.shape[1])
        y[:, exists], y[:, ~exists] = x[:, source[exists]], 0.0

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        self._select(a["x"][:n], a["y"][:n], self.layer.selection(a["x"].shape[1]))

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        self._select(a["dy"][:n], a["dx"][:n], self.layer.transposed(a["dx"].shape[1]))


class Concatenation(Operation[Concatenate]):
    """The channels of all inputs, one after another. Each input receives its part of dy."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(_input_names(group.head), ("y",))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy",), group.gradients)
        return GroupNeeds(phases)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        inputs: list[NDArray[Any]] = [a[name][:n] for name in _input_names(self.node)]
        a["y"][:n] = np.concatenate(inputs, axis=1)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        names = _input_names(self.node)
        bounds = accumulate((a[name].shape[1] for name in names), initial=0)
        for name, (start, stop) in zip(names, pairwise(bounds), strict=True):
            if f"d{name}" in self.group.gradients:
                a[f"d{name}"][:n] = a["dy"][:n, start:stop]
