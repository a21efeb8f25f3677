"""Conversion of raw samples to inputs as a few steps, which other programs can compute too.

The steps and their order are those of `Preprocessing.apply`. A step that is None is omitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.network.layers import Shape

Size = tuple[int, int]


@dataclass(frozen=True)
class RawInputs:
    """The form of raw samples, and the steps that convert them to inputs of the network.

    Attributes:
        shape: of a raw sample, (C, H, W) or (F,); H and W are None if images have any size.
        dtype: NumPy name of the type of the raw numbers, in native byte order.
        mean, deviation: of the columns of a table, in float64; () for other data.
        crop: height and width of the centre that is cut out.
        becomes_grey: True if colours become grey by luma.
        resize: height and width to which images are resized.
        scale, offset: a number v becomes v · scale + offset, in float32.
        transposes: True if the columns of a table, the last axis, become channels.
        positions: of sensors, the last axis, that are interpolated to maps; see
            `dptrain.data.preprocessing.sensor_maps.interpolation_weights`. () if there are none.
        shape_of_inputs: (C, H, W) or (F,), to which one channel is repeated, or maps are flattened.
    """

    shape: tuple[int | None, ...]
    dtype: str
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    crop: Size | None
    becomes_grey: bool
    resize: Size | None
    scale: float
    offset: float
    transposes: bool
    positions: tuple[float, ...]
    shape_of_inputs: Shape

    @classmethod
    def of(cls, preprocessing: Preprocessing) -> RawInputs:
        """Return the steps of a model's preprocessing."""
        target = preprocessing.input_shape
        shape: tuple[int | None, ...] | None = preprocessing.stored_shape
        if shape is None:
            shape = (1 if preprocessing.is_grey else 3, None, None)
        dtype = np.dtype(preprocessing.stored_dtype)
        is_table = preprocessing.kind == "table"
        are_maps = len(target) == len(shape) == 3 and not is_table
        size = (target[1], target[2]) if are_maps and shape[1:] != target[1:] else None
        scale, offset = preprocessing.scale, preprocessing.offset
        if preprocessing.is_8bit:
            scale, offset = 2.0 / preprocessing.white, -1.0
        return cls(
            shape=shape,
            dtype=dtype.newbyteorder("=").name,
            mean=preprocessing.mean,
            deviation=preprocessing.deviation,
            crop=size if preprocessing.fit == "crop" else None,
            becomes_grey=are_maps and (shape[0], target[0]) == (3, 1),
            resize=size if preprocessing.fit == "resize" else None,
            scale=scale,
            offset=offset,
            transposes=is_table and preprocessing.rows.transposes,
            positions=preprocessing.positions,
            shape_of_inputs=target,
        )

    @property
    def repeats_channels(self) -> bool:
        """True if the only channel of the images becomes several equal ones."""
        target = self.shape_of_inputs
        is_grey = self.shape[0] == 1 and not (self.transposes or self.positions)
        return is_grey and len(target) == 3 and target[0] > 1

    @property
    def flattens(self) -> bool:
        """True if maps become vectors."""
        return len(self.shape) == 3 and len(self.shape_of_inputs) == 1
