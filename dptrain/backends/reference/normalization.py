"""Normalisations and their derivatives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dptrain.backends.reference.gradient_slots import write_gradient_slots
from dptrain.backends.reference.operation import Operation, WeightedOperation
from dptrain.backends.replica import Arrays, Context, SumStatistics
from dptrain.network.layers import LocalResponseNorm
from dptrain.network.normalization import (
    BatchNorm2d,
    FrozenBatchNorm2d,
    GroupNorm,
    LayerNorm,
    Normalization,
)
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting

N = TypeVar("N", bound=Normalization)


class ResponseNorm(Operation[LocalResponseNorm]):
    """y = x · s^−beta with s = bias + alpha · Σ x² over neighbouring channels."""

    backward_reads: ClassVar[tuple[str, ...]] = ("x",)

    def _neighbours(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over the channels within the radius."""
        layer = self.layer
        padded = np.pad(values, ((0, 0), (layer.radius, layer.radius), (0, 0), (0, 0)))
        window = sliding_window_view(padded, 2 * layer.radius + 1, axis=1)
        return np.asarray(window.sum(axis=-1))

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        layer = self.layer
        x = a["x"][:n]
        a["y"][:n] = x * (layer.bias + layer.alpha * self._neighbours(x * x)) ** -layer.beta

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        layer = self.layer
        x, dy = a["x"][:n], a["dy"][:n]
        s = layer.bias + layer.alpha * self._neighbours(x * x)
        power = s**-layer.beta
        # x[c] is in the sum of every neighbour: dx = dy s^−β − 2αβ x Σ dy x s^(−β−1).
        shared = self._neighbours(dy * x * power / s)
        a["dx"][:n] = dy * power - 2.0 * layer.alpha * layer.beta * x * shared


def _by_channel(values: NDArray[Any]) -> NDArray[Any]:
    """Return values of channels (C,) in a shape that broadcasts with (N, C, H, W)."""
    return values.reshape(-1, 1, 1)


_OVER_CHANNEL = (0, 2, 3)
"""Axes of maps (N, C, H, W) over which sums of channels run."""


