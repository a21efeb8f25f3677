"""The type in which images are kept until a minibatch is loaded, and its conversion to inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PixelFormat:
    """The type in which images are kept: a kept number v becomes the input v · scale + offset.

    The product and the sum are rounded to float32, on every path and every device.

    Attributes:
        dtype: name of the type: ``uint8`` or ``float32``.
        scale, offset: conversion; 1 and 0 if the type is ``float32``.
    """

    dtype: str
    scale: float = 1.0
    offset: float = 0.0

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return np.dtype(self.dtype).itemsize

    def convert(self, kept: NDArray[Any], x: NDArray[np.float32]) -> None:
        """Fill `x` with the inputs of an array of the same shape."""
        x[...] = kept
        if self.scale != 1.0:
            x *= np.float32(self.scale)
        if self.offset != 0.0:
            x += np.float32(self.offset)


INPUTS = PixelFormat("float32")
"""Inputs that have been converted already."""
