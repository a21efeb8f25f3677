"""Random changes to training pictures, a pure function of seed, epoch and sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptrain.data.images import centre
from dptrain.errors import UserError
from dptrain.plan.random import philox

_STREAM = 0xFFFFFFFF
"""Where dropout has the index of a layer in the counter: no layer has this one."""


@dataclass(frozen=True)
class Augmentation:
    """What may happen to a training picture before the network sees it.

    What does happen to it depends on (seed, epoch, sample) alone: not on the rank, nor on what
    else is in the minibatch.

    Attributes:
        crop: pixels that the window may move, up or down and left or right, from the centre. What
            it moves over is the rest of the picture where the source keeps more of it than the
            network sees (``fit=crop``), and zeros beyond.
        flip: mirror half of the pictures left to right.
        brightness: b adds a number from [−b, b] to all pixels; pixels go from −1 to 1.
        contrast: c multiplies distances from the mean of each channel by a factor from
            [1 − c, 1 + c].
    """

    crop: int = 0
    flip: bool = False
    brightness: float = 0.0
    contrast: float = 0.0

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise UserError(f"augmentation crop is {self.crop}; expected at least 0 pixels")
        if not (self.brightness >= 0.0 and math.isfinite(self.brightness)):
            raise UserError(f"augmentation brightness is {self.brightness}; expected at least 0")
        if not 0.0 <= self.contrast <= 1.0:
            raise UserError(f"augmentation contrast is {self.contrast}; expected 0 to 1")

    def apply(
        self,
        x: NDArray[np.float32],
        *,
        seed: int,
        epoch: int,
        samples: NDArray[np.int64],
        source: NDArray[np.float32] | None = None,
    ) -> None:
        """Draw for these pictures and change them in place.

        Args:
            x: float32 (n, C, H, W).
            seed: of the run.
            epoch: from 0.
            samples: int64 (n,), identities of the pictures.
            source: as for `change`.
        """
        self.change(x, self.draw(seed, epoch, samples), source)

    def change(
        self,
        x: NDArray[np.float32],
        draws: NDArray[np.float64],
        source: NDArray[np.float32] | None = None,
    ) -> None:
        """Change pictures in place, as drawn.

        Args:
            x: float32 (n, C, H, W).
            draws: (8, n), what `draw` gave for these pictures.
            source: float32 (n, C, H + 2·crop, W + 2·crop), the pictures with what lies around
                them; `x` is then only written. `x` with zeros around where left out.
        """
        flips = (draws[2] < 0.5) & self.flip
        if self.crop:
            self._move(x, self._surround(x) if source is None else source, draws, flips)
        else:
            for i in np.flatnonzero(flips):
                x[i] = x[i, :, :, ::-1].copy()
        if not (self.brightness or self.contrast):
            return
        mean = x.mean(axis=(2, 3), keepdims=True)
        factor = _column(1.0 + self.contrast * (2.0 * draws[4] - 1.0))
        shift = _column(self.brightness * (2.0 * draws[3] - 1.0))
        x -= mean
        x *= factor
        x += mean + shift

    def draw(self, seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Eight numbers in [0, 1) for each sample, (8, n).

        Many samples at once cost little more than one: generating is a few dozen array operations.
        """
        blocks = np.arange(2, dtype=np.uint64)[:, None]
        key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
        words = philox((blocks, samples.astype(np.uint64)[None, :], epoch, _STREAM), key)
        return np.stack([word[block] / 2.0**32 for block in range(2) for word in words])

    def _surround(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        n, channels, height, width = x.shape
        margin = 2 * self.crop
        source = np.zeros((n, channels, height + margin, width + margin), dtype=np.float32)
        source[centre(source.shape, x.shape)] = x
        return source

    def _move(
        self,
        x: NDArray[np.float32],
        source: NDArray[np.float32],
        draws: NDArray[np.float64],
        flips: NDArray[np.bool_],
    ) -> None:
        height, width = x.shape[2:]
        places = 2 * self.crop + 1
        tops, lefts = ((draw * places).astype(np.int64).tolist() for draw in draws[:2])
        for picture, around, top, left, flip in zip(
            x, source, tops, lefts, flips.tolist(), strict=True
        ):
            window = around[:, top : top + height, left : left + width]
            picture[...] = window[:, :, ::-1] if flip else window


def _column(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return values.astype(np.float32)[:, None, None, None]
