"""How raw samples become a network's inputs, and what its outputs mean: a part of the model.

A `Preprocessing` is determined once, when training begins, and saved with the parameters. Later
evaluation and prediction use the saved object and never read the training data again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.data.image_files.decoder import is_pillow_image, pixels_of
from dptrain.data.preprocessing.classes import Classes
from dptrain.data.preprocessing.images import Adapter
from dptrain.data.preprocessing.layout import channels_first, refuse_masked
from dptrain.data.preprocessing.names import same_form
from dptrain.data.preprocessing.rows import RowLayout
from dptrain.data.preprocessing.scale import check_against_training
from dptrain.errors import UserError, suggest
from dptrain.network.layers import Shape
from dptrain.network.network import Network

Kind = Literal["image", "vector", "table"]
KINDS = ("image", "vector", "table")
FITS = ("resize", "crop")
ROUNDING = 1e-4
"""Pixels may exceed the range from -1 to 1 by this much."""


@dataclass(frozen=True)
class Preprocessing:
    """Description of raw samples, of their conversion, and of the network's outputs.

    A stored number v becomes v * scale + offset. Tables, and vectors of an unusual scale, are
    standardised instead: column by column, (v - mean) / deviation. Images are converted to the
    network's number of channels and to its height and width as
    `dptrain.data.preprocessing.images` describes.

    Attributes:
        kind: ``image`` for samples (C, H, W), ``vector`` for samples (F,) without column names,
            ``table`` for rows with named columns.
        input_shape: (C, H, W) or (F,), the network's input.
        stored_shape: shape of a raw sample; None if samples have different sizes (image files).
        stored_dtype: NumPy name of the raw numbers' type, such as ``uint8``.
        scale, offset: conversion of a stored number.
        white: 8-bit value that becomes 1. Used if `stored_dtype` is ``uint8``; arrays of another
            type are then expected in the converted range, -1 to 1.
        fit: ``resize`` images to the network's input, or ``crop`` their centre.
        columns: names of a table's input columns, in the order of the inputs.
        mean, deviation: of the training rows, one number for each column.
        target: name of the predicted column; "" if there is none, or several.
        targets: names of several predicted columns, in the order of the outputs.
        horizon: rows from the inputs to the predicted value.
        lags: rows of a table's sample, as `RowLayout.lags`; () if a sample is one row.
        positions: of the sensors that the columns are, as `RowLayout.positions`; () without maps.
        target_scale, target_offset: a predicted number p means p * target_scale + target_offset.
            They are numbers, or tuples with a number for each output.
        classes: names of the classes, in the order of the labels; None for values.
        magnitude: largest magnitude of a raw number of the training data; 0 if it is not known.
        source: the data set that the network was trained on, for messages. It and `magnitude` take
            no part in comparisons.

    Example:
        >>> import numpy as np
        >>> pixels = Preprocessing("image", (1, 2, 2), (1, 2, 2), "uint8", 2 / 255, -1.0)
        >>> pixels.apply(np.array([[[0, 255], [255, 0]]], np.uint8)).tolist()
        [[[[-1.0, 1.0], [1.0, -1.0]]]]
        >>> Preprocessing.from_dict(pixels.to_dict()) == pixels
        True
    """

    kind: Kind
    input_shape: Shape
    stored_shape: Shape | None = None
    stored_dtype: str = "float32"
    scale: float = 1.0
    offset: float = 0.0
    white: int = 255
    fit: Literal["resize", "crop"] = "resize"
    columns: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    target: str = ""
    targets: tuple[str, ...] = ()
    horizon: int = 0
    lags: tuple[int, ...] = ()
    positions: tuple[float, ...] = ()
    target_scale: float | tuple[float, ...] = 1.0
    target_offset: float | tuple[float, ...] = 0.0
    classes: tuple[str, ...] | None = None
    magnitude: float = field(default=0.0, compare=False)
    source: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values from which `from_dict` makes an equal object."""
        values = dataclasses.asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], where: str = "the preprocessing"
    ) -> Preprocessing:
        """Return the object whose `to_dict` gave `values`.

        Args:
            values: from `to_dict`, possibly read from a JSON file.
            where: name of the file, for messages.

        Raises:
            UserError: a key is missing or unknown, or a value has the wrong type.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if isinstance(values, Mapping):  # Older models may lack these keys.
            values = {"lags": [], "positions": [], "targets": [], "magnitude": 0.0, **values}
        if not isinstance(values, Mapping) or set(values) != set(names):
            found = ", ".join(map(str, values)) if isinstance(values, Mapping) else repr(values)
            raise UserError(f"{where} has the keys {found}; expected {', '.join(names)}")
        converted = {name: _checked(name, values[name], where) for name in names}
        result = cls(**converted)
        widths = {len(result.mean), len(result.deviation)}
        if result.kind == "table" or not result.mean:
            widths.add(len(result.columns))
        else:
            widths.add(math.prod(result.stored_shape or ()))
        if len(widths) > 1 or (result.kind == "table") != bool(result.columns):
            raise UserError(
                f"{where} has {len(result.columns)} columns, {len(result.mean)} means and "
                f"{len(result.deviation)} deviations for data of kind {result.kind}; expected "
                "equal numbers, and at least one column for a table only"
            )
        if len(result.positions) not in (0, 2 * len(result.columns)):
            raise UserError(
                f"{where} has {len(result.positions)} coordinates of sensors; expected two for "
                f"each of the {len(result.columns)} columns, or none"
            )
        return result

    def digest(self) -> str:
        """Return a SHA-256 hex digest that is equal for equal preprocessing."""
        values = self.to_dict()
        del values["source"], values["magnitude"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @property
    def is_8bit(self) -> bool:
        """True if the raw numbers of the training data were 8-bit pixels."""
        return self.stored_dtype == "uint8"

    @property
    def has_pixels(self) -> bool:
        """True if the raw numbers were pixels 0 … `white`, of any type."""
        return self.is_8bit or (self.scale, self.offset) == (2.0 / self.white, -1.0)

    @property
    def is_grey(self) -> bool:
        """True if image files are read with one channel: as in training, else as the input."""
        return (self.stored_shape or self.input_shape)[0] == 1

    @property
    def trained_on(self) -> str:
        """Name of the training data for messages."""
        return self.source or "the training data"

    def __str__(self) -> str:
        """Return one line for people."""
        shape = (
            "images of any size"
            if self.stored_shape is None
            else f"samples {_times(self.stored_shape)}"
        )
        if self.kind == "table":
            parts = [f"{len(self.columns)} columns, standardised: {_shortened(self.columns)}"]
            if not self.rows.is_plain:
                parts.append(f"a sample is {self.rows}")
            if self.target:
                ahead = f", {self.horizon} rows ahead" if self.horizon else ""
                parts.append(f"target {self.target}{ahead}")
        else:
            parts = [f"{shape} of {self.stored_dtype}"]
            if self.mean:
                parts.append("standardised")
            elif self.has_pixels:
                parts.append(f"0 to {self.white} become -1 to 1")
            elif (self.scale, self.offset) != (1.0, 0.0):
                parts.append(f"v becomes {self.scale:g} v {self.offset:+g}")
            if self.stored_shape != self.input_shape:
                verb = "cropped" if self.fit == "crop" else "resized"
                verb = verb if self.kind == "image" and len(self.input_shape) == 3 else "flattened"
                parts.append(f"{verb} to {_times(self.input_shape)}")
        if self.classes is not None:
            parts.append(f"{len(self.classes)} classes: {_shortened(self.classes)}")
        return "; ".join(parts)

    @property
    def expected(self) -> str:
        """What a user may pass to the model, for messages about data of another kind."""
        shape = self.stored_shape or self.input_shape
        if self.kind == "table":
            return f"a .csv file with the columns {_shortened(self.columns)}"
        if self.kind == "vector":
            return f"a .npy or .npz file with rows of {math.prod(shape)} numbers"
        if self.has_pixels and shape[0] in (1, 3):
            return "a folder of images, an image, or a .npy or .npz file of images"
        return f"a .npy or .npz file of images {_times(shape)}"

    # Conversion.

    def adapter(self, shape: Shape, dtype: np.dtype[Any], *, white: int | None = None) -> Adapter:
        """Return what converts raw samples of this shape and type.

        Args:
            shape: of a raw sample, (C, H, W) or (F,).
            dtype: of the raw numbers.
            white: 8-bit value that becomes 1, if the raw samples have another one than the training
                data: 255 in image files.
        """
        scale, offset = self.scale, self.offset
        if self.has_pixels:
            scale, offset = 2.0 / (self.white if white is None else white), -1.0
            if self.is_converted(dtype):
                scale, offset = 1.0, 0.0
        moments = (self.mean, self.deviation) if self.kind == "vector" else ((), ())
        return Adapter(shape, self.input_shape, self.fit == "crop", scale, offset, *moments)

    def is_converted(self, dtype: np.dtype[Any]) -> bool:
        """Return True if numbers of this type are pixels from -1 to 1: floats of 8-bit pixels."""
        return self.is_8bit and dtype.kind not in "iu"

    def check(self, shape: Shape, dtype: np.dtype[Any], where: str, advice: str = "") -> None:
        """Raise `UserError` if raw samples of this shape and type are of another kind.

        Args:
            shape: of a raw sample.
            dtype: of the raw numbers.
            where: name of the raw data, for messages.
            advice: what to do about another shape; "" if the network is trained already.
        """
        stored = self.stored_shape if self.kind == "image" else None
        grey = stored is not None and self.is_grey
        if grey and len(shape) == 3 and shape[0] == 3:
            raise UserError(
                f"{where} has colours, but the network was trained on the grey images of "
                f"{self.trained_on}; convert them to grey"
            )
        if not self.has_pixels and self.kind != "table" and dtype == np.uint8:
            raise UserError(
                f"{where} has 8-bit pixels, but the network was trained on the {self.stored_dtype} "
                f"numbers of {self.trained_on}; convert them as those were converted"
            )
        if self.columns and shape not in (self.rows.stored_shape, self.input_shape):
            rows = "" if self.rows.is_plain else f", with {self.rows}"
            raise UserError(
                f"{where} has samples of shape {shape}, but the network was trained on "
                f"{len(self.columns)} columns: {', '.join(self.columns)}{rows}"
            )
        if dtype != np.uint8:
            self.check_size(shape, dtype, where)
        is_arranged = self.kind == "table" and not self.rows.is_plain
        self.adapter(self.input_shape if is_arranged else shape, dtype).check(where, advice)

    def check_size(self, shape: Shape, dtype: np.dtype[Any], where: str) -> None:
        """Raise `UserError` if arrays of images have another size than those of the training data.

        8-bit pixels are resized if the training data had images of any size.

        Args:
            shape: of a raw sample.
            dtype: of the raw numbers.
            where: name of the raw data, for messages.
        """
        stored = self.stored_shape
        if self.kind != "image" or len(shape) != 3 or (stored is None and dtype == np.uint8):
            return
        sizes = [known[1:] for known in (stored, self.input_shape) if known and len(known) == 3]
        if sizes and shape[1:] not in sizes:
            raise UserError(
                f"{where}: images of {_times(shape[1:])} pixels, but the network was trained on "
                f"{_times(sizes[0])} pixels of {self.trained_on}; crop or resize the images to "
                f"{_times(sizes[0])} first"
            )

    def check_values(
        self, x: NDArray[np.float32], names: Sequence[object] | NDArray[Any], where: str
    ) -> None:
        """Raise `UserError` if a converted sample is outside of the range seen in training.

        Args:
            x: float32 (n, ...), converted samples.
            names: identifies each sample in the message.
            where: name of the raw data, for messages.
        """
        largest = np.abs(x).max(axis=tuple(range(1, x.ndim)), initial=0.0)
        if not np.isfinite(largest).all():
            row = int(np.argmin(np.isfinite(largest)))
            column = int(np.argmin(np.isfinite(x[row].reshape(-1))))
            inner = f", the first in column {column}" if x.ndim == 2 else ""
            raise UserError(
                f"{where}: sample {names[row]} has values that are not finite{inner}; replace "
                "them, or leave out these samples or columns"
            )
        if self.has_pixels and largest.max(initial=0.0) > 1.0 + ROUNDING:
            name = names[int(largest.argmax())]
            floats = "floats from -1 to 1" if self.is_8bit else f"{self.stored_dtype} numbers"
            raise UserError(
                f"{where}: sample {name} has a converted pixel of magnitude {largest.max():.4g}; "
                f"the network was trained on pixels 0 to {self.white}; expected uint8 images with "
                f"these values, or {floats}"
            )

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of the predicted columns of a table."""
        return self.targets or (self.target,)

    @property
    def rows(self) -> RowLayout:
        """How rows of a table become samples."""
        return RowLayout(len(self.columns), self.lags, self.input_shape, self.positions)

    def standardise(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Return standardised numbers for rows of the input columns, (n, F) or (n, 1, L, F)."""
        # Numbers beyond float32 become infinite; the reader refuses them with the sample's number.
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = np.array(self.mean), np.array(self.deviation)
            return np.asarray((rows - mean) / deviation, dtype=np.float32)

    def apply(self, raw: ArrayLike | Mapping[str, ArrayLike]) -> NDArray[np.float32]:
        """Return the network's inputs for raw samples in memory.

        Args:
            raw: images (n, H, W), (n, H, W, C) or (n, C, H, W); rows (n, F); a single sample
                without the first axis if it has the shape of the training data; a sequence of
                images (arrays or PIL images) of different sizes, which are resized if they have
                8-bit pixels; arrays have the size of the training images; for tables also a mapping
                from column name to column, such as a dict of arrays or a pandas DataFrame. For a
                network with lags, n consecutive rows have n samples less the largest lag, and
                samples may be given as (n, L, F), too.

        Returns:
            float32 (n, C, H, W) or (n, F).

        Raises:
            UserError: the data does not match: its shape, colours, type, columns or range.
        """
        where = "the input"
        refuse_masked(raw, where)
        if self.kind == "table":
            array = self._samples_of(_rows_of(raw, self.columns, where), where)
            x = self.prepared_rows(array, where)
            self.check_values(x, range(len(x)), where)
            return x
        if isinstance(raw, Sequence) and not isinstance(raw, str):
            samples = [_array_of(sample) for sample in raw]
            if len({sample.shape for sample in samples}) > 1:
                return np.concatenate([self._convert(sample[None], where) for sample in samples])
            raw = np.stack(samples) if samples else np.zeros(0)
        array = _array_of(raw)
        if array.shape and self._is_single(array.shape):
            array = array[None]
        array = channels_first(array, where, self.stored_shape or self.input_shape)
        self.check_size(array.shape[1:], array.dtype, where)
        return self._convert(array, where)

    def prepared_rows(self, rows: Any, where: str) -> NDArray[np.float32]:
        """Return the network's inputs for rows of a table, or for samples of several rows.

        Args:
            rows: (n, F), or (n, 1, L, F) for a network with lags.
            where: name of the rows, for messages.
        """
        self.check(tuple(rows.shape[1:]), rows.dtype, where)
        return self.rows.arrange(self.standardise(rows[:]))

    def _convert(self, array: NDArray[Any], where: str) -> NDArray[np.float32]:
        """Return the network's inputs for images or vectors, with the samples first."""
        array = channels_first(array, where, self.stored_shape or self.input_shape)
        self.check(array.shape[1:], array.dtype, where)
        check_against_training(array, self, where)
        x = np.empty((len(array), *self.input_shape), np.float32)
        self.adapter(array.shape[1:], array.dtype)(array, x)
        self.check_values(x, range(len(x)), where)
        return x

    def _samples_of(self, rows: NDArray[np.float64], where: str) -> NDArray[np.float64]:
        """Return the samples of consecutive rows, or samples that the user has put together."""
        layout = self.rows
        if layout.lags and rows.ndim == 3:
            return rows[:, None]
        if layout.lags and rows.ndim == 2 and rows.shape[1] == layout.num_columns:
            if len(rows) <= layout.depth:
                raise UserError(
                    f"{where} has {len(rows)} rows; expected at least {layout.depth + 1}, because "
                    f"a sample is {layout}"
                )
            return layout.samples_of(rows)
        return rows

    def _is_single(self, shape: Shape) -> bool:
        """Return True if an array of this shape is one sample without the first axis."""
        stored = self.stored_shape or self.input_shape
        if len(stored) == 1:
            return shape == stored
        channels, height, width = stored
        single = [stored, (height, width, channels), *([(height, width)] if channels == 1 else [])]
        # (28, 28) can be nothing else than one grey image: the network takes no rows.
        return shape in single and (len(shape) > 2 or len(self.input_shape) == 3)

    # Classes.

    def class_list(self, network: Network) -> Classes | None:
        """Return the classes of a network that was trained with this preprocessing.

        Returns:
            None if the network predicts values, or several labels for each sample.
        """
        return Classes.of(network.loss.targets, network.num_outputs, self.classes)

    def output_names(self, network: Network) -> tuple[str, ...]:
        """Return a name for each output of a network that was trained with this preprocessing."""
        count, classes = network.num_outputs, self.class_list(network)
        if len(self.targets) == count:
            return self.targets
        if classes is not None and network.loss.targets == "classes":
            return classes.names
        kind = "value" if network.loss.targets == "values" else "label"
        if count == 1:
            return (self.target or kind,)
        return tuple(f"{kind}_{index}" for index in range(count))

    def to_values(self, predictions: NDArray[Any]) -> NDArray[Any]:
        """Return predicted numbers in the unit of the targets' data."""
        if not self.has_target_unit:
            return predictions
        values: NDArray[Any] = predictions * np.array(self.target_scale) + self.target_offset
        return values

    def to_targets(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return targets as a network predicts them, for numbers in the unit of their data."""
        if not self.has_target_unit or np.size(self.target_scale) not in (1, *values.shape[1:]):
            return values
        targets: NDArray[Any] = (values - np.array(self.target_offset)) / self.target_scale
        return targets

    @property
    def has_target_unit(self) -> bool:
        """True if targets are converted to predict them."""
        return (self.target_scale, self.target_offset) != (1.0, 0.0)


def _array_of(raw: Any) -> NDArray[Any]:
    return pixels_of(raw) if is_pillow_image(raw) else np.asarray(raw)


def _rows_of(raw: Any, columns: Sequence[str], where: str) -> NDArray[np.float64]:
    """Return the input columns of a table, float64 (n, F)."""
    try:
        if hasattr(raw, "keys"):
            known = {same_form(str(name)): name for name in raw}
            for name in columns:
                if name not in known:
                    raise UserError(f"{where} has no column '{name}'" + suggest(name, known))
            parts: Iterable[Any] = (
                np.asarray(raw[known[name]], np.float64).reshape(-1) for name in columns
            )
            return np.stack(list(parts), axis=1)
        array = np.asarray(raw, np.float64)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} is no table of numbers ({error})") from None
    return array[None] if array.shape == (len(columns),) else array


def _times(shape: Shape) -> str:
    return "×".join(map(str, shape))


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], "…"])


def _checked(name: str, value: Any, where: str) -> Any:
    """Return a field's value from JSON; raise `UserError` if it cannot be one."""
    choices = {"kind": KINDS, "fit": FITS}.get(name)
    if name in ("input_shape", "stored_shape"):
        if name == "stored_shape" and value is None:
            return None
        fine = _is_list(value, int) and len(value) in (1, 3) and min(value) > 0
    elif name in ("mean", "deviation", "positions"):
        fine = _is_list(value, (int, float)) and all(map(math.isfinite, value))
        fine = fine and (name != "deviation" or all(number > 0 for number in value))
    elif name == "lags":
        fine = _is_list(value, int) and list(value) == sorted(set(value), reverse=True)
        fine = fine and min(value, default=0) >= 0
    elif name in ("columns", "classes", "targets"):
        if name == "classes" and value is None:
            return None
        fine = _is_list(value, str)
    elif name in ("white", "horizon"):
        fine = _is(value, int) and value >= (name == "white")
    elif name in ("target_scale", "target_offset") and isinstance(value, list | tuple):
        fine = _is_list(value, (int, float)) and all(map(math.isfinite, value))
    elif name in ("scale", "offset", "target_scale", "target_offset", "magnitude"):
        fine = _is(value, (int, float)) and math.isfinite(value)
    else:
        fine = isinstance(value, str) and (choices is None or value in choices)
    if not fine:
        expected = f"; expected {' or '.join(choices)}" if choices else ""
        raise UserError(f"{where} has {name} = {str(value)[:80]!r}, which is not valid{expected}")
    if name in ("columns", "classes", "target", "targets"):
        return same_form(value) if isinstance(value, str) else tuple(map(same_form, value))
    return tuple(value) if isinstance(value, list | tuple) else value


def _is(value: Any, types: type | tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _is_list(value: Any, types: type | tuple[type, ...]) -> bool:
    return isinstance(value, list | tuple) and all(_is(item, types) for item in value)
