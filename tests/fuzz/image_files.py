"""Image files of many formats and modes, with the pixels that a reader must find in them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Random = np.random.Generator
Pixels = NDArray[np.float64]


@dataclass(frozen=True)
class Written:
    """An image file.

    Attributes:
        suffix: of its name.
        pixels: float64 (H, W, 3), 0 to 255, upright; None if no rule determines them.
        tolerance: levels by which they may differ.
        may_be_refused: True if a line instead of the pixels is right, too.
        must_be_refused: True if no pixels are right.
    """

    suffix: str
    pixels: Pixels | None
    tolerance: float = 0.6
    may_be_refused: bool = False
    must_be_refused: bool = False


def write_image(random: Random, path: Path, *, plain: bool) -> Written:
    """Write a random image.

    Args:
        random: numbers.
        path: without suffix; the content does not depend on it.
        plain: use only formats whose pixels are known exactly, or nearly.
    """
    writers = PLAIN if plain or random.random() < 0.5 else ODD
    return writers[int(random.integers(len(writers)))](random, path)


def _noise(random: Random, *channels: int) -> NDArray[np.uint8]:
    height, width = (int(random.integers(1, 15)) for _ in range(2))
    return random.integers(0, 256, (height, width, *channels), dtype=np.uint8)


def _smooth(random: Random, *channels: int) -> NDArray[np.uint8]:
    """Return a gradient, which lossy formats keep."""
    height, width = (int(random.integers(6, 15)) for _ in range(2))
    start = random.uniform(30, 220, channels)
    down, across = (random.uniform(-1.5, 1.5, channels) for _ in range(2))
    rows, columns = np.arange(height), np.arange(width)
    grid = np.multiply.outer(rows, down)[:, None] + np.multiply.outer(columns, across)[None]
    return np.clip(start + grid, 0, 255).round().astype(np.uint8)


def _grey(values: NDArray[Any]) -> Pixels:
    return np.repeat(values.astype(np.float64)[..., None], 3, axis=2)


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return stored pixels as a viewer shows them, by the meaning of the EXIF tag."""
    turned = pixels.swapaxes(0, 1) if orientation >= 5 else pixels
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return turned[::rows, ::columns].copy()


def _save(
    path: Path, suffix: str, image: Image.Image, pixels: Pixels | None, tolerance: float = 0.6,
    *, may_be_refused: bool = False, **options: Any,
) -> Written:  # fmt: skip
    image.save(path, **options)
    return Written(suffix, pixels, tolerance, may_be_refused)


def _oriented(random: Random) -> tuple[int, dict[str, Any]]:
    """Return a value of the tag, and the options that write it."""
    if random.random() < 0.5:
        return 1, {}
    orientation, exif = int(random.integers(1, 9)), Image.Exif()
    exif[0x112] = orientation
    return orientation, {"exif": exif.tobytes()}


def _lossless(random: Random, path: Path) -> Written:
    array = _noise(random, 3)
    orientation, exif = _oriented(random)
    form, suffix, options = (
        ("PNG", ".png", exif), ("PNG", ".PNG", {"compress_level": 0, **exif}),
        ("BMP", ".bmp", {}), ("PPM", ".ppm", {}), ("PPM", ".pnm", {}),
        ("TIFF", ".tif", exif), ("TIFF", ".TIFF", {"compression": "tiff_lzw", **exif}),
        ("TIFF", ".tiff", {"compression": "tiff_deflate"}),
        ("WEBP", ".webp", {"lossless": True, **exif}),
    )[int(random.integers(9))]  # fmt: skip
    pixels = upright(array.astype(np.float64), orientation if "exif" in options else 1)
    return _save(path, suffix, Image.fromarray(array), pixels, format=form, **options)


def _lossless_grey(random: Random, path: Path) -> Written:
    array = _noise(random)
    form, suffix = (("PNG", ".png"), ("BMP", ".bmp"), ("PPM", ".pgm"), ("TIFF", ".tif"),
                    ("GIF", ".gif"))[int(random.integers(5))]  # fmt: skip
    return _save(path, suffix, Image.fromarray(array), _grey(array), format=form)


def _bilevel(random: Random, path: Path) -> Written:
    array = _noise(random) > 127
    form, suffix = (("PNG", ".png"), ("TIFF", ".tif"), ("BMP", ".bmp"), ("PPM", ".pbm"),
                    ("GIF", ".gif"))[int(random.integers(5))]  # fmt: skip
    return _save(path, suffix, Image.fromarray(array), _grey(array * 255), format=form)


def _palette(random: Random, path: Path) -> Written:
    array, colours = _noise(random) % 16, random.integers(0, 256, (16, 3), dtype=np.uint8)
    image = Image.fromarray(array)
    image.putpalette(colours.tobytes())
    form, suffix = (("PNG", ".png"), ("GIF", ".GIF"), ("BMP", ".bmp"), ("TIFF", ".tif"))[
        int(random.integers(4))
    ]
    return _save(path, suffix, image, colours[array].astype(np.float64), format=form)