def sum_own_parts(parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
    """Write the sum of the parts (S, K) of this rank alone to totals (K,)."""
    np.sum(parts, axis=0, out=totals)


class BatchNormalization(Operation[BatchNorm2d]):
    """y = weight · x̂ + bias with x̂ = (x − mean) / sqrt(variance + epsilon) of each channel.

    Statistics are sums in float64 of each micro-shard, which are added over micro-shards and ranks.
    With sums of x and x², the relative error of the variance is about 1e-16 · mean² / variance.

    Buffers: ``moments`` (2, C), mean and 1 / sqrt(variance + epsilon) of the minibatch; and
    ``backward_sums`` (2, C), the means over the global minibatch of dy · x̂ and of dy.
    """

    def __init__(
        self, group: Group, arrays: Arrays, sum_statistics: SumStatistics = sum_own_parts
    ) -> None:
        super().__init__(group, arrays)
        self.sum_statistics = sum_statistics

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        if not setting.training:
            return super().needs(group, setting)
        buffer = BufferSpec((2, group.head.output_shape[0]), "float64")
        phases = {
            Phase.STATISTICS: Access(("x",), ("moments",)),
            Phase.FORWARD: Access(("x", "moments"), ("y",)),
            Phase.BACKWARD_STATISTICS: Access(("x", "dy", "moments"), ("backward_sums",)),
        }
        if group.gradients:
            reads = "x", "dy", "moments", "backward_sums"
            phases[Phase.BACKWARD_INPUT] = Access(reads, ("dx",))
        return GroupNeeds(phases, {"moments": buffer, "backward_sums": buffer})

    def _global_sums(
        self, parts: Sequence[tuple[int, NDArray[np.float64]]]
    ) -> tuple[float, NDArray[np.float64]]:
        """Return the number of elements of a channel in the global minibatch, and the sums.

        Args:
            parts: of each micro-shard, the number of samples, and sums (2, C).
        """
        rows = np.array([[n, *sums.reshape(-1)] for n, sums in parts])
        totals = np.zeros(rows.shape[1])
        self.sum_statistics(rows, totals)
        height, width = self.node.input_shape[1:]
        return float(totals[0]) * height * width, totals[1:].reshape(2, -1)

    def statistics(self, context: Context) -> None:
        """Write the moments of x, and move the running statistics towards them.

        The variance of a single element counts as 0 in the running variance, where PyTorch raises
        an error.
        """
        a, layer = self.arrays, self.layer
        parts = []
        for start, stop in pairwise(context.bounds.tolist()):
            x = a["x"][start:stop].astype(np.float64)
            sums = np.stack([x.sum(axis=_OVER_CHANNEL), (x * x).sum(axis=_OVER_CHANNEL)])
            parts.append((stop - start, sums))
        m, sums = self._global_sums(parts)
        if not m:
            return
        mean, square = sums / m
        variance = np.maximum(square - mean * mean, 0.0)
        a["moments"][:] = mean, 1.0 / np.sqrt(variance + layer.epsilon)
        unbiased = variance * (m / max(m - 1.0, 1.0))
        a["running_mean"][:] += layer.momentum * (mean - a["running_mean"])
        a["running_var"][:] += layer.momentum * (unbiased - a["running_var"])

    def _normalized(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return x̂ by the moments of the minibatch."""
        mean, inverse = self.arrays["moments"]
        return np.asarray((x - _by_channel(mean)) * _by_channel(inverse))

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        x = a["x"][:n]
        if context.training and not self.group.infers:
            normalized = self._normalized(x)
        else:
            inverse = _running_inverse(a, self.layer.epsilon)
            normalized = (x - _by_channel(a["running_mean"])) * _by_channel(inverse)
        a["y"][:n] = _by_channel(a["weight"]) * normalized + _by_channel(a["bias"])

    def backward_statistics(self, context: Context) -> None:
        """Write the gradients of the parameters for this rank, and the global backward sums."""
        a = self.arrays
        parts = []
        for start, stop in pairwise(context.bounds.tolist()):
            dy = a["dy"][start:stop].astype(np.float64)
            normalized = self._normalized(a["x"][start:stop])
            products = (dy * normalized).sum(axis=_OVER_CHANNEL)
            parts.append((stop - start, np.stack([products, dy.sum(axis=_OVER_CHANNEL)])))
        dtype = a["dweight"].dtype
        write_gradient_slots(a, "dweight", [sums[0].astype(dtype) for _, sums in parts])
        write_gradient_slots(a, "dbias", [sums[1].astype(dtype) for _, sums in parts])
        m, sums = self._global_sums(parts)
        if m:
            a["backward_sums"][:] = sums / m

    def backward_input(self, context: Context) -> None:
        """Write dx, to which mean and variance of the minibatch contribute."""
        a, n = self.arrays, context.n
        x, dy = a["x"][:n], a["dy"][:n]
        mean_product, mean_dy = a["backward_sums"]
        scale = _by_channel(a["weight"] * a["moments"][1])
        projection = self._normalized(x) * _by_channel(mean_product)
        a["dx"][:n] = scale * (dy - _by_channel(mean_dy) - projection)


def _running_inverse(arrays: Arrays, epsilon: float) -> NDArray[Any]:
    """Return 1 / sqrt(running variance + epsilon) of each channel."""
    return np.asarray(1.0 / np.sqrt(arrays["running_var"].astype(np.float64) + epsilon))


class FrozenBatchNormalization(Operation[FrozenBatchNorm2d]):
    """y = weight · x̂ + bias with x̂ by the running statistics, which do not change."""

    def _scale(self) -> NDArray[Any]:
        inverse = _running_inverse(self.arrays, self.layer.epsilon)
        return _by_channel(self.arrays["weight"] * inverse)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        centred = a["x"][:n] - _by_channel(a["running_mean"])
        a["y"][:n] = self._scale() * centred + _by_channel(a["bias"])

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["dx"][:n] = self._scale() * a["dy"][:n]


class _SampleNormalization(WeightedOperation[N]):
    """A normalisation whose mean and variance are those of elements of one sample.

    Vectors are maps of one pixel.

    Class attributes:
        axes: the axes of the divided maps (N, G, C/G, H, W) over which mean and variance are taken.
    """

    axes: ClassVar[tuple[int, ...]]

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if setting.training:
            phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy"))
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(("x", "dy"), ("dx",))
        return GroupNeeds(phases)

    @abstractmethod
    def num_groups(self) -> int:
        """Return the number of groups G of channels."""

    def _maps(self, name: str, n: int) -> NDArray[Any]:
        """Return the first n samples of an array as (n, C, H, W)."""
        return self.arrays[name][:n].reshape(n, *(*self.node.output_shape, 1, 1)[:3])

    def _divided(self, maps: NDArray[Any]) -> NDArray[Any]:
        """Return maps (n, C, H, W) as (n, G, C/G, H, W)."""
        n, channels, height, width = maps.shape
        groups = self.num_groups()
        return maps.reshape(n, groups, channels // groups, height, width)

    def _mean(self, maps: NDArray[Any]) -> NDArray[Any]:
        """Return the means of maps (n, C, H, W), for each of their elements."""
        divided = self._divided(maps)
        means = divided.mean(axis=self.axes, keepdims=True)
        return np.broadcast_to(means, divided.shape).reshape(maps.shape)

    def _normalized(self, x: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return x̂ and 1 / sqrt(variance + epsilon), both (n, C, H, W)."""
        centred = x - self._mean(x)
        inverse = 1.0 / np.sqrt(self._mean(centred * centred) + self.layer.epsilon)
        return centred * inverse, inverse

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        normalized, _ = self._normalized(self._maps("x", n))
        y = _by_channel(a["weight"]) * normalized + _by_channel(a["bias"])
        a["y"][:n] = y.reshape(a["y"][:n].shape)

    def backward_weight(self, context: Context) -> None:
        a, n = self.arrays, context.n
        dy, (normalized, _) = self._maps("dy", n), self._normalized(self._maps("x", n))
        a["dweight"][:] = (dy * normalized).sum(axis=_OVER_CHANNEL)
        a["dbias"][:] = dy.sum(axis=_OVER_CHANNEL)

    def backward_input(self, context: Context) -> None:
        a, n = self.arrays, context.n
        normalized, inverse = self._normalized(self._maps("x", n))
        g = self._maps("dy", n) * _by_channel(a["weight"])
        dx = inverse * (g - self._mean(g) - normalized * self._mean(g * normalized))
        a["dx"][:n] = dx.reshape(a["dx"][:n].shape)


class GroupNormalization(_SampleNormalization[GroupNorm]):
    """Normalisation of each sample over groups of channels and all pixels."""

    axes: ClassVar[tuple[int, ...]] = (2, 3, 4)

    def num_groups(self) -> int:
        return self.layer.groups


class LayerNormalization(_SampleNormalization[LayerNorm]):
    """Normalisation of each pixel over all channels."""

    axes: ClassVar[tuple[int, ...]] = (2,)

    def num_groups(self) -> int:
        return 1
