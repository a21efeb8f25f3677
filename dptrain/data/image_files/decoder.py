"""From an image to upright 8-bit pixels, and the rules that were applied.

The rules are those of docs/reference/images.md. Files and images of Pillow that a Python program
passes are converted by the same function.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dptrain.data.image_files.decoder_warnings import collected_warnings
from dptrain.data.image_files.headers import HEAD_BYTES, channel_bits, opened_bits
from dptrain.data.image_files.listing import TYPES, begins_as_image
from dptrain.data.image_files.tar_members import ImageFile
from dptrain.errors import UserError, shown

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

FORMATS = ("PNG", "JPEG", "MPO", "BMP", "DIB", "GIF", "PPM", "TIFF", "WEBP", "AVIF")
"""Types of files that are decoded, by their names in Pillow."""
GREY_MODES = ("1", "L", "LA", "La")
"""Pillow's modes of images without colours."""
MAX_PIXELS = 64_000_000
"""Larger images are refused: decoded, this many pixels take 0.2 GB, and float32 copies more."""

TURNED = "turned upright, as the EXIF orientation states"
UNREADABLE_EXIF = "not turned, because the EXIF data cannot be read"
ON_WHITE = "transparent pixels put on white"
FIRST_FRAME = "the first of several frames or pages"
PALETTE = "colours of a palette"
FEW_BITS = "fewer than 8 bits a channel, scaled to 0 … 255"
CMYK = "CMYK converted to RGB without its colour profile"
COLOUR_SPACE = "another colour space converted to RGB"

_ORIENTATION = 0x0112
_TURNS = range(2, 9)
_SPACES = {"CMYK": CMYK, "YCbCr": COLOUR_SPACE, "HSV": COLOUR_SPACE, "LAB": COLOUR_SPACE}
_ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")


@dataclass(frozen=True)
class DecodedImage:
    """Pixels and how they were made.

    Attributes:
        pixels: uint8 (1, C, H, W), C is 1 or 3.
        rules: what was applied, texts of this module, and warnings of Pillow.
    """

    pixels: NDArray[np.uint8]
    rules: tuple[str, ...]


@dataclass
class RuleCounts:
    """How many images each rule was applied to.

    Attributes:
        counts: number of images for each rule.
        first: the first image for each rule.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, ImageFile] = field(default_factory=dict)

    def add(self, path: ImageFile, rules: tuple[str, ...]) -> None:
        """Count the rules of an image."""
        self.counts.update(rules)
        for rule in rules:
            self.first.setdefault(rule, path)

    def lines(self) -> list[str]:
        """Return a line for each rule, those of the most images first."""
        return [
            f"{count:,} {'image' if count == 1 else 'images'}: {rule} ({self.first[rule]})"
            for rule, count in sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        ]


def decode_file(path: ImageFile, *, grey: bool) -> DecodedImage:
    """Decode an image file.

    Args:
        path: of the file, or a file in an archive.
        grey: True for one channel, False for three.

    Raises:
        UserError: the file cannot be read, is damaged, or has more than 8 bits a channel; one line
            that names it.
    """
    from PIL import UnidentifiedImageError

    head = b""
    try:
        with path.open("rb") as stream, collected_warnings() as messages:
            head = stream.read(HEAD_BYTES)
            stream.seek(0)
            with open_image(stream) as image:
                pixels, rules = _decode(image, channel_bits(head, image), grey=grey)
    except UnidentifiedImageError:
        reason = f"its content is of none of the types {TYPES}"
        if begins_as_image(head):
            reason = "Pillow does not support this variant of its type, or its header is damaged"
    except OSError as error:
        reason = error.strerror or _line(error)
    except Exception as error:  # Decoders of damaged files raise nearly any exception.
        reason = _line(error)
    else:
        texts = (f"Pillow warns: {shown(text, 100)}" for text in dict.fromkeys(messages))
        return DecodedImage(pixels, (*rules, *texts))
    raise UserError(f"{path} cannot be read as an image ({reason}); replace or remove it")


def open_image(stream: BinaryIO) -> PillowImage:
    """Return the image of a file of one of the types in `FORMATS`, not decoded yet."""
    from PIL import Image

    Image.init()
    return Image.open(stream, formats=[name for name in FORMATS if name in Image.OPEN])


def is_pillow_image(x: Any) -> bool:
    """Return True for an image of Pillow, without importing it."""
    return hasattr(x, "getexif") and hasattr(x, "convert")


def pixels_of(image: PillowImage) -> NDArray[Any]:
    """Return the pixels of an image of Pillow, (H, W) or (H, W, 3).

    Returns:
        uint8 by the rules of files; the numbers themselves if they have more than 8 bits.

    Raises:
        UserError: the image cannot be decoded or converted.
    """
    grey = image.mode in GREY_MODES
    try:
        if image.mode.startswith(("I", "F")):
            return np.asarray(image)
        pixels, _ = _decode(image, opened_bits(image), grey=grey)
    except Exception as error:
        raise UserError(f"an image of Pillow cannot be read ({_line(error)})") from None
    found: NDArray[Any] = pixels[0, 0] if grey else pixels[0].transpose(1, 2, 0)
    return found


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    name = type(error).__name__
    if isinstance(error, ValueError | OSError | SyntaxError) and text:
        return shown(text, 200)  # A sentence about the file, also of Pillow.
    return f"{name}: {shown(text, 200)}" if text else name


def _decode(
    image: PillowImage, bits: int, *, grey: bool
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Return pixels (1, C, H, W) and rules; `bits` is the depth of a channel in the file."""
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"{image.width}×{image.height} pixels, more than {MAX_PIXELS // 10**6} million"
        )
    if bits > 8 or image.mode.startswith(("I", "F")):
        # Pillow clips or cuts such numbers to 8 bits, without an error.
        raise ValueError(
            f"{bits} bits a channel, more than 8 bits; convert it to 8 bits, or pass the numbers "
            "as an array"
        )
    rules = [FIRST_FRAME] if getattr(image, "is_animated", False) else []
    rules += [FEW_BITS] if bits < 8 and not image.mode.startswith("P") else []
    rules += [PALETTE] if image.mode.startswith("P") else []
    rules += [_SPACES[image.mode]] if image.mode in _SPACES else []
    is_tiff = image.format == "TIFF"  # Pillow turns TIFF files when it decodes them.
    if is_tiff and image.tag_v2.get(_ORIENTATION, 1) in _TURNS:  # type: ignore[attr-defined]
        rules.append(TURNED)
    image.load()
    array = _without_alpha(image, bits, grey=grey, rules=rules)
    if not is_tiff:
        array = _upright(array, image, rules)
    pixels = array[None, None] if grey else array.transpose(2, 0, 1)[None]
    return pixels, tuple(rules)