def _jpeg(random: Random, path: Path) -> Written:
    array = _smooth(random, 3) if random.random() < 0.7 else _smooth(random)
    orientation, exif = _oriented(random)
    pixels = upright(_grey(array) if array.ndim == 2 else array.astype(np.float64), orientation)
    suffix = (".jpg", ".jpeg", ".JPG", ".jfif", ".jpe")[int(random.integers(5))]
    options = {"progressive": bool(random.random() < 0.3), **exif}
    return _save(
        path, suffix, Image.fromarray(array), pixels, 4.0, format="JPEG", quality=100,
        subsampling=0, **options,
    )  # fmt: skip


def _lossy(random: Random, path: Path) -> Written:
    array = _smooth(random, 3)
    form, suffix, options = (
        ("WEBP", ".webp", {"quality": 100}),
        ("AVIF", ".avif", {"quality": 100, "subsampling": "4:4:4"}),
    )[int(random.integers(2))]
    pixels = array.astype(np.float64)
    return _save(path, suffix, Image.fromarray(array), pixels, 12.0, format=form, **options)


def _opaque(random: Random, path: Path) -> Written:
    """An alpha channel that hides nothing."""
    array = _noise(random, 3)
    full = np.concatenate([array, np.full((*array.shape[:2], 1), 255, np.uint8)], axis=2)
    form, suffix, options = (
        ("PNG", ".png", {}), ("TIFF", ".tiff", {}), ("WEBP", ".webp", {"lossless": True}),
    )[int(random.integers(3))]  # fmt: skip
    pixels = array.astype(np.float64)
    return _save(path, suffix, Image.fromarray(full), pixels, format=form, **options)


def _small_depth(random: Random, path: Path) -> Written:
    """A grey PNG of 1, 2 or 4 bits, which Pillow does not write."""
    bits = (1, 2, 4)[int(random.integers(3))]
    values = _noise(random) % (1 << bits)
    _write_png(path, values[..., None], bits, 0)
    return Written(".png", _grey(values * (255.0 / ((1 << bits) - 1))))


def _netpbm(random: Random, path: Path) -> Written:
    """A Netpbm file with any largest value, as text or as bytes."""
    largest = int(random.choice((1, 15, 100, 254, 255)))
    colour, is_text = bool(random.random() < 0.5), bool(random.random() < 0.4)
    values = np.minimum(_noise(random, *([3] if colour else [])), largest)
    kind = (2 if is_text else 5) + colour
    height, width = values.shape[:2]
    comment = "# by hand\n" if random.random() < 0.3 else ""
    start = f"P{kind}\n{comment}{width} {height}\n{largest}\n".encode()
    body = " ".join(map(str, values.ravel())).encode() if is_text else values.tobytes()
    path.write_bytes(start + body + b"\n" * is_text)
    scaled = values * (255.0 / largest)
    return Written(".ppm" if colour else ".pgm", scaled if colour else _grey(scaled), 1.1)


def _on_white(colours: NDArray[Any], opacity: NDArray[Any]) -> Pixels:
    """Return colours (H, W, 3) with an opacity (H, W) of 0 to 255 on white."""
    weight = opacity.astype(np.float64)[..., None] / 255.0
    return np.asarray(colours * weight + 255.0 * (1.0 - weight))


def _transparent(random: Random, path: Path) -> Written:
    """Alpha channels and transparent colours, which are put on white."""
    choice = int(random.integers(4))
    if choice == 0:
        array = _noise(random, 4)
        pixels = _on_white(array[..., :3], array[..., 3])
        form, suffix, options = (
            ("PNG", ".png", {}), ("TIFF", ".tif", {}),
            ("WEBP", ".webp", {"lossless": True, "exact": True}),
        )[int(random.integers(3))]  # fmt: skip
        return _save(path, suffix, Image.fromarray(array), pixels, 1.1, format=form, **options)
    if choice == 1:
        array = _noise(random, 2)
        pixels = _on_white(_grey(array[..., 0]), array[..., 1])
        return _save(path, ".png", Image.fromarray(array, "LA"), pixels, 1.1, format="PNG")
    if choice == 2:
        array, marked = _noise(random, 3), random.integers(0, 256, 3, dtype=np.uint8)
        array[random.random(array.shape[:2]) < 0.3] = marked
        _write_png(path, array, 8, 2, (b"tRNS", marked.astype(">u2").tobytes()))
        opacity = np.where((array == marked).all(axis=2), 0, 255)
        return Written(".png", _on_white(array, opacity), 1.1)
    array, colours = _noise(random) % 8, random.integers(0, 256, (8, 3), dtype=np.uint8)
    image = Image.fromarray(array)
    image.putpalette(colours.tobytes())
    opacity = random.integers(0, 256, 8, dtype=np.uint8)
    transparency: bytes | int = opacity.tobytes()
    if random.random() < 0.5:
        opacity, transparency = np.where(np.arange(8) == 3, 0, 255), 3
    pixels = _on_white(colours[array], opacity[array])
    return _save(path, ".png", image, pixels, 1.1, format="PNG", transparency=transparency)


