"""The type in which images are kept until a minibatch is loaded, and its conversion to inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.resizing import resize
from dptrain.network.layers import Shape


@dataclass(frozen=True)
class PixelFormat:
    """The form in which images are kept: a kept number v becomes the input v · scale + offset.

    The product and the sum are rounded to float32, on every path and every device.

    Attributes:
        dtype: name of the type: ``uint8`` or ``float32``.
        scale, offset: conversion; 1 and 0 if the type is ``float32``.
        size: height and width to which images are resized before the conversion; None if they
            keep their size.
    """

    dtype: str
    scale: float = 1.0
    offset: float = 0.0
    size: tuple[int, int] | None = None

    def converted_shape(self, shape: Shape) -> Shape:
        """Return the shape of an image after the conversion, (C, H, W) or (F,)."""
        return shape if self.size is None else (shape[0], *self.size)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return np.dtype(self.dtype).itemsize

    def convert(self, kept: NDArray[Any], x: NDArray[np.float32]) -> None:
        """Fill `x` with the inputs of an array of the same shape, or of images to resize."""
        x[...] = kept if self.size is None else resize(kept, self.size)
        if self.scale != 1.0:
            x *= np.float32(self.scale)
        if self.offset != 0.0:
            x += np.float32(self.offset)


INPUTS = PixelFormat("float32")
"""Inputs that have been converted already."""
