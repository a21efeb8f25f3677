"""Linear changes of colours: a 3 × 3 matrix for the channels red, green and blue of each pixel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
"""Luma and chroma of a colour (NTSC, Recommendation ITU-R BT.601). Both chromas of grey are 0."""

MATRIX = YIQ.shape[0] * YIQ.shape[1]
"""Numbers of a matrix."""


def colour_matrices(
    saturation: NDArray[np.float64], hue: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return matrices that multiply the distance of each pixel from its grey, and turn its hue.

    Grey is the luma, which does not change. The hue turns in the plane of chroma: a linear map, in
    contrast to HSV.

    Args:
        saturation: (n,), factors; 0 makes images grey.
        hue: (n,), in turns.

    Returns:
        float32 (n, 9), rows in order; each row sums to 1, so that greys stay.

    Example:
        >>> colour_matrices(np.ones(1), np.zeros(1)).round(6).reshape(3, 3) + 0.0
        array([[1., 0., 0.],
               [0., 1., 0.],
               [0., 0., 1.]], dtype=float32)
    """
    turns = np.tile(np.eye(3), (len(hue), 1, 1))
    angles = 2 * np.pi * hue
    turns[:, 1, 1] = turns[:, 2, 2] = saturation * np.cos(angles)
    turns[:, 2, 1] = saturation * np.sin(angles)
    turns[:, 1, 2] = -turns[:, 2, 1]
    matrices = np.linalg.inv(YIQ) @ turns @ YIQ
    return np.asarray(matrices.reshape(-1, MATRIX), np.float32)
