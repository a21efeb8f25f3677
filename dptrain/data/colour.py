"""Whether image files have colours, from their headers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

GREY_MODES = ("1", "L", "LA", "La", "I", "F")
"""Pillow's modes of files without colours; ``I`` stands for modes such as ``I;16``, too."""


def has_colour(paths: Sequence[Path]) -> bool:
    """Return True if one of the images has colours.

    Headers are read until one has colours, in an order in which neighbours are far apart. Files
    that cannot be read do not count: an error names them when their pixels are read.
    """
    from PIL import Image

    # Multiples of an irrational number, modulo 1, are spread evenly.
    order = np.argsort((np.arange(len(paths)) * 0.6180339887498949) % 1.0, kind="stable")
    for index in order:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(paths[index]) as image:
                    mode = image.mode
        except Exception:  # Decoders raise errors of many kinds.
            continue
        if mode.partition(";")[0] not in GREY_MODES:
            return True
    return False
