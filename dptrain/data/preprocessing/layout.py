"""The order of axes in which images are stored in arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.image_files.decoder import is_pillow_image, pixels_of
from dptrain.errors import UserError
from dptrain.network.layers import Shape

IMAGE_CHANNELS = (1, 3)
MORE_CHANNELS = (2, 4)
"""Grey or colour with opacity, which is a channel like any other."""


def channels_first(x: NDArray[Any], where: str, expected: Shape = ()) -> NDArray[Any]:
    """Return samples as (n, C, H, W) or (n, F); images may be stored with channels last.

    Args:
        x: (n, C, H, W), (n, H, W, C), (n, H, W) or (n, F).
        where: name of the data, for messages.
        expected: (C, H, W) that the samples probably have. It decides if both orders are possible.

    Raises:
        UserError: the array does not contain numbers, or has another number of axes.
    """
    if x.dtype.kind not in "biuf":
        raise UserError(f"{where}: inputs are of type {x.dtype}; expected numbers")
    if x.ndim not in (2, 3, 4) or not x.size:
        raise UserError(
            f"{where}: inputs have shape {x.shape}; expected (n, C, H, W), (n, H, W, C), "
            "(n, H, W) or (n, F), and at least one"
        )
    if x.ndim == 3:
        channel: NDArray[Any] = x[:, None]
        return channel
    if x.ndim == 4 and _is_channels_last(x.shape[1:], expected):
        last: NDArray[Any] = x.transpose(0, 3, 1, 2)
        return last
    return x


def _is_channels_last(shape: Shape, expected: Shape) -> bool:
    first, last = shape, (shape[2], shape[0], shape[1])
    if len(expected) == 3 and (first == expected) != (last == expected):
        return last == expected
    if (first[0] in IMAGE_CHANNELS) != (last[0] in IMAGE_CHANNELS):
        return last[0] in IMAGE_CHANNELS
    if len(expected) == 3 and (first[0] == expected[0]) != (last[0] == expected[0]):
        return last[0] == expected[0]
    return last[0] in MORE_CHANNELS and first[0] > max(MORE_CHANNELS)


def refuse_masked(x: Any, where: str) -> None:
    """Raise `UserError` if values of an array are masked, which NumPy converts without the mask."""
    if np.ma.is_masked(x):
        count = int(np.ma.getmaskarray(x).sum())
        raise UserError(
            f"{where} is a masked array with {count:,} masked values; replace them with "
            "filled(VALUE), or leave out their samples or columns"
        )


def as_numbers(x: Any, where: str) -> NDArray[Any]:
    """Return an array of numbers from an object that NumPy understands."""
    refuse_masked(x, where)
    try:
        array: NDArray[Any] = pixels_of(x) if is_pillow_image(x) else np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where} cannot be converted to an array ({error})") from None
    if array.dtype.kind not in "biuf":
        raise UserError(f"{where} is of type {array.dtype}; expected numbers")
    return array
