"""Writers of image files that Pillow cannot write, and random images with their right pixels."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

Array = np.ndarray
ORIENTATIONS = {
    1: lambda x: x,
    2: lambda x: np.flip(x, 1),
    3: lambda x: np.rot90(x, 2),
    4: lambda x: np.flip(x, 0),
    5: lambda x: np.rot90(np.flip(x, 1)),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(np.flip(x, 1), -1),
    8: lambda x: np.rot90(x),
}
"""What turns stored pixels upright for each value of the EXIF tag."""


def exif_block(orientation: int, bad: str = "") -> bytes:
    """Return EXIF data, perhaps with a tag that Pillow cannot write again, or with damage."""
    entries = [struct.pack(">HHIHH", 0x112, 3, 1, orientation, 0)]
    if bad == "rational":
        entries.append(struct.pack(">HHII", 0x11A, 10, 1, 38))
    if bad == "gps":
        entries.append(struct.pack(">HHII", 0x8825, 4, 1, 1 << 30))
    data = b"MM\0*" + struct.pack(">IH", 8, len(entries)) + b"".join(entries) + bytes(4)
    data = data.ljust(38, b"\0") + struct.pack(">ii", -1, 0)
    return b"Exif\0\0" + (b"damaged" if bad == "damaged" else data)


def png(array: Array, bits: int = 8, transparent: Any = None, exif: bytes = b"") -> bytes:
    """Return a PNG of (H, W, channels): grey, grey with alpha, colour, colour with alpha."""
    height, width, channels = array.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    if bits == 16:
        rows = [row.astype(">u2").tobytes() for row in array]
    elif bits == 8:
        rows = [row.astype(np.uint8).tobytes() for row in array]
    else:
        spread = (array.reshape(height, -1, 1) >> np.arange(bits - 1, -1, -1)) & 1
        rows = [np.packbits(row.astype(np.uint8)).tobytes() for row in spread.reshape(height, -1)]
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))]
    if transparent is not None:
        chunks.append((b"tRNS", b"".join(struct.pack(">H", v) for v in np.ravel(transparent))))
    if exif:
        chunks.append((b"eXIf", exif.removeprefix(b"Exif\0\0")))
    chunks.append((b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))))
    chunks.append((b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def tiff(array: Array, sample_format: int = 1) -> bytes:
    """Return an uncompressed TIFF of (H, W, channels), of any type of numbers."""
    height, width, channels = array.shape
    data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    bits = 8 * array.dtype.itemsize
    extra, start = b"", 8 + len(data)

    def pointed(values: list[int]) -> bytes:
        nonlocal extra
        packed = struct.pack(f"<{len(values)}H", *values)
        if len(packed) <= 4:
            return packed.ljust(4, b"\0")
        place = struct.pack("<I", start + len(extra))
        extra += packed
        return place

    entries = [
        (256, 3, 1, struct.pack("<HH", width, 0)), (257, 3, 1, struct.pack("<HH", height, 0)),
        (258, 3, channels, pointed([bits] * channels)), (259, 3, 1, struct.pack("<HH", 1, 0)),
        (262, 3, 1, struct.pack("<HH", 1 if channels == 1 else 2, 0)),
        (273, 4, 1, struct.pack("<I", 8)), (277, 3, 1, struct.pack("<HH", channels, 0)),
        (278, 3, 1, struct.pack("<HH", height, 0)), (279, 4, 1, struct.pack("<I", len(data))),
        (339, 3, channels, pointed([sample_format] * channels)),
    ]  # fmt: skip
    table = struct.pack("<H", len(entries))
    table += b"".join(struct.pack("<HHI", *entry[:3]) + entry[3] for entry in entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", start + len(extra)) + data + extra + table


def pnm(array: Array, largest: int) -> bytes:
    """Return a binary PGM or PPM of (H, W, 1 or 3) with comments in its header."""
    height, width, channels = array.shape
    kind = b"P5" if channels == 1 else b"P6"
    head = kind + f"\n# made by hand\n{width} {height}\n#\n{largest}\n".encode()
    return head + array.astype(">u2" if largest > 255 else "u1").tobytes()


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@dataclass(frozen=True)
class Case:
    """A file.

    Attributes:
        name: what it is.
        content: of the file.
        colours: uint8 (H, W, 3), the right pixels; None if the file must be refused.
        rules: that must be reported.
    """

    name: str
    content: bytes
    colours: Array | None
    rules: frozenset[str] = frozenset()


def on_white(colours: Array, alpha: Array) -> Array:
    share = alpha[..., None].astype(np.float64) / 255
    return np.floor(colours * share + 255 * (1 - share) + 0.5).astype(np.uint8)


def luma(colours: Array) -> Array:
    """Return grey by ITU-R BT.601 in the fixed-point numbers that Pillow documents."""
    weighted = colours.astype(np.int64) @ np.array([19595, 38470, 7471]) + 0x8000
    return (weighted >> 16).astype(np.uint8)


def random_case(rng: np.random.Generator) -> Case:
    """Return a random file and what must be read from it."""
    makers = (
        plain, plain, with_alpha, few_bits, marked_grey, marked_colour, palette, palette_alpha,
        two_frames, cmyk, jpeg, deep_png, deep_tiff, odd_numbers, deep_pnm, small_pnm,
    )  # fmt: skip
    return makers[rng.integers(len(makers))](rng)


def _pixels(rng: np.random.Generator, channels: int, most: int = 255) -> Array:
    height, width = rng.integers(1, 12, 2)
    return rng.integers(0, most + 1, (height, width, channels), dtype=np.uint16)


def _colours(array: Array) -> Array:
    return np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array


def plain(rng: np.random.Generator) -> Case:
    array = _pixels(rng, int(rng.choice([1, 3]))).astype(np.uint8)
    kind = str(rng.choice(["PNG", "BMP", "TIFF", "PPM", "WEBP"]))
    orientation = int(rng.integers(1, 9)) if kind in ("PNG", "TIFF", "WEBP") else 1
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    bad = str(rng.choice(["", "rational", "gps"])) if kind != "TIFF" else ""
    if orientation > 1 and kind == "TIFF":
        options["tiffinfo"] = {0x112: orientation}
    elif orientation > 1:
        options["exif"] = exif_block(orientation, bad)
    image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    colours = ORIENTATIONS[orientation](_colours(array))
    rules = {"turned upright"} if orientation > 1 else set()
    return Case(
        f"{kind} {orientation} {bad}", saved(image, kind, **options), colours, frozenset(rules)
    )


def with_alpha(rng: np.random.Generator) -> Case:
    kind = str(rng.choice(["PNG", "TIFF", "WEBP", "LA", "opaque"]))
    array = _pixels(rng, 2 if kind == "LA" else 4).astype(np.uint8)
    array[0, 0, -1] = 7
    if kind == "opaque":
        array[..., -1] = 255
    if kind in ("PNG", "LA", "opaque"):
        content = png(array)
    else:
        options: dict[str, Any] = {"lossless": True, "exact": True} if kind == "WEBP" else {}
        content = saved(Image.fromarray(array), kind, **options)
    colours = on_white(_colours(array[..., :-1]), array[..., -1])
    return Case(
        f"alpha {kind}",
        content,
        colours,
        frozenset({"on white"} - {kind == "opaque" and "on white"}),
    )


def few_bits(rng: np.random.Generator) -> Case:
    bits = int(rng.choice([1, 2, 4]))
    array = _pixels(rng, 1, 2**bits - 1)
    colours = _colours(array * (255 // (2**bits - 1)))
    return Case(f"PNG of {bits} bits", png(array, bits), colours, frozenset({"fewer than 8 bits"}))


def marked_grey(rng: np.random.Generator) -> Case:
    bits = int(rng.choice([1, 2, 4, 8]))
    array = _pixels(rng, 1, 2**bits - 1)
    mark = int(array[0, 0, 0])
    colours = _colours(array * (255 // (2**bits - 1)))
    alpha = np.where(array[..., 0] == mark, 0, 255)
    return Case(f"PNG of {bits} bits, {mark} is transparent", png(array, bits, mark),
                on_white(colours, alpha), frozenset({"on white"}))  # fmt: skip


def marked_colour(rng: np.random.Generator) -> Case:
    array = _pixels(rng, 3)
    alpha = np.where((array == array[0, 0]).all(axis=2), 0, 255)
    return Case("PNG with a transparent colour", png(array, 8, array[0, 0]),
                on_white(array, alpha), frozenset({"on white"}))  # fmt: skip


def _palette_image(rng: np.random.Generator) -> tuple[Image.Image, Array, Array]:
    colours = rng.integers(0, 256, (256, 3), dtype=np.uint8)
    array = _pixels(rng, 1).astype(np.uint8)[..., 0]
    image = Image.fromarray(array)
    image.putpalette(colours.tobytes())
    return image, array, colours


def palette(rng: np.random.Generator) -> Case:
    image, array, colours = _palette_image(rng)
    kind = str(rng.choice(["PNG", "GIF", "BMP", "TIFF"]))
    return Case(f"palette {kind}", saved(image, kind), colours[array], frozenset({"palette"}))


def palette_alpha(rng: np.random.Generator) -> Case:
    image, array, colours = _palette_image(rng)
    opacity = rng.integers(0, 256, 256, dtype=np.uint8)
    opacity[array[0, 0]] = 9
    content = saved(image, "PNG", transparency=opacity.tobytes())
    return Case("palette with alpha", content, on_white(colours[array], opacity[array]),
                frozenset({"palette", "on white"}))  # fmt: skip


def two_frames(rng: np.random.Generator) -> Case:
    array = _pixels(rng, 3).astype(np.uint8)
    kind = str(rng.choice(["TIFF", "PNG", "WEBP"]))
    more = [Image.fromarray(255 - array)]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    content = saved(Image.fromarray(array), kind, save_all=True, append_images=more, **options)
    return Case(f"{kind} of two frames", content, array, frozenset({"first of several"}))


def cmyk(rng: np.random.Generator) -> Case:
    array = _pixels(rng, 4).astype(np.uint8)
    content = saved(Image.fromarray(array, "CMYK"), "TIFF")
    ink = array.astype(np.int64)
    light = (255 - ink[..., :3]) * (255 - ink[..., 3:])
    return Case("CMYK", content, np.floor(light / 255 + 0.5).astype(np.uint8), frozenset({"CMYK"}))


def jpeg(rng: np.random.Generator) -> Case:
    array = np.repeat(np.repeat(_pixels(rng, 3).astype(np.uint8), 8, axis=0), 8, axis=1)
    orientation = int(rng.integers(1, 9))
    bad = str(rng.choice(["", "rational", "gps", "damaged"]))
    content = saved(Image.fromarray(array), "JPEG", exif=exif_block(orientation, bad))
    with Image.open(io.BytesIO(content)) as image:
        stored = np.asarray(image.convert("RGB"))
    rules = {"turned upright"} if orientation > 1 else set()
    if bad == "damaged":
        orientation, rules = 1, {"not turned"}
    return Case(
        f"JPEG {orientation} {bad}", content, ORIENTATIONS[orientation](stored), frozenset(rules)
    )


def deep_png(rng: np.random.Generator) -> Case:
    array = _pixels(rng, int(rng.integers(1, 5)), 65535)
    return Case("PNG of 16 bits", png(array, 16), None)


def deep_tiff(rng: np.random.Generator) -> Case:
    array = _pixels(rng, int(rng.choice([1, 3])), 65535)
    kind = rng.choice(["uint16", "uint32"])
    return Case(f"TIFF of {kind}", tiff(array.astype(kind)), None)


def odd_numbers(rng: np.random.Generator) -> Case:
    array = _pixels(rng, 1)
    kind, code = [("int8", 2), ("int16", 2), ("float32", 3)][rng.integers(3)]
    return Case(f"TIFF of {kind}", tiff(array.astype(kind), code), None)


def deep_pnm(rng: np.random.Generator) -> Case:
    largest = int(rng.choice([256, 1023, 4095, 65535]))
    return Case(
        f"PNM up to {largest}", pnm(_pixels(rng, int(rng.choice([1, 3])), largest), largest), None
    )


def small_pnm(rng: np.random.Generator) -> Case:
    largest = int(rng.choice([1, 3, 15, 85]))
    array = _pixels(rng, int(rng.choice([1, 3])), largest)
    rules = frozenset({"fewer than 8 bits"})
    return Case(
        f"PNM up to {largest}", pnm(array, largest), _colours(array * (255 // largest)), rules
    )
