"""The depth of image files by their own headers: Pillow's mode is that after decoding."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

HEAD_BYTES = 1 << 16
"""Bytes from the beginning of a file that contain its header."""
_RAW_MODE = re.compile("(?:L|LA|RGB|RGBA|RGBX);(2|4|16)")
"""Pillow's name of pixels in a file with their depth."""
_UNSIGNED = (1, 4)
"""Formats of a TIFF file's samples: unsigned integers, and undefined."""
_PNM = re.compile(rb"P([1-6])(?:\s|#[^\n]*\n)+\d+(?:\s|#[^\n]*\n)+\d+(?:\s|#[^\n]*\n)+(\d+)")


def channel_bits(head: bytes, image: Image) -> int:
    """Return the bits of the deepest channel of an image file, or of an index of a palette.

    Args:
        head: the first `HEAD_BYTES` of the file.
        image: the file, opened but not decoded.

    Raises:
        ValueError: the header has no depth, or numbers that are no unsigned integers.
    """
    if image.format == "PNG":
        return head[head.index(b"IHDR") + 12]
    if image.format == "TIFF":
        return _tiff_bits(image)
    if image.format == "PPM":
        return _pnm_bits(head)
    if image.format == "AVIF":
        return _avif_bits(head)
    return 8


def opened_bits(image: Image) -> int:
    """Return the bits of the deepest channel of an image that was opened by other code.

    Only an image that is not decoded yet has its depth; of others, 8 is assumed.
    """
    for _, _, _, arguments in getattr(image, "tile", ()):
        values = arguments if isinstance(arguments, tuple) else (arguments,)
        if image.format == "PPM" and isinstance(values[-1], int):
            return values[-1].bit_length()
        if image.format in ("PNG", "TIFF") and (found := _RAW_MODE.match(str(values[0]))):
            return int(found[1])
    return 8


def _tiff_bits(image: Image) -> int:
    tags = image.tag_v2  # type: ignore[attr-defined]
    formats = tags.get(339, (1,))
    for sample in formats if isinstance(formats, tuple) else (formats,):
        if sample not in _UNSIGNED:
            raise ValueError("signed or floating-point numbers, expected 8-bit pixels")
    bits = tags.get(258, (1,))
    return max(bits) if isinstance(bits, tuple) else int(bits)


def _pnm_bits(head: bytes) -> int:
    if head[:2] in (b"P1", b"P4"):
        return 1
    found = _PNM.match(head)
    if found is None:
        raise ValueError("its header has no largest value")
    return int(found[2]).bit_length() if len(found[2]) < 10 else 32


def _avif_bits(head: bytes) -> int:
    """Return the bits that the configurations of the AV1 streams state, 8, 10 or 12."""
    deepest = 8
    for found in re.finditer(rb"av1C.{2}(.)", head, re.DOTALL):
        flags = found[1][0]
        if flags & 0x40:
            deepest = max(deepest, 12 if flags & 0x20 else 10)
    return deepest
