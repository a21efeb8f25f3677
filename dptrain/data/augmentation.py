"""Random changes to training pictures, a pure function of seed, epoch and sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.network.layers import Shape
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
            source: as for `change`, picture i for `x[i]`; `x` as it is where left out.
        """
        if self.moves and source is None:
            source = x.copy()
        self.change(x, self.draw(seed, epoch, samples), source, np.arange(len(x)))

    @property
    def moves(self) -> bool:
        """Whether pixels change their places."""
        return self.crop > 0 or self.flip

    def change(
        self,
        x: NDArray[np.float32],
        draws: NDArray[np.float64],
        source: NDArray[np.float32] | None,
        rows: NDArray[np.int64],
    ) -> None:
        """Change pictures as drawn.

        Args:
            x: float32 (n, C, H, W), contiguous.
            draws: (8, n) or (4, n), what `draw` gave for these pictures.
            source: float32 (m, C, H', W'), contiguous: with `moves`, pictures of any size, whose
                centres are what would be seen without a change; `x` is then only written.
            rows: int64 (n,), place of each picture in `source`.
        """
        if self.moves:
            assert source is not None
            places = self.places(x.shape[1:], draws, source.shape[1:], rows)
            self._shift(len(x), source, places, x)
        if not self.recolours:
            return
        mean = x.mean(axis=(2, 3), keepdims=True)
        factor = _column(1.0 + self.contrast * (2.0 * draws[4] - 1.0))
        shift = _column(self.brightness * (2.0 * draws[3] - 1.0))
        x -= mean
        x *= factor
        x += mean + shift

    def draw(self, seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Numbers in [0, 1) for each sample, eight or, if colours stay, the first four: (8, n).

        Many samples at once cost little more than one: generating is a few dozen array operations.
        """
        count = 2 if self.recolours else 1
        blocks = np.arange(count, dtype=np.uint64)[:, None]
        key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
        words = philox((blocks, samples.astype(np.uint64)[None, :], epoch, _STREAM), key)
        return np.stack([word[block] / 2.0**32 for block in range(count) for word in words])

    @property
    def recolours(self) -> bool:
        """Whether the values of pixels change."""
        return bool(self.brightness or self.contrast)

    def places(
        self,
        seen: Shape,
        draws: NDArray[np.float64],
        canvas: Shape,
        rows: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Which part of which picture is seen: `centred` windows, moved as drawn.

        Args:
            seen: (C, H, W) of what is seen.
            draws: (8, n) or (4, n), what `draw` gave.
            canvas: (C, H', W') of the pictures.
            rows: int64 (n,), number of each picture.

        Returns:
            int64 (n, 4): picture, row and column in it where the window begins, which may be
            outside, and whether what is in the window is mirrored.
        """
        moves = centred(seen, canvas, rows)
        moves[:, 1:3] += (draws[:2].T * (2 * self.crop + 1)).astype(np.int64) - self.crop
        moves[:, 3] = (draws[2] < 0.5) & self.flip
        return moves

    @cached_property
    def _shift(self) -> Callable[..., None]:
        """Kernel, called with its number of items, `source`, moves and `x`."""
        from dptrain.backends.numba.shifts import shift
        from dptrain.backends.numba.threads import Team

        maps = np.zeros((0, 0, 0, 0), np.float32)
        return Team(1).bind(shift, varying=(maps, np.zeros((0, 4), np.int64), maps))


def centred(seen: Shape, canvas: Shape, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """`Augmentation.places` where nothing moves; vectors (F,) are pictures of one pixel."""
    moves = np.zeros((len(rows), 4), np.int64)
    moves[:, 0] = rows
    if len(seen) == 3:
        moves[:, 1:3] = [
            (most - part) // 2 for most, part in zip(canvas[1:], seen[1:], strict=True)
        ]
    return moves


def _column(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return values.astype(np.float32)[:, None, None, None]
