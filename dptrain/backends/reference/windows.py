"""Padding, and windows of maps, of which convolutions and pooling consist."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dptrain.network.layers import Pads


def pad(x: NDArray[Any], pads: Pads, value: float = 0.0) -> NDArray[Any]:
    """Return maps (N, C, H, W) with `value` around them."""
    return np.pad(x, ((0, 0), (0, 0), *pads), constant_values=value)


def crop(x: NDArray[Any], pads: Pads) -> NDArray[Any]:
    """Return a view without what `pad` has put around maps."""
    (top, bottom), (left, right) = pads
    return x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


def windows_of(
    x: NDArray[Any],
    window: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int] = (1, 1),
) -> NDArray[Any]:
    """Return a view (N, C, Ho, Wo, R, S) of every window of an array (N, C, H, W)."""
    extents = [(size - 1) * step + 1 for size, step in zip(window, dilations, strict=True)]
    found = sliding_window_view(x, extents, axis=(2, 3))[:, :, :: strides[0], :: strides[1]]
    return found[..., :: dilations[0], :: dilations[1]]


def scatter_windows(
    dwindows: NDArray[Any],
    dx: NDArray[Any],
    strides: tuple[int, int],
    pads: Pads,
    dilations: tuple[int, int] = (1, 1),
) -> None:
    """Write the sums of the gradients of windows, which may overlap.

    Args:
        dwindows: (N, C, Ho, Wo, R, S), gradients of the elements of every window.
        dx: (N, C, H, W), is overwritten.
        strides: vertical and horizontal stride.
        pads: positions around the maps; their gradients are ignored.
        dilations: vertical and horizontal distance of the elements of a window.
    """
    ho, wo, r, s = dwindows.shape[2:]
    padded = pad(np.zeros_like(dx), pads)
    for i in range(r):
        for j in range(s):
            top, left = i * dilations[0], j * dilations[1]
            rows = slice(top, top + strides[0] * (ho - 1) + 1, strides[0])
            columns = slice(left, left + strides[1] * (wo - 1) + 1, strides[1])
            padded[:, :, rows, columns] += dwindows[..., i, j]
    dx[:] = crop(padded, pads)
