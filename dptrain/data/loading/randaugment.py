"""RandAugment: some random operations of one magnitude on each image.

The operations are those of torchvision that are an affine map or a linear change of colours. They
are drawn with replacement. Source: E. D. Cubuk, B. Zoph, J. Shlens and Q. V. Le, RandAugment:
Practical Automated Data Augmentation with a Reduced Search Space, 2020.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.bounds import MAX_MAGNITUDE
from dptrain.data.loading.geometry import identities, rotations

OPERATIONS = (
    "identity", "shear-x", "shear-y", "translate-x", "translate-y", "rotate", "brightness",
    "saturation", "contrast",
)  # fmt: skip

SHEAR, TRANSLATION, ROTATION, COLOUR = 0.3, 150 / 331, 30.0, 0.9
"""Changes of the largest magnitude: columns per row, share of the size, degrees, and the number
that is added to pixels, or by which a factor differs from 1."""

Floats = NDArray[np.float64]


class RandomOperations(NamedTuple):
    """What random operations do to each image.

    Attributes:
        maps: (n, 3, 3), see `dptrain.data.loading.geometry`.
        contrast, saturation: (n,), factors.
        brightness: (n,), added numbers.
    """

    maps: Floats
    contrast: Floats
    saturation: Floats
    brightness: Floats


def random_operations(uniform: Floats, magnitude: float, size: tuple[int, ...]) -> RandomOperations:
    """Return the product of random operations.

    Linear changes of colours commute: a change of contrast about the mean of each channel with all
    others, because the mean changes as the pixels do.

    Args:
        uniform: (2 · operations, n), random numbers in [0, 1): operation and direction of each.
        magnitude: from 0 to 30.
        size: height and width of the input.
    """
    count = uniform.shape[1]
    contrast, saturation, brightness = np.ones(count), np.ones(count), np.zeros(count)
    maps = identities(count)
    for chosen, direction in zip(uniform[::2], uniform[1::2], strict=True):
        operation = (chosen * len(OPERATIONS)).astype(np.int64)
        level = np.where(direction < 0.5, -1.0, 1.0) * (magnitude / MAX_MAGNITUDE)
        by = {name: level * (operation == i) for i, name in enumerate(OPERATIONS)}
        change = rotations(ROTATION * by["rotate"])
        change[:, 0, 1] += SHEAR * by["shear-y"]
        change[:, 1, 0] += SHEAR * by["shear-x"]
        change[:, 0, 2] = TRANSLATION * size[0] * by["translate-y"]
        change[:, 1, 2] = TRANSLATION * size[1] * by["translate-x"]
        maps = maps @ change
        contrast *= 1.0 + COLOUR * by["contrast"]
        saturation *= 1.0 + COLOUR * by["saturation"]
        brightness += COLOUR * by["brightness"]
    return RandomOperations(maps, contrast, saturation, brightness)