def _without_alpha(
    image: PillowImage, bits: int, *, grey: bool, rules: list[str]
) -> NDArray[np.uint8]:
    """Return (H, W), or (H, W, 3) for colours; transparent pixels are put on white."""
    mode = "L" if grey else "RGB"
    alpha = _alpha(image, bits)
    if alpha is None or alpha.min(initial=255) == 255:
        return np.asarray(_opaque(image).convert(mode))
    rules.append(ON_WHITE)
    colours = np.asarray(_straight(image).convert("RGB"), np.int32)
    weight = alpha.astype(np.int32)[..., None]
    mixed = (colours * weight + 255 * (255 - weight) + 127) // 255
    if not grey:
        return mixed.astype(np.uint8)
    from PIL import Image

    return np.asarray(Image.fromarray(mixed.astype(np.uint8)).convert("L"))


def _alpha(image: PillowImage, bits: int) -> NDArray[np.uint8] | None:
    """Return the opacity of each pixel, (H, W); None if the image has none."""
    marked = image.info.get("transparency")
    if image.mode in _ALPHA_MODES or (image.mode == "P" and marked is not None):
        return np.asarray(_straight(image).convert("RGBA"))[..., 3]
    if marked is None or image.mode not in ("1", "L", "RGB"):
        return None
    if image.mode == "L" and bits < 8:  # A number of the file, which Pillow does not scale.
        marked = marked * 255 // (2**bits - 1)
    values = np.asarray(image.convert("L") if image.mode == "1" else image)
    is_marked = values == np.asarray(marked)
    if image.mode == "RGB":
        is_marked = is_marked.all(axis=-1)
    return np.where(is_marked, 0, 255).astype(np.uint8)


def _straight(image: PillowImage) -> PillowImage:
    """Return the image with colours that are not multiplied by their opacity."""
    if image.mode == "P":
        return image.convert("RGBA")
    return image.convert({"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode))


def _opaque(image: PillowImage) -> PillowImage:
    """Return the image without its opacity."""
    image = _straight(image) if image.mode in ("La", "RGBa") else image
    return image.convert("RGB") if image.mode in ("P", "PA") else image


def _upright(array: NDArray[np.uint8], image: PillowImage, rules: list[str]) -> NDArray[np.uint8]:
    """Return the pixels turned as the EXIF orientation states."""
    try:
        orientation = _orientation(image)
    except Exception:  # The pixels are intact; no other tag is needed.
        rules.append(UNREADABLE_EXIF)
        return array
    if not isinstance(orientation, int) or orientation not in _TURNS:
        return array
    rules.append(TURNED)
    if orientation >= 5:  # Rows become columns.
        array = array.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    return array


def _orientation(image: PillowImage) -> Any:
    """Return the number of the EXIF tag, or what is there in its place."""
    from PIL.Image import Exif

    if block := image.info.get("exif"):
        Exif().load(block)  # Of a damaged block, `getexif` returns nothing the second time.
    return image.getexif().get(_ORIENTATION)
