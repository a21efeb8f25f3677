"""Random changes of training images: a pure function of seed, epoch and sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.bounds import (
    MAX_BRIGHTNESS,
    MAX_MAGNITUDE,
    MAX_MIXUP,
    MAX_OPERATIONS,
    MAX_ZOOM,
)
from dptrain.data.loading import geometry
from dptrain.data.loading.colours import MATRIX, colour_matrices
from dptrain.data.loading.mixup import cutmix_boxes, mixup_weights
from dptrain.data.loading.randaugment import RandomOperations, random_operations
from dptrain.errors import UserError
from dptrain.network.layers import Shape

_MASK = 0xFFFFFFFF
_STREAM = 0xFFFFFFFF
"""Part of the Philox counter in which dropout has the index of a layer; no layer has this one."""

SHIFTS, FLIP, BRIGHTNESS, CONTRAST, CUTOUT, MIXUP = slice(2), 2, 3, 4, slice(5, 7), 7
ROTATION, ZOOM, SATURATION, HUE, CUTMIX, ERASES = 8, 9, 10, 11, slice(12, 15), 15
OPERATIONS, CROP_PLACE, ERASED_PLACE = slice(16, 36), slice(36, 38), slice(38, 40)
CROP_TRIES, ERASED_TRIES = slice(40, 60), slice(60, 80)
"""Rows of the random numbers of each change."""

ERASED_AREAS, ERASED_ASPECTS = (0.02, 0.33), (0.3, 3.3)
"""Share of the area and ratio of width to height of erased boxes, as torchvision's defaults."""