def _deep(random: Random, path: Path) -> Written:
    """More than 8 bits a channel, which are refused."""
    choice, largest = int(random.integers(6)), int(random.choice((255, 1023, 4095, 65535)))
    if choice < 3:
        kind, channels = ((0, 1), (2, 3), (6, 4))[choice]
        shape = (*_noise(random).shape, channels)
        values = random.integers(0, largest + 1, shape).astype(np.uint16)
        _write_png(path, values, 16, kind)
        return Written(".png", None, must_be_refused=True)
    if choice == 3:
        shape = (*_noise(random).shape, 3)
        values = random.integers(0, largest + 1, shape).astype(">u2")
        start = f"P6\n{shape[1]} {shape[0]}\n{max(largest, 256)}\n".encode()
        path.write_bytes(start + np.minimum(values, max(largest, 256)).astype(">u2").tobytes())
        return Written(".ppm", None, must_be_refused=True)
    array = random.integers(0, largest + 1, _noise(random).shape)
    image = Image.fromarray(array.astype((np.uint16, np.float32)[choice - 4]))
    image.save(path, format="TIFF")
    return Written(".tif", None, must_be_refused=True)


def _print_colours(random: Random, path: Path) -> Written:
    """CMYK, whose colour profile is ignored, and LAB."""
    choice = int(random.integers(3))
    if choice == 2:
        image = Image.frombytes("LAB", (5, 4), random.bytes(60))
        return _save(path, ".tif", image, None, format="TIFF", may_be_refused=True)
    array = _smooth(random, 4)
    pixels = (255.0 - array[..., :3]) * (255.0 - array[..., 3:]) / 255.0
    form, suffix, options, tolerance = (
        ("JPEG", ".jpg", {"quality": 100, "subsampling": 0}, 6.0), ("TIFF", ".tif", {}, 1.6),
    )[choice]  # fmt: skip
    image = Image.fromarray(array, "CMYK")
    return _save(path, suffix, image, pixels, tolerance, format=form, **options)


def _animated(random: Random, path: Path) -> Written:
    """Several frames or pages, of which the first one is read."""
    first = _noise(random) // 16 * 16
    frames = [Image.fromarray(np.roll(first, i + 1, 0) // 2) for i in range(2)]
    form, suffix = (("GIF", ".gif"), ("TIFF", ".tif"), ("PNG", ".png"))[int(random.integers(3))]
    return _save(
        path, suffix, Image.fromarray(first), _grey(first), format=form, save_all=True,
        append_images=frames,
    )  # fmt: skip


def _bad_exif(random: Random, path: Path) -> Written:
    """A valid orientation next to a tag that no writer accepts."""
    array, orientation = _smooth(random, 3), int(random.integers(1, 9))
    tag = int(random.choice((0x11A, 0x8769, 0x8825, 0x132, 0x9286, 0x10F, 0xA005)))
    kind, length = int(random.integers(0, 16)), int(random.choice((0, 1, 2, 1000, 2**31)))
    block = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 2)
    block += struct.pack(">HHIHH", 0x112, 3, 1, orientation, 0)
    block += struct.pack(">HHI", tag, kind, length) + random.bytes(4) + struct.pack(">I", 0)
    block += random.bytes(int(random.integers(0, 20)))
    form, suffix = (("JPEG", ".jpg"), ("PNG", ".png"), ("WEBP", ".webp"))[int(random.integers(3))]
    options = {"quality": 100, "subsampling": 0} if form == "JPEG" else {"lossless": True}
    pixels = upright(array.astype(np.float64), orientation)
    return _save(path, suffix, Image.fromarray(array), pixels, 4.0, format=form, exif=block,
                 may_be_refused=True, **options)  # fmt: skip


def _write_png(
    path: Path, values: NDArray[Any], bits: int, kind: int, extra: tuple[bytes, bytes] | None = None
) -> None:
    """Write (H, W, channels) as a PNG of any depth and colour type."""
    height, width = values.shape[:2]
    if bits == 16:
        rows = [row.astype(">u2").tobytes() for row in values]
    elif bits == 8:
        rows = [row.tobytes() for row in values]
    else:
        digits = values.reshape(height, -1)[..., None] >> np.arange(bits - 1, -1, -1) & 1
        rows = [np.packbits(row.astype(np.uint8)).tobytes() for row in digits.reshape(height, -1)]
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = [(b"IHDR", header), *([extra] if extra else []), (b"IDAT", data), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks:
        content += struct.pack(">I", len(body)) + name + body
        content += struct.pack(">I", zlib.crc32(name + body))
    path.write_bytes(content)


Writer = Callable[[Random, Path], Written]
PLAIN: tuple[Writer, ...] = (
    _lossless, _lossless, _lossless_grey, _bilevel, _palette, _jpeg, _jpeg, _lossy, _opaque,
    _small_depth, _netpbm,
)  # fmt: skip
"""Formats whose pixels are certain."""
ODD: tuple[Writer, ...] = (_transparent, _deep, _print_colours, _animated, _bad_exif)
"""Formats that a rule converts or refuses."""
