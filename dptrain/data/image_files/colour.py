"""Whether image files have colours, by the rules of the decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dptrain.data.image_files.decoder import GREY_MODES, open_image
from dptrain.data.image_files.decoder_warnings import collected_warnings
from dptrain.data.image_files.tar_members import ImageFile

_DEEP_MODES = ("I", "F")
"""Pillow's modes of grey images that the decoder refuses, and the beginning of their names."""


def any_has_colour(paths: Sequence[ImageFile]) -> bool:
    """Return True if one of the images has colours.

    Files are opened until one has, in an order in which neighbours are far apart.
    """
    # Multiples of an irrational number, modulo 1, are spread evenly.
    order = np.argsort((np.arange(len(paths)) * 0.6180339887498949) % 1.0, kind="stable")
    return any(has_colour(paths[index]) for index in order)


def has_colour(path: ImageFile) -> bool:
    """Return True if an image has channels of colours, or a palette with a colour.

    A file that cannot be read has none; an error names it when its pixels are read.
    """
    try:
        with path.open("rb") as stream, collected_warnings(), open_image(stream) as image:
            if image.mode.startswith("P"):
                colours = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
                return bool((colours != colours[:, :1]).any())
            return image.mode not in GREY_MODES and not image.mode.startswith(_DEEP_MODES)
    except Exception:  # Decoders of damaged files raise nearly any exception.
        return False
