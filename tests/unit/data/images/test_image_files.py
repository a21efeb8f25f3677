"""What happens to an image: depth, alpha, palettes, frames, orientation, damage."""

from __future__ import annotations

import io
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from dptrain.data import open_data
from dptrain.data.image_files.colour import any_has_colour, has_colour
from dptrain.data.image_files.decoder import decode_file, pixels_of
from dptrain.data.image_files.decoder_warnings import collected_warnings
from dptrain.data.image_files.headers import channel_bits
from dptrain.data.inspection import counting_rules, find_problems
from dptrain.data.sources.objects import dataset_from
from dptrain.errors import UserError
from dptrain.network import Dense, Flatten, Network
from tests.tiers import tiered
from tests.unit.data.images.image_writers import (
    Case,
    exif_block,
    luma,
    png,
    random_case,
    saved,
)

RULES = ("turned upright", "not turned", "on white", "first of several", "palette", "CMYK",
         "fewer than 8 bits")  # fmt: skip


def check(case: Case, path: Path) -> None:
    path.write_bytes(case.content)
    if case.colours is None:
        for grey in (False, True):
            with pytest.raises(UserError, match=r"8.bit|does not support this variant") as error:
                decode_file(path, grey=grey)
            assert str(error.value).startswith(f"{path} cannot be read as an image (")
        return
    decoded = decode_file(path, grey=False)
    np.testing.assert_array_equal(decoded.pixels[0].transpose(1, 2, 0), case.colours, case.name)
    shows_colour = (case.colours != case.colours[..., :1]).any()
    assert has_colour(path) or not shows_colour, case.name
    found = {rule for rule in RULES if any(rule in text for text in decoded.rules)}
    assert found - {"fewer than 8 bits"} == case.rules - {"fewer than 8 bits"}, case.name
    assert case.rules <= found, case.name
    grey = decode_file(path, grey=True)
    np.testing.assert_array_equal(grey.pixels[0, 0], luma(case.colours), case.name)
    if re.match("TIFF [5-8]", case.name):
        return  # Pillow 13 maps uncompressed files of these orientations in the wrong shape.
    with Image.open(path) as image:
        mine = pixels_of(image)
        expected = case.colours if mine.ndim == 3 else luma(case.colours)
        np.testing.assert_array_equal(mine, expected, case.name)


@pytest.mark.parametrize("block", tiered(range(5), (0,)))
def test_random_images_have_the_right_pixels(
    tmp_path: Path, block: int, recwarn: pytest.WarningsRecorder
) -> None:
    names = set()
    for seed in range(100 * block, 100 * block + 100):
        case = random_case(np.random.default_rng(seed))
        names.add(case.name.split()[0])
        check(case, tmp_path / "image")
    assert len(names) >= 8
    assert not recwarn.list


DAMAGED = {
    "jpeg": {"exif": exif_block(6)},
    "png": {"exif": exif_block(3), "pnginfo": None},
    "webp": {"exif": exif_block(8)},
    "gif": {},
    "bmp": {},
    "tiff": {"compression": "tiff_lzw"},
    "ppm": {},
    "avif": {},
}


def intact_files(rng: np.random.Generator) -> list[bytes]:
    files = []
    for kind, options in DAMAGED.items():
        if kind == "avif" and not features.check("avif"):
            continue
        array = rng.integers(0, 256, (12, 9, 3), dtype=np.uint8)
        files.append(saved(Image.fromarray(array), kind, **options))
        if kind in ("png", "gif", "tiff", "webp"):
            more = [Image.fromarray(255 - array)]
            files.append(saved(Image.fromarray(array), kind, save_all=True, append_images=more))
    files.append(png(rng.integers(0, 256, (5, 6, 4)), exif=exif_block(6)))
    files.append(saved(Image.fromarray(array).convert("P"), "png"))
    files.append(saved(Image.fromarray(array).convert("CMYK"), "jpeg"))
    return files


