"""Units whose gradient is decided by rounding: at the kink of a ReLU, or with near-equal maxima.

If the input of a ReLU is 1e-8 in one program and −1e-8 in another, both are right, but the gradient
of one sample flows through the unit in only one of them. One such unit changed the gradient of 75
weights of conv1 of the network "odd" by 2e-3 of its norm (batch size 32, 2 million units); without
it, the programs differ by 2e-6. A bound that allows such a change would hide errors, therefore this
module computes the change of the gradients exactly for each unit that rounding can decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.batch import dropout_factors, random_batch
from benchmarks.check import MARGIN, rounding
from benchmarks.programs.own_programs import CHECKED_RATE, initial
from benchmarks.programs.torch_network import LOSSES, fix_dropout, torch_network
from dptrain.network import Network
from dptrain.network.normalization import Normalization

MOST = 64
"""Largest number of units; the nearest to their kink are taken."""

Arrays = dict[str, NDArray[Any]]


def gradient_flips(network: Network, batch_size: int, scale: float = 1.0) -> list[Arrays] | None:
    """Return the change of the gradients for each unit that rounding can decide.

    It is known for chains without normalisation, in which a unit changes the gradients of one
    sample; for other networks this returns None.

    Args:
        network: with its initial parameters.
        batch_size: samples of `random_batch`.
        scale: factor of the gradients.
    """
    if not network.is_chain or any(isinstance(each, Normalization) for each in network.layers):
        return None
    modules = _float64_modules(network, batch_size)
    x, y = random_batch(network, batch_size)
    inputs = torch.from_numpy(x.astype(np.float64))
    tolerance = MARGIN * rounding(network, 1)
    units = sorted(_find_units(network, modules, inputs, torch.from_numpy(y), tolerance))
    return [_change(modules, inputs, unit, scale) for unit in units[:MOST]]


def update_flips(network: Network, batch_size: int) -> list[Arrays] | None:
    """Return the changes for `own_programs.first_step`."""
    return gradient_flips(network, batch_size, -CHECKED_RATE)


_Unit = tuple[float, int, int, list[tuple[int, float]]]
"""Distance from the kink, index of the module, sample, and position and factor of each element of
the module's input in the change of the loss."""


def _float64_modules(network: Network, batch_size: int) -> list[tuple[str, nn.Module]]:
    """Return the modules by name; each maximum pooling is before its ReLU, not after it.

    Both orders compute the same. This one has no ties between zeros.
    """
    parameters = {name: value.astype(np.float64) for name, value in initial(network).items()}
    modules = torch_network(network, parameters)
    factors = dropout_factors(network, batch_size)
    fix_dropout(modules, network, {name: torch.from_numpy(f) for name, f in factors.items()})
    found = list(modules.named_children())
    for i in reversed(range(len(found))):
        j = i
        while isinstance(found[j][1], nn.ReLU) and j + 1 < len(found):
            if not _is_part_of_max_pooling(found[j + 1][1]):
                break
            found[j], found[j + 1] = found[j + 1], found[j]
            j += 1
    return found


def _is_part_of_max_pooling(module: nn.Module) -> bool:
    pads = isinstance(module, nn.ConstantPad2d) and module.value == -np.inf
    return pads or isinstance(module, nn.MaxPool2d)


def _find_units(
    network: Network, modules: list[tuple[str, nn.Module]], x: Tensor, y: Tensor, tolerance: float
) -> Iterator[_Unit]:
    """Find the units within `tolerance` of their kink, relative to the layer's size."""
    values = [x]
    for _, module in modules:
        values.append(module(values[-1]))
    loss = LOSSES[network.loss.targets](values[-1], y.double() if y.is_floating_point() else y)
    gradients = torch.autograd.grad(loss, values[1:])
    for i, (_, module) in enumerate(modules):
        z, upstream = values[i].detach(), gradients[i]
        allowed = tolerance * float(z[z.isfinite()].square().mean().sqrt())
        if isinstance(module, nn.ReLU):
            find = _near_zero
        elif isinstance(module, nn.MaxPool2d):
            find = _near_ties
        else:
            continue
        for distance, sample, elements in find(module, z, upstream, allowed):
            yield distance / allowed, i, sample, elements


_Found = Iterator[tuple[float, int, list[tuple[int, float]]]]


def _near_zero(module: nn.Module, z: Tensor, upstream: Tensor, allowed: float) -> _Found:
    size = z[0].numel()
    for unit in _nonzero((z.abs() <= allowed) & (upstream != 0)):
        value, gradient = float(z.view(-1)[unit]), float(upstream.reshape(-1)[unit])
        sign = -1.0 if value > 0 else 1.0
        yield abs(value), unit // size, [(unit % size, sign * gradient)]


def _near_ties(module: Any, z: Tensor, upstream: Tensor, allowed: float) -> _Found:
    """Find windows whose second largest element is near the largest."""
    n, channels, height, width = z.shape
    down, across = upstream.shape[2:]
    size, stride, pad = (
        (v, v) if isinstance(v, int) else v
        for v in (module.kernel_size, module.stride, module.padding)
    )
    # Windows may reach over the maps.
    below, right = ((m - 1) * s + k for m, s, k in zip((down, across), stride, size, strict=True))
    pads = pad[1], max(0, right - width - pad[1]), pad[0], max(0, below - height - pad[0])
    positions = torch.arange(height * width, dtype=z.dtype).reshape(1, 1, height, width)

    def windows(maps: Tensor, outside: float) -> Tensor:
        padded = functional.pad(maps, pads, value=outside)
        cut = padded.unfold(2, size[0], stride[0]).unfold(3, size[1], stride[1])
        return cut[:, :, :down, :across].flatten(4)

    largest, index = windows(z, -np.inf).topk(2, dim=4)
    index = windows(positions, -1.0).expand(n, channels, -1, -1, -1).gather(4, index).long()
    gap = largest[..., 0] - largest[..., 1]
    for unit in _nonzero((gap <= allowed) & (upstream != 0)):
        gradient, (first, second) = float(upstream.reshape(-1)[unit]), index.reshape(-1, 2)[unit]
        sample, channel = divmod(unit // (down * across), channels)
        start = channel * height * width
        elements = [(start + int(second), gradient), (start + int(first), -gradient)]
        yield float(gap.reshape(-1)[unit]), sample, elements


def _nonzero(condition: Tensor) -> list[int]:
    return [int(i) for i in condition.reshape(-1).nonzero()]


def _change(modules: list[tuple[str, nn.Module]], x: Tensor, unit: _Unit, scale: float) -> Arrays:
    """Return the change of the gradients by name; those of later layers do not change."""
    _, last, sample, elements = unit
    z, parameters = x[sample : sample + 1], dict[str, Tensor]()
    for name, module in modules[:last]:
        # Dropout factors are those of the whole minibatch.
        factor: Any = getattr(module, "factor", None)
        z = module(z) if factor is None else z * factor[sample : sample + 1]
        parameters |= {f"{name}.{kind}": value for kind, value in module.named_parameters()}
    loss = torch.stack([factor * z.reshape(-1)[position] for position, factor in elements]).sum()
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    pairs = zip(parameters, gradients, strict=True)
    return {name: (scale * gradient).float().numpy() for name, gradient in pairs}
