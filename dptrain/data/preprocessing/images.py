"""Conversion of raw samples to a network's input shape.

The rule is the same for training and test and for every source. Colour becomes grey by luma
(0.299 R + 0.587 G + 0.114 B) if the network has one input channel. Images are resized bilinearly,
or their centre is cut out (``fit=crop``). Grey is repeated if the network has several input
channels. 8-bit pixels 0 … 255 become −1 … 1. Numbers of any other type are taken as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.pixels import INPUTS, PixelFormat
from dptrain.backends.resizing import resize
from dptrain.errors import UserError
from dptrain.network.layers import Shape

LUMA = (0.299, 0.587, 0.114)
"""Source: ITU-R BT.601."""


def centre(shape: Shape, size: Shape) -> tuple[EllipsisType, slice, slice]:
    """Return the index of the centre of (…, H, W) with the height and width of `size`."""
    top, left = ((shape[-2] - size[-2]) // 2, (shape[-1] - size[-1]) // 2)
    return ..., slice(top, top + size[-2]), slice(left, left + size[-1])


@dataclass(frozen=True)
class Adapter:
    """Conversion of stored samples to network inputs.

    Attributes:
        source: shape of a stored sample, (C, H, W) or (F,).
        target: input shape of the network.
        crop: cut out the centre instead of resizing.
        scale, offset: a stored value v becomes v · scale + offset.
        mean, deviation: a stored value v of column i of a vector becomes (v - mean[i]) /
            deviation[i]; () otherwise.
    """

    source: Shape
    target: Shape
    crop: bool = False
    scale: float = 1.0
    offset: float = 0.0
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def check(self, where: str, advice: str = "") -> None:
        """Raise `UserError` unless samples can be converted to the network's input shape.

        Args:
            where: name of the data, for messages.
            advice: what to do about another shape; "" if the network is trained already.
        """
        source, target = self.source, self.target
        misfit = f"{where} has samples of shape {source}, but the network's input is {target}"
        if len(target) == 1 or len(source) == 1:
            if math.prod(source) != target[0] or len(target) != 1:
                raise UserError(f"{misfit}; {advice or 'expected samples of this shape'}")
            return
        if source[0] != target[0] and source[0] != 1 and (source[0], target[0]) != (3, 1):
            hint = (
                "; if the last channel is opacity, put the images on white first"
                if source[0] in (2, 4)
                else ""
            )
            raise UserError(
                f"{misfit}; dptrain converts 1 channel to any number and 3 channels to 1"
                + (f"; {advice}" if advice else "")
                + hint
            )
        if self.crop and (source[1] < target[1] or source[2] < target[2]):
            raise UserError(f"{misfit}; fit=crop needs larger images, try fit=resize")

    @property
    def readable_shape(self) -> Shape:
        """Largest shape that this adapter can fill."""
        return (self.target[0], *self.source[1:]) if self.crop else self.target

    @property
    def resizes(self) -> bool:
        """True if images are resized."""
        return not self.crop and len(self.target) == 3 and self.source[1:] != self.target[1:]

    @property
    def _becomes_grey(self) -> bool:
        return (self.source[0], self.target[0]) == (3, 1) and len(self.target) == 3

    def __call__(self, stored: NDArray[Any], x: NDArray[np.float32]) -> None:
        """Fill `x`.

        Args:
            stored: (n, *source), any real type.
            x: float32 (n, *target); with `crop`, maps of any size up to `readable_shape`.
        """
        # Numbers beyond float32 become infinite; the reader refuses them with the sample's number.
        with np.errstate(over="ignore", invalid="ignore"):
            if self.mean:
                x[...] = (stored.reshape(x.shape) - np.array(self.mean)) / np.array(self.deviation)
                return
            PixelFormat("", self.scale, self.offset).convert(self._shaped(stored, x.shape), x)

    def kept_as(self, dtype: np.dtype[Any]) -> PixelFormat:
        """Return the type in which samples of a type can be kept until they are loaded.

        8-bit pixels are kept if the conversion only moves or repeats them.
        """
        if dtype != np.uint8 or self._becomes_grey or self.resizes:
            return INPUTS
        return PixelFormat("uint8", self.scale, self.offset)

    def stored_as(self, dtype: np.dtype[Any]) -> tuple[Shape, PixelFormat] | None:
        """Return shape and form of images that are kept as stored and resized when loaded.

        Returns:
            None if images are not resized, have no 8-bit pixels, become grey, or would take more
            memory than inputs do.
        """
        # The sums of recoloured pixels are exact if they were shifted by 1.
        if not self.resizes or dtype != np.uint8 or self._becomes_grey or self.offset != -1.0:
            return None
        shape, (height, width) = (self.target[0], *self.source[1:]), self.target[1:]
        if math.prod(shape) > math.prod(self.target) * np.dtype(np.float32).itemsize:
            return None
        return shape, PixelFormat("uint8", self.scale, self.offset, (height, width))

    def keep(self, stored: NDArray[Any], x: NDArray[np.uint8]) -> None:
        """Fill `x` with 8-bit pixels that are not converted; `kept_as` must allow it."""
        x[...] = self._shaped(stored, x.shape)

    def _shaped(self, stored: NDArray[Any], shape: Shape) -> NDArray[Any]:
        return stored.reshape(shape) if len(self.target) == 1 else self._maps(stored, shape)

    def _maps(self, stored: NDArray[Any], shape: Shape) -> NDArray[Any]:
        """Return (n, C, H, W) in the requested size, with one channel or those of the target."""
        if self.crop:
            stored = stored[centre(self.source, shape)]
        if self._becomes_grey:
            red, green, blue = (np.float32(weight) for weight in LUMA)
            stored = (red * stored[:, :1] + green * stored[:, 1:2]) + blue * stored[:, 2:]
        height, width = self.target[1:]
        return resize(stored, (height, width)) if self.resizes else stored

    @property
    def note(self) -> str:
        """Description of the conversion for people; "" if there is none."""
        notes = ["standardised"] if self.mean else []
        if len(self.source) == 3 and len(self.target) == 3:
            (c, *size), (k, *wanted) = self.source, self.target
            if size != wanted:
                verb = "central crop" if self.crop else "resized"
                notes.append(f"{verb} from {size[0]}×{size[1]} to {wanted[0]}×{wanted[1]}")
            if c != k:
                notes.append("colour to grey" if c == 3 else f"grey repeated to {k} channels")
        return ", ".join(notes)