@pytest.mark.parametrize("block", tiered(range(5), (0,)))
def test_damaged_files_are_decoded_or_refused_in_one_line(
    tmp_path: Path,
    block: int,
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """2,000 files in all."""
    rng, path, decoded = np.random.default_rng(block), tmp_path / "image", 0
    refused: list[str] = []
    files = intact_files(rng)
    for _ in range(400):
        content = bytearray(files[rng.integers(len(files))])
        for _ in range(rng.integers(1, 6)):
            span = rng.integers(1, 4)
            place = int(rng.integers(min(len(content), int(rng.choice([64, 1 << 20])))))
            content[place : place + span] = rng.bytes(span)
        path.write_bytes(content[: rng.integers(len(content)) if rng.integers(8) == 0 else None])
        try:
            pixels = decode_file(path, grey=bool(rng.integers(2))).pixels
        except UserError as error:
            refused.append(str(error))
            continue
        decoded += 1
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 4
    assert 80 < decoded < 320
    form = re.escape(str(path)) + r" cannot be read as an image \(.+\); replace or remove it"
    assert all(re.fullmatch(form, text) for text in refused)
    assert not recwarn.list
    assert capfd.readouterr() == ("", "")


def test_a_warning_belongs_to_its_file_and_thread() -> None:
    """Warnings of threads that decode at the same time are not mixed up, nor those of others."""
    others: list[str] = []
    barrier, found = threading.Barrier(4, timeout=30), dict[int, list[str]]()

    def decode(number: int) -> None:
        with collected_warnings() as messages:
            barrier.wait()
            for _ in range(20):
                warnings.warn(f"of thread {number}", stacklevel=1)
            barrier.wait()
            if number:
                barrier.wait()  # The first thread has ended.
                warnings.warn(f"later, of thread {number}", stacklevel=1)
            found[number] = messages
        if not number:
            barrier.wait()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning
        warnings.showwarning = lambda message, *_, **__: others.append(str(message))
        filters = list(warnings.filters)
        threads = [threading.Thread(target=decode, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait()
        warnings.warn("of no file", stacklevel=1)
        barrier.wait()
        barrier.wait()
        for thread in threads:
            thread.join()
        assert list(warnings.filters) == filters
        warnings.showwarning = show
    assert found[0] == ["of thread 0"] * 20
    for i in (1, 2):
        assert found[i] == [*[f"of thread {i}"] * 20, f"later, of thread {i}"]
    assert others == ["of no file"]


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow cannot write AVIF")
@pytest.mark.parametrize(("flags", "bits"), [(0x40, 10), (0x60, 12)])
def test_the_depth_of_avif_is_that_of_its_header(flags: int, bits: int) -> None:
    content = bytearray(saved(Image.new("RGB", (8, 8), (9, 90, 200)), "AVIF"))
    with Image.open(io.BytesIO(content)) as image:
        assert channel_bits(content, image) == 8
        content[content.index(b"av1C") + 6] |= flags
        assert channel_bits(content, image) == bits


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("grey", [False, True])
def test_a_transparent_grey_is_a_number_of_the_file(tmp_path: Path, bits: int, grey: bool) -> None:
    array = np.arange(2**bits).reshape(1, -1, 1)
    path = tmp_path / "a.png"
    path.write_bytes(png(array, bits, 1))
    expected = np.arange(2**bits) * (255 // (2**bits - 1))
    expected[1] = 255
    np.testing.assert_array_equal(decode_file(path, grey=grey).pixels[0, 0, 0], expected)


def write_folder(folder: Path) -> str:
    """Write two classes of four images: plain, turned, transparent, with a bad GPS pointer."""
    rng = np.random.default_rng(0)
    for name in "ab":
        (folder / name).mkdir(parents=True)
        array = rng.integers(0, 256, (8, 8, 4))
        (folder / name / "0.png").write_bytes(png(array[..., :3]))
        (folder / name / "1.png").write_bytes(png(array[::-1, :, :3], exif=exif_block(6)))
        (folder / name / "2.png").write_bytes(png(array[:, ::-1]))
        image = Image.fromarray(array[..., 1].astype(np.uint8))
        (folder / name / "3.jpg").write_bytes(saved(image, "JPEG", exif=exif_block(1, "gps")))
    return f"folder:{folder}"


def test_check_counts_the_rules(tmp_path: Path) -> None:
    spec = write_folder(tmp_path / "d")
    network = Network((3, 8, 8), [Flatten(), Dense(2)], name="small")
    data, counts = counting_rules(open_data(spec, network))
    assert find_problems(data) == []
    lines = "\n".join(counts.lines())
    assert re.search(r"^2 images: turned upright, as the EXIF .*[ab]/1\.png\)", lines, re.MULTILINE)
    assert re.search(r"^2 images: transparent pixels put on white .*2\.png\)", lines, re.MULTILINE)
    assert lines.count("images") == len(counts.lines())


def test_one_bad_tag_does_not_prevent_turning(tmp_path: Path) -> None:
    """The case of photographs whose EXIF data cannot be written again."""
    array = np.zeros((8, 16, 3), np.uint8)
    array[:, 8:] = 255
    path = tmp_path / "a.jpg"
    for orientation, upper in ((6, 0), (8, 255)):
        path.write_bytes(
            saved(Image.fromarray(array), "JPEG", exif=exif_block(orientation, "rational"))
        )
        pixels = decode_file(path, grey=True).pixels[0, 0]
        assert pixels.shape == (16, 8)
        assert abs(int(pixels[0, 0]) - upper) < 9
        assert abs(int(pixels[-1, 0]) - (255 - upper)) < 9


def test_images_of_pillow_are_converted_as_files_are(tmp_path: Path, net: Any, read: Any) -> None:
    """A data set of Python objects gives the inputs that the files give."""
    write_folder(tmp_path / "d")
    network = net((3, 8, 8), 2)
    files = sorted((tmp_path / "d").rglob("*.png"))
    images = [Image.open(path) for path in files] + [Image.open(files[0]).convert("P")]
    samples = [(image, i % 2) for i, image in enumerate(images)]
    data = dataset_from(samples, network)
    preprocessing = data.preprocessing
    expected = np.concatenate([decode_file(path, grey=False).pixels for path in files])
    found = preprocessing.apply([image for image, _ in samples[:-1]])
    np.testing.assert_array_equal(np.round((found + 1) * 127.5), expected)
    x = np.concatenate([read(data, "train")[0], read(data, "test")[0]])
    assert {row.tobytes() for row in found} < {row.tobytes() for row in x}
    (tmp_path / "deep.png").write_bytes(png(np.zeros((4, 4, 3), np.int64), 16))
    with (
        Image.open(tmp_path / "deep.png") as image,
        pytest.raises(UserError, match="16 bits a channel"),
    ):
        preprocessing.apply(image)


def grey_files() -> dict[str, bytes]:
    """Return grey images of every form."""
    grey = Image.fromarray(np.arange(0, 96, 8, np.uint8).reshape(3, 4))
    ramp = Image.new("P", (4, 3))
    ramp.putpalette([value for level in (9, 200, 30) for value in 3 * (level,)])
    return {
        "plain": saved(grey, "PNG"),
        "bits": saved(grey.convert("1"), "PNG"),
        "alpha": saved(grey.convert("LA"), "PNG"),
        "marked": png(np.arange(12, dtype=np.uint8).reshape(3, 4, 1), transparent=(3,)),
        "palette": saved(ramp, "PNG"),
        "gif": saved(ramp, "GIF"),
        "deep": saved(Image.fromarray(np.arange(12, dtype=np.uint16).reshape(3, 4)), "PNG"),
        "turned": saved(grey, "JPEG", exif=exif_block(6)),
        "bad EXIF": saved(grey, "JPEG", exif=exif_block(6)[:-9]),
        "damaged": saved(grey, "PNG")[:20],
    }


def test_grey_images_of_every_form_have_no_colour(tmp_path: Path) -> None:
    paths = []
    for name, content in grey_files().items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(content)
        assert not has_colour(paths[-1]), name
    assert not any_has_colour(paths)
    for place in (0, 5, len(paths)):
        colour = tmp_path / f"colour {place}"
        Image.new("RGB", (4, 3), (9, 9, 10)).quantize(2).save(colour, "PNG")
        assert any_has_colour([*paths[:place], colour, *paths[place:]])