_LIMITS = {
    "crop": (0.0, np.inf, "at least 0 pixels"),
    "brightness": (0.0, MAX_BRIGHTNESS, f"0 to {MAX_BRIGHTNESS:g}"),
    "contrast": (0.0, 1.0, "0 to 1"),
    "cutout": (0.0, np.inf, "at least 0 pixels"),
    "mixup": (0.0, MAX_MIXUP, f"0 to {MAX_MIXUP:g}, usually 0.2"),
    "resized_crop": (0.0, 1.0, "the least share of the area from 0 to 1, usually 0.08"),
    "rotate": (0.0, 180.0, "0 to 180 degrees"),
    "zoom": (0.0, MAX_ZOOM, f"0 to {MAX_ZOOM}"),
    "saturation": (0.0, 1.0, "0 to 1"),
    "hue": (0.0, 0.5, "0 to 0.5 turns"),
    "erase": (0.0, 1.0, "a probability from 0 to 1"),
    "cutmix": (0.0, MAX_MIXUP, f"0 to {MAX_MIXUP:g}, usually 1"),
    "randaugment": (0, MAX_OPERATIONS, f"0 to {MAX_OPERATIONS} operations"),
    "randaugment_magnitude": (0.0, MAX_MAGNITUDE, f"0 to {MAX_MAGNITUDE:g}"),
}
"""Least and largest value of each setting, and a phrase for the values."""


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
        mixup: α; each sample is averaged with the next one of its minibatch, see
            `dptrain.data.loading.mixup`, after all changes of both samples.
        resized_crop: a; a random box with a share of [a, 1] of the area of the image, and an aspect
            ratio from 3/4 to 4/3, becomes the input. 0 takes the whole window of the image.
        rotate: d turns images about the centre by an angle from [−d, d] degrees.
        zoom: z enlarges images by a factor from [1 − z, 1 + z].
        saturation: s multiplies distances from grey by a factor from [1 − s, 1 + s].
        hue: h turns colours by a part of [−h, h] of the circle.
        erase: probability with which a random box is set to 0; `cutout` is the special case of
            a square in each image.
        cutmix: α; as `mixup`, but a box of another sample replaces a part of each.
        randaugment: number of random operations on each image, see
            `dptrain.data.loading.randaugment`.
        randaugment_magnitude: of these operations, from 0 to 30.
    """

    crop: int = 0
    flip: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    cutout: int = 0
    mixup: float = 0.0
    resized_crop: float = 0.0
    rotate: float = 0.0
    zoom: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    erase: float = 0.0
    cutmix: float = 0.0
    randaugment: int = 0
    randaugment_magnitude: float = 9.0

    def __post_init__(self) -> None:
        for name, (least, most, expected) in _LIMITS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise UserError(f"augmentation {name} is {value}; expected {expected}")
        for one, other, why in (
            ("crop", "resized_crop", "both choose the part of the image"),
            ("cutout", "erase", "both choose the part that is set to 0"),
            ("mixup", "cutmix", "both mix pairs of samples"),
        ):
            if getattr(self, one) and getattr(self, other):
                raise UserError(f"augmentation {one} and {other} are set; {why}, so remove one")

    def check(self, input_shape: Shape) -> None:
        """Raise `UserError` unless images of this shape can be changed.

        Args:
            input_shape: of the network, (C, H, W) or (F,).
        """
        changes = [name for name in self.used if name != "mixup"]
        if not changes:
            return
        if len(input_shape) != 3:
            raise UserError(
                f"augmentation changes images, but the network takes vectors {input_shape}; "
                f"remove {', '.join(changes)}"
            )
        height, width = input_shape[1:]
        smaller = min(height, width)
        if self.crop >= smaller:
            raise UserError(
                f"augmentation crop is {self.crop} pixels, but the network's input has "
                f"{height}×{width}; expected at most {smaller - 1}, usually an "
                "eighth of the size"
            )
        if self.cutout >= 2 * smaller:
            raise UserError(
                f"augmentation cutout is {self.cutout} pixels, but the network's input has "
                f"{height}×{width}; expected at most {2 * smaller - 1}, usually "
                "half of the size"
            )
        coloured = [name for name in ("saturation", "hue") if getattr(self, name)]
        if coloured and input_shape[0] != 3:
            raise UserError(
                f"augmentation {coloured[0]} changes colours, but the network's input has "
                f"{input_shape[0]} channels instead of 3 (red, green, blue); remove it"
            )

    @property
    def used(self) -> list[str]:
        """Names of the settings that change something."""
        names = [field.name for field in fields(self) if getattr(self, field.name)]
        return [name for name in names if name != "randaugment_magnitude"]

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
    def warps(self) -> bool:
        """True if images are sampled between pixels."""
        return bool(self.resized_crop or self.rotate or self.zoom or self.randaugment)

    @property
    def moves(self) -> bool:
        """True if pixels move."""
        return self.crop > 0 or self.flip or self.warps

    @property
    def recolours(self) -> bool:
        """True if the values of pixels change."""
        return bool(self.brightness or self.contrast or self._mixes_channels or self.randaugment)

    @property
    def _mixes_channels(self) -> bool:
        return bool(self.saturation or self.hue)

    @property
    def cuts(self) -> bool:
        """True if parts of inputs become 0."""
        return bool(self.cutout or self.erase)

    @property
    def mixes(self) -> bool:
        """True if samples are mixed with others of their minibatch."""
        return bool(self.mixup or self.cutmix)

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
            draws: (rows, n), from `draw`.
            source: float32 (m, C, H', W'), contiguous; needed if `moves`. The images may have any
                size. Their centres are the unchanged inputs; `x` is then only written.
            rows: int64 (n,), index of each image in `source`.
        """
        if self.moves:
            assert source is not None
            windows = self.crop_windows(x.shape[1:], draws, source.shape[1:], rows)
            (self._warp if self.warps else self._shift)(len(x), source, windows, x)
        if self.recolours:
            self._recolour(x, draws)
        if self.cuts:
            self._erase(len(x), self.cutouts(x.shape[1:], draws), x)

    def _recolour(self, x: NDArray[np.float32], draws: NDArray[np.float64]) -> None:
        # A sum in double precision is the same in any order, up to rarely one unit in the last
        # place of the mean.
        mean = x.mean(axis=(2, 3), keepdims=True, dtype=np.float64).astype(np.float32)
        recolourings = self.recolourings(draws, x.shape[1])
        factor, added = recolourings.T[:2, :, None, None, None]
        x -= mean
        x *= factor
        x += mean + added
        if recolourings.shape[1] > 2:
            self._blend(len(x), recolourings, x)

    def recolourings(self, draws: NDArray[np.float64], channels: int) -> NDArray[np.float32]:
        """Return how the colours of images change.

        Args:
            draws: (rows, n), from `draw`.
            channels: number of channels.

        Returns:
            float32 (n, 2): factor of the distances from the mean of each channel, and the number
            that is added to all pixels. With changes of saturation or hue, float32 (n, 11): in
            addition, the matrix of the channels that is applied afterwards.
        """
        saturation, hue = np.ones(draws.shape[1]), np.zeros(draws.shape[1])
        factor = 1.0 + self.contrast * (2.0 * draws[CONTRAST] - 1.0)
        added = self.brightness * (2.0 * draws[BRIGHTNESS] - 1.0)
        if self._mixes_channels:
            saturation += self.saturation * (2.0 * draws[SATURATION] - 1.0)
            hue += self.hue * (2.0 * draws[HUE] - 1.0)
        if self.randaugment:
            random = self._operations(draws)
            factor, added = factor * random.contrast, added + random.brightness
            saturation *= random.saturation
        found = np.stack([factor, added], axis=1).astype(np.float32)
        if channels != 3 or not (self._mixes_channels or self.randaugment):
            return found
        return np.concatenate([found, colour_matrices(saturation, hue)], axis=1)

    def _operations(
        self, draws: NDArray[np.float64], size: tuple[int, ...] = (1, 1)
    ) -> RandomOperations:
        """Return the operations of RandAugment; `size` of the input matters for their maps."""
        used = draws[OPERATIONS][: 2 * self.randaugment]
        return random_operations(used, self.randaugment_magnitude, size)

    def cutouts(self, input_shape: Shape, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the part of each input that is set to 0.

        Args:
            input_shape: (C, H, W).
            draws: (rows, n), from `draw`.

        Returns:
            int64 (n, 4): first row, first column, and the row and the column after the last ones.
        """
        found, size = np.zeros((draws.shape[1], 4), np.int64), input_shape[1:]
        if self.cutout:
            found[:, :2], found[:, 2:] = geometry.squares_around(draws[CUTOUT], self.cutout, size)
        elif self.erase:
            tries, is_erased = draws[ERASED_TRIES], draws[ERASES] < self.erase
            boxes = geometry.random_boxes(tries, ERASED_AREAS, ERASED_ASPECTS, size)
            sides = np.where(is_erased[:, None], np.rint(boxes), 0.0).astype(np.int64)
            first = (draws[ERASED_PLACE].T * (np.array(size) - sides + 1)).astype(np.int64)
            found[:, :2], found[:, 2:] = first, first + sides
        return found

    def draw(self, seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return random numbers in [0, 1): float64 (rows, n), as many rows as the changes need.

        The kernel does not hold the interpreter's lock, which the thread that starts steps needs.
        """
        draws = np.empty((self._num_rows, len(samples)))
        words = [epoch & _MASK, _STREAM, seed & _MASK, (seed >> 32) & _MASK]
        indices = np.ascontiguousarray(samples, np.int64)
        self._draw(len(indices), indices, np.array(words, np.uint64), draws)
        return draws

    @cached_property
    def _num_rows(self) -> int:
        """A multiple of 4, the words of a block of Philox."""
        operations = -(-2 * self.randaugment // 4) * 4
        needed = (
            (8, self.recolours or self.cuts or self.mixes),
            (16, self.rotate or self.zoom or self._mixes_channels or self.cutmix),
            (16 + operations, self.randaugment),
            (CROP_TRIES.stop, self.resized_crop),
            (ERASED_TRIES.stop, self.erase),
        )
        return max([4, *(rows for rows, is_needed in needed if is_needed)])

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
            draws: (rows, n), from `draw`.
            image_shape: (C, H', W') of the images.
            rows: int64 (n,), index of each image.

        Returns:
            int64 (n, 4): index of the image, row and column in it at which the window begins, which
            may be outside, and 1 if the window is mirrored. If parts are set to 0, int64 (n, 8): in
            addition, the part of the input, as `cutouts` returns it. If images are sampled between
            pixels, int64 (n, 16): then the map of `geometry.fixed_point`, instead of the window.
        """
        windows = centred_windows(input_shape, image_shape, rows)
        for axis in (0, 1):
            windows[:, 1 + axis] += (draws[axis] * (2 * self.crop + 1)).astype(np.int64) - self.crop
        windows[:, 3] = (draws[FLIP] < 0.5) & self.flip
        if not (self.cuts or self.warps):
            return windows
        parts = [windows, self.cutouts(input_shape, draws)]
        if self.warps:
            size = input_shape[1:]
            maps, widths = self._maps(size, draws, image_shape[1:], windows)
            parts.append(geometry.fixed_point(maps, widths, size))
        return np.concatenate(parts, axis=1)

    def _maps(
        self,
        size: tuple[int, ...],
        draws: NDArray[np.float64],
        image_size: tuple[int, ...],
        windows: NDArray[np.int64],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the maps from inputs to images and their half widths, see
        `geometry.fixed_point`.

        The box of the image is taken first, then mirrored, turned and zoomed, and changed by the
        random operations at last.
        """
        count = draws.shape[1]
        if max(image_size) > geometry.MAX_SIZE:
            raise UserError(
                f"augmentation samples images of {image_size[0]}×{image_size[1]} pixels; expected "
                f"at most {geometry.MAX_SIZE}; resize the images, or remove {', '.join(self.used)}"
            )
        centres, factors = windows[:, 1:3] + np.array(size) / 2, np.ones((count, 2))
        if self.resized_crop:
            tries, place = draws[CROP_TRIES], draws[CROP_PLACE]
            boxes, centres = geometry.resized_crops(tries, place, self.resized_crop, image_size)
            factors = boxes / np.array(size)
        if self.zoom:
            factors = factors / (1.0 + self.zoom * (2.0 * draws[ZOOM, :, None] - 1.0))
        maps = geometry.scales(factors[:, 0], factors[:, 1] * (1 - 2 * windows[:, 3]))
        maps[:, :2, 2] = centres
        if self.rotate:
            maps = maps @ geometry.rotations(self.rotate * (2.0 * draws[ROTATION] - 1.0))
        if self.randaugment:
            maps = maps @ self._operations(draws, size).maps
        return maps, factors

    def mixings(
        self, draws: NDArray[np.float64], input_shape: Shape, *, mixes_targets: bool
    ) -> NDArray[np.float32]:
        """Return how samples are mixed with their partners, in the form of `Batch.mixings`.

        Args:
            draws: (rows, n), from `draw`.
            input_shape: (C, H, W) or (F,).
            mixes_targets: True if targets are numbers, which are mixed; labels are not.

        Returns:
            float32 (n, 1) for mixup, (n, 5) for CutMix.
        """
        if self.cutmix:
            uniform = np.concatenate([draws[MIXUP : MIXUP + 1], draws[CUTMIX]])
            return cutmix_boxes(uniform, self.cutmix, input_shape[1:], mixes_targets=mixes_targets)
        return mixup_weights(draws[MIXUP], self.mixup, mixes_targets=mixes_targets)

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
    def _warp(self) -> Callable[..., None]:
        """Kernel; its arguments are the number of items, `source`, windows and `x`."""
        from dptrain.native.shifts import warp

        maps = np.zeros((0, 0, 0, 0), np.float32)
        return _bind(warp, (maps, np.zeros((0, 16), np.int64), maps))

    @cached_property
    def _blend(self) -> Callable[..., None]:
        """Kernel; its arguments are the number of items, `recolourings` and `x`."""
        from dptrain.native.shifts import blend

        maps = np.zeros((0, 0, 0, 0), np.float32)
        return _bind(blend, (np.zeros((0, 2 + MATRIX), np.float32), maps))

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
