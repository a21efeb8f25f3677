"""The scale of numbers in arrays: which are pixels 0 … 255, and whether splits agree.

The rules are those of docs/reference/images.md. They are decided once, from training data; a saved
model keeps what was decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError

if TYPE_CHECKING:
    from dptrain.data.preprocessing.preprocessing import Preprocessing
    from dptrain.data.stored import StoredInputs
    from dptrain.network.network import Network

MOST_SAMPLES = 512
MOST_ROWS = 1 << 16
"""Rows from which means and deviations are computed."""
MOST_DECODED = 16
"""Samples that are read if each must be decoded."""
MOST_BYTES = 64 << 20
"""Samples, evenly spaced, from which a scale is determined, and their size together."""
WHITE = 255
DARKEST = 127
"""Numbers up to this magnitude are taken as they are, because they may be anything."""
USUAL = (0.05, 16.0)
"""Magnitudes that inputs of networks usually reach; others are mentioned."""
MOST_RATIO = 10.0
"""Ratio of the magnitudes of two splits from which they are refused."""


@dataclass(frozen=True)
class Scale:
    """The range of stored numbers, of those that are finite in some samples.

    Attributes:
        dtype: of the numbers.
        low, high: smallest and largest number.
        are_whole: True if all numbers are whole.
        typical: median of the largest magnitude of a sample.
        dark: share of the samples that reach at most 1, but not only 0.
        is_image: True for samples (C, H, W).
    """

    dtype: np.dtype[Any]
    low: float
    high: float
    are_whole: bool
    typical: float
    dark: float
    is_image: bool

    @classmethod
    def of(cls, x: StoredInputs) -> Scale:
        """Return the scale of raw samples, (n, …)."""
        count, size = x.shape[0], math.prod(x.shape[1:]) * x.dtype.itemsize
        most = MOST_DECODED if getattr(x, "decodes", False) else MOST_SAMPLES
        number = max(min(count, most, MOST_BYTES // max(size, 1)), 1)
        low, high, are_whole, peaks = math.inf, -math.inf, True, np.zeros(number)
        for place, row in enumerate((np.arange(number, dtype=np.int64) * count) // number):
            sample = _finite(x[np.array([row])])
            if sample.size:
                low, high = min(low, float(sample.min())), max(high, float(sample.max()))
                peaks[place] = max(abs(float(sample.min())), abs(float(sample.max())))
                are_whole = are_whole and _are_whole(sample)
        if low > high:
            low = high = 0.0
        dark = float(((peaks > 0) & (peaks <= 1)).mean())
        return cls(x.dtype, low, high, are_whole, float(np.median(peaks)), dark, len(x.shape) == 4)

    @property
    def are_pixels(self) -> bool:
        """True for images whose numbers, of any type, are pixels 0 … 255."""
        if self.dtype == np.uint8:
            return True
        return self.is_image and self._reaches_white

    @property
    def magnitude(self) -> float:
        """Largest magnitude of a number."""
        return max(abs(self.low), abs(self.high))

    def check(self, where: str) -> None:
        """Raise `UserError` for images of unknown scale: whole numbers that are no 8-bit pixels.

        Args:
            where: name of the inputs, for messages.
        """
        if self.are_pixels and self.dtype != np.uint8 and self.dark >= 0.1:
            raise UserError(
                f"{where}: {self.dark:.0%} of the samples have numbers up to 1, others up to "
                f"{self.high:g}; expected one scale, for example pixels 0 to 255"
            )
        if not self.is_image or self.are_pixels or self.magnitude <= DARKEST or not self.are_whole:
            return
        largest = self.magnitude
        if self.low >= 0:  # The largest number of as many bits, such as 4095 or 65535.
            largest = 2.0 ** int(largest).bit_length() - 1
        raise UserError(
            f"{where}: images have whole numbers from {self.low:.12g} to {self.high:.12g} "
            f"({self.dtype}); dptrain cannot know their scale; expected pixels 0 to 255, or "
            f"floats that were scaled, for example x / {largest:.12g}"
        )

    def standardises(self, network: Network) -> bool:
        """Return True if a new model of a network standardises vectors of this scale.

        Those of a usual scale are taken as they are, and so is everything for a network of the
        user's own, whose weights may be those of a file.
        """
        is_own = network.family is None or network.file_kind == "weights"
        return not (is_own or self.is_image or self.are_pixels or self.is_usual)

    def note(self, network: Network) -> str:
        """Return a line about numbers that were converted or have an unusual scale; else ""."""
        found = f"numbers from {self.low:g} to {self.high:g} ({self.dtype})"
        if self.standardises(network):
            return f"inputs have {found} and are standardised, column by column"
        if self.dtype == np.uint8:
            if 0 < self.high <= USUAL[1]:
                return (
                    f"8-bit pixels reach only {self.high:g} of 255, so that inputs hardly differ; "
                    "multiply them"
                )
            return ""
        if self.are_pixels:
            return f"images have {found}: pixels, converted from 0…255 to -1…1 as uint8 is"
        if self.is_usual:
            return ""
        advice = "networks train best on numbers near -1 to 1"
        if self.look_like_pixels:
            advice = "if they are pixels, pass them as uint8, which becomes -1 to 1"
        return f"inputs have {found}, an unusual scale, and are taken as they are; {advice}"

    @property
    def is_usual(self) -> bool:
        """True if the numbers have a magnitude that inputs of networks usually have."""
        return not self.magnitude or USUAL[0] <= self.magnitude <= USUAL[1]

    @property
    def look_like_pixels(self) -> bool:
        """True for whole numbers 0 … 255. In rows (F,), they may be anything."""
        return self.are_whole and self._reaches_white

    @property
    def _reaches_white(self) -> bool:
        """True if the range may be that of 8-bit pixels, and is too large for other inputs."""
        return self.low >= 0 and DARKEST < self.high <= WHITE

    def note_of_new(self, preprocessing: Preprocessing) -> str:
        """Return a line about how new data of a trained model is converted; "" if it is usual."""
        found = f"inputs have numbers from {self.low:g} to {self.high:g} ({self.dtype})"
        if preprocessing.has_pixels:
            is_plain = self.dtype == np.uint8 or preprocessing.is_converted(self.dtype)
            white = preprocessing.white
            return "" if is_plain else f"{found}: pixels, converted from 0…{white} to -1…1"
        is_plain = self.is_usual or bool(preprocessing.mean)
        return "" if is_plain else f"{found} and are taken as they are, as in training"


def check_against_training(
    inputs: StoredInputs, preprocessing: Preprocessing, where: str
) -> tuple[str, ...]:
    """Return notes about the scale of new samples.

    Args:
        inputs: raw samples, (n, …).
        preprocessing: of the model.
        where: name of the inputs, for messages.

    Raises:
        UserError: they have far larger numbers than the training data had.
    """
    largest, has_pixels = preprocessing.magnitude, preprocessing.has_pixels
    if preprocessing.kind == "table" or not (largest or has_pixels) or inputs.dtype == np.uint8:
        return ()
    scale = Scale.of(inputs)
    if not has_pixels and scale.typical >= MOST_RATIO * largest:
        raise UserError(
            f"{where} has numbers from {scale.low:g} to {scale.high:g}, but the network was "
            f"trained on numbers up to {largest:g} of {preprocessing.trained_on}; expected the "
            "same scale"
        )
    note = scale.note_of_new(preprocessing)
    return (note,) if note else ()


def moments(
    x: StoredInputs, rows: NDArray[np.int64]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each column of vectors; 1 for equal numbers.

    Of more rows than `MOST_ROWS`, as many are read, evenly spaced.

    Args:
        x: raw vectors, (n, F).
        rows: of the training samples.
    """
    number = min(len(rows), MOST_ROWS)
    chosen = rows[np.arange(number, dtype=np.int64) * len(rows) // number]
    with np.errstate(over="ignore", invalid="ignore"):
        part = np.asarray(x[chosen], np.float64)
        mean, deviation = part.mean(axis=0), part.std(axis=0)
    # By rounding, the deviation of a constant column is tiny but not zero.
    varies = (part.min(axis=0) < part.max(axis=0)) & (deviation > 0.0)
    fine = np.isfinite(mean) & np.isfinite(deviation)  # The reader refuses what is not finite.
    return (
        tuple(np.where(fine, mean, 0.0).tolist()),
        tuple(np.where(fine & varies, deviation, 1.0).tolist()),
    )


def common_scale(
    splits: Mapping[str, StoredInputs], where: str, network: Network
) -> tuple[Scale, tuple[str, ...]]:
    """Return the scale of training data, after comparing it with the other splits, and notes.

    Args:
        network: that is trained.
        splits: raw inputs by their names, such as x_train; the first ones are for training.
        where: name of the data, for messages.

    Raises:
        UserError: the scale of the images cannot be known, or the splits have different scales.
    """
    scales = {name: Scale.of(x) for name, x in splits.items()}
    (first, train), *others = scales.items()
    train.check(f"{first} of {where}")
    notes = [train.note(network)]
    for name, scale in others:
        smaller, larger = sorted((train.typical, scale.typical))
        beyond = train.are_pixels and not (scale.low >= 0 and scale.high <= WHITE)
        ranges = (
            f"{first} has numbers from {train.low:g} to {train.high:g} and {name} from "
            f"{scale.low:g} to {scale.high:g}"
        )
        if beyond or 0 < smaller * MOST_RATIO <= larger:
            raise UserError(f"{where}: {ranges}; expected splits on the same scale")
        if abs(train.low - scale.low) > 0.25 * max(train.magnitude, scale.magnitude) and (
            min(train.low, scale.low) < 0 <= max(train.low, scale.low)
        ):
            notes.append(f"{ranges}; are they on the same scale?")
    return train, tuple(filter(None, notes))


def _finite(sample: NDArray[Any]) -> NDArray[Any]:
    return sample[np.isfinite(sample)] if sample.dtype.kind == "f" else sample


def _are_whole(sample: NDArray[Any]) -> bool:
    return sample.dtype.kind in "biu" or bool((sample == np.floor(sample)).all())
