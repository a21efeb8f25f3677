"""Random changes of training images: a pure function of seed, epoch and sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.bounds import MAX_BRIGHTNESS, MAX_MIXUP
from dptrain.errors import UserError
from dptrain.network.layers import Shape

_MASK = 0xFFFFFFFF
_STREAM = 0xFFFFFFFF
"""Part of the Philox counter in which dropout has the index of a layer; no layer has this one."""


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images.

    The changes of an image depend on (seed, epoch, sample) only: not on the rank, and not on the
    other samples of the minibatch.

    Attributes:
        crop: largest distance in pixels, vertical and horizontal, by which the crop window moves
            from the centre. It moves over the rest of the image if the source has larger images
            than the network's input (``fit=crop``), and over zeros outside of the image.
        flip: mirror half of the images horizontally.
        brightness: b adds a number from [−b, b] to all pixels; pixels range from −1 to 1.
        contrast: c multiplies distances from the mean of each channel by a factor from
            [1 − c, 1 + c].
        cutout: side in pixels of a square that is set to 0 in each image, after all other changes.
            Its centre is a random pixel, and the part outside of the image is left out. Source:
            T. DeVries and G. W. Taylor, Improved Regularization of Convolutional Neural Networks
            with Cutout, 2017.
        mixup: α; each sample is averaged with another one of its minibatch, see
            `dptrain.data.loading.mixup`. `Loader` does this after all changes of both samples.
    """

    crop: int = 0
    flip: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    cutout: int = 0
    mixup: float = 0.0

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise UserError(f"augmentation crop is {self.crop}; expected at least 0 pixels")
        if not 0.0 <= self.brightness <= MAX_BRIGHTNESS:
            raise UserError(
                f"augmentation brightness is {self.brightness}; expected 0 to {MAX_BRIGHTNESS:g}"
            )
        if not 0.0 <= self.contrast <= 1.0:
            raise UserError(f"augmentation contrast is {self.contrast}; expected 0 to 1")
        if self.cutout < 0:
            raise UserError(f"augmentation cutout is {self.cutout}; expected at least 0 pixels")
        if not 0.0 <= self.mixup <= MAX_MIXUP:
            raise UserError(
                f"augmentation mixup is {self.mixup}; expected 0 to {MAX_MIXUP:g}, usually 0.2"
            )

    def check(self, input_shape: Shape) -> None:
        """Raise `UserError` unless images of this shape can be changed.

        Args:
            input_shape: of the network, (C, H, W) or (F,).
        """
        if self == Augmentation(mixup=self.mixup):
            return
        if len(input_shape) != 3:
            raise UserError(
                f"augmentation changes images, but the network takes vectors {input_shape}; "
                "remove crop, flip, brightness, contrast and cutout"
            )
        smaller = min(input_shape[1:])
        if self.crop >= smaller:
            raise UserError(
                f"augmentation crop is {self.crop} pixels, but the network's input has "
                f"{input_shape[1]}×{input_shape[2]}; expected at most {smaller - 1}, usually an "
                "eighth of the size"
            )
        if self.cutout >= 2 * smaller:
            raise UserError(
                f"augmentation cutout is {self.cutout} pixels, but the network's input has "
                f"{input_shape[1]}×{input_shape[2]}; expected at most {2 * smaller - 1}, usually "
                "half of the size"
            )

    def apply(
        self,
        x: NDArray[np.float32],
        *,
        seed: int,
        epoch: int,
        samples: NDArray[np.int64],
        source: NDArray[np.float32] | None = None,
    ) -> None:
        """Draw random numbers for images and change the images in place.

        Args:
            x: float32 (n, C, H, W).
            seed: of the run.
            epoch: from 0.
            samples: int64 (n,), indices of the samples.
            source: as for `change`, image i for `x[i]`; None: a copy of `x`.
        """
        if self.moves and source is None:
            source = x.copy()
        self.change(x, self.draw(seed, epoch, samples), source, np.arange(len(x)))

    @property
    def moves(self) -> bool:
        """True if pixels move."""
        return self.crop > 0 or self.flip

    @property
    def recolours(self) -> bool:
        """True if the values of pixels change."""
        return bool(self.brightness or self.contrast)

    def change(
        self,
        x: NDArray[np.float32],
        draws: NDArray[np.float64],
        source: NDArray[np.float32] | None,
        rows: NDArray[np.int64],
    ) -> None:
        """Change images by random numbers.

        Args:
            x: float32 (n, C, H, W), contiguous.
            draws: (8, n) or (4, n), from `draw`.
            source: float32 (m, C, H', W'), contiguous; needed if `moves`. The images may have any
                size. Their centres are the unchanged inputs; `x` is then only written.
            rows: int64 (n,), index of each image in `source`.
        """
        if self.moves:
            assert source is not None
            windows = self.crop_windows(x.shape[1:], draws, source.shape[1:], rows)
            self._shift(len(x), source, windows, x)
        if self.recolours:
            self._recolour(x, draws)
        if self.cutout:
            self._erase(len(x), self.cutouts(x.shape[1:], draws), x)

    def _recolour(self, x: NDArray[np.float32], draws: NDArray[np.float64]) -> None:
        # A sum in double precision is the same in any order, up to rarely one unit in the last
        # place of the mean.
        mean = x.mean(axis=(2, 3), keepdims=True, dtype=np.float64).astype(np.float32)
        factor, added = self.recolourings(draws).T[:, :, None, None, None]
        x -= mean
        x *= factor
        x += mean + added

    def recolourings(self, draws: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return how the colours of images change.

        Args:
            draws: (8, n), from `draw`.

        Returns:
            float32 (n, 2): factor of the distances from the mean of each channel, and the number
            that is added to all pixels.
        """
        factor = 1.0 + self.contrast * (2.0 * draws[4] - 1.0)
        added = self.brightness * (2.0 * draws[3] - 1.0)
        return np.stack([factor, added], axis=1).astype(np.float32)

    def cutouts(self, input_shape: Shape, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the part of each input that is set to 0.

        Args:
            input_shape: (C, H, W).
            draws: (8, n), from `draw`.

        Returns:
            int64 (n, 4): first row, first column, and the row and the column after the last ones.
        """
        found = np.empty((draws.shape[1], 4), np.int64)
        for axis, length in enumerate(input_shape[1:]):
            first = (draws[5 + axis] * length).astype(np.int64) - self.cutout // 2
            found[:, axis] = np.maximum(first, 0)
            found[:, 2 + axis] = np.minimum(first + self.cutout, length)
        return found

    def draw(self, seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return random numbers in [0, 1): float64 (8, n), or the first four rows if they suffice.

        The kernel does not hold the interpreter's lock, which the thread that starts steps needs.
        """
        needs_more = self.recolours or self.cutout or self.mixup
        draws = np.empty((8 if needs_more else 4, len(samples)))
        words = [epoch & _MASK, _STREAM, seed & _MASK, (seed >> 32) & _MASK]
        indices = np.ascontiguousarray(samples, np.int64)
        self._draw(len(indices), indices, np.array(words, np.uint64), draws)
        return draws

    def crop_windows(
        self,
        input_shape: Shape,
        draws: NDArray[np.float64],
        image_shape: Shape,
        rows: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return the windows of images that become the inputs: centred, and moved at random.

        Args:
            input_shape: (C, H, W) of a window.
            draws: (8, n) or (4, n), from `draw`.
            image_shape: (C, H', W') of the images.
            rows: int64 (n,), index of each image.

        Returns:
            int64 (n, 4): index of the image, row and column in it at which the window begins, which
            may be outside, and 1 if the window is mirrored. With `cutout` int64 (n, 8): in
            addition, the part of the input that is set to 0, as `cutouts` returns it.
        """
        windows = centred_windows(input_shape, image_shape, rows)
        for axis in (0, 1):
            windows[:, 1 + axis] += (draws[axis] * (2 * self.crop + 1)).astype(np.int64) - self.crop
        windows[:, 3] = (draws[2] < 0.5) & self.flip
        if not self.cutout:
            return windows
        return np.concatenate([windows, self.cutouts(input_shape, draws)], axis=1)

    @cached_property
    def _draw(self) -> Callable[..., None]:
        """Kernel; its arguments are the number of items, samples, words and draws."""
        from dptrain.native.draws import draw

        return _bind(draw, (np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros((0, 0))))

    @cached_property
    def _shift(self) -> Callable[..., None]:
        """Kernel; its arguments are the number of items, `source`, windows and `x`."""
        from dptrain.native.shifts import shift

        maps = np.zeros((0, 0, 0, 0), np.float32)
        return _bind(shift, (maps, np.zeros((0, 4), np.int64), maps))

    @cached_property
    def _erase(self) -> Callable[..., None]:
        """Kernel; its arguments are the number of items, `cutouts` and `x`."""
        from dptrain.native.shifts import erase

        maps = np.zeros((0, 0, 0, 0), np.float32)
        return _bind(erase, (np.zeros((0, 4), np.int64), maps))


def _bind(kernel: Any, examples: tuple[NDArray[Any], ...]) -> Callable[..., None]:
    """Return a function that runs a kernel on the calling thread, one call at a time.

    Args:
        kernel: compiled; its first argument is the number of items.
        examples: arrays with the types of the other arguments.
    """
    from dptrain.native.threads import ThreadPool

    launch, lock = ThreadPool(1).bind(kernel, varying=examples), Lock()

    def run(*args: Any) -> None:
        # A launch has one record of arguments, and several loaders can share an `Augmentation`.
        with lock:
            launch(*args)

    return run


def centred_windows(
    input_shape: Shape, image_shape: Shape, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return `Augmentation.crop_windows` without random moves.

    Vectors (F,) are treated as images of one pixel.
    """
    windows = np.zeros((len(rows), 4), np.int64)
    windows[:, 0] = rows
    if len(input_shape) == 3:
        windows[:, 1:3] = [
            (larger - smaller) // 2
            for larger, smaller in zip(image_shape[1:], input_shape[1:], strict=True)
        ]
    return windows
