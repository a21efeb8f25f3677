"""Tar shards: the samples are those of a folder, and no damage leaves a sample out silently."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dptrain import UserError
from dptrain.data import open_data
from dptrain.network import Network

Net = Callable[..., Network]


def image(number: int, suffix: str = "png") -> bytes:
    """Return a file of a small image in colour."""
    pixels = np.random.default_rng(number).integers(0, 256, (6 + number % 3, 7, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, suffix)
    return stream.getvalue()


def write(path: Path, files: dict[str, bytes], *, kind: bytes = tarfile.REGTYPE) -> Path:
    """Write an archive; `kind` is the type of its last file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if name == list(files)[-1]:
                info.type = kind
            archive.addfile(info, io.BytesIO(content))
    return path


def sample(number: int, label: str) -> dict[str, bytes]:
    """Return the files of a sample, with a label in one of the two forms."""
    key, long = f"{number:04}", "x" * 120  # More than the name in a header can hold.
    if number % 2:
        return {f"{key}.png": image(number), f"{key}.cls": f"{label}\n".encode()}
    text = json.dumps({"label": label, "width": 7}).encode()
    return {f"a/{long}{key}.JPEG": image(number, "jpeg"), f"a/{long}{key}.json": text}


def test_samples_are_those_of_a_folder(tmp_path: Path, net: Net, read: Any) -> None:
    labels = ["cat", "dog", "owl"] * 4
    for split, numbers in (("train", range(8)), ("val", range(8, 12))):
        for shard in range(2):
            mine = [number for number in numbers if number % 4 // 2 == shard]
            files = [sample(number, labels[number]) for number in mine]
            merged = {name: content for each in files for name, content in each.items()}
            write(tmp_path / "tars" / f"{split}-{shard:02}.tar", merged)
            for number, each in zip(mine, files, strict=True):
                name, content = next(iter(each.items()))
                path = tmp_path / "folder" / split / labels[number] / f"{number}.{name[-3:]}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    network = net((3, 8, 8), 3)
    found = open_data(f"webdataset:{tmp_path / 'tars'}", network)
    expected = open_data(f"folder:{tmp_path / 'folder'}", network)
    assert found.classes == expected.classes == ("cat", "dog", "owl")
    assert found.has_split
    assert found.notes == ()
    for split in ("train", "test"):
        ours, theirs = (read(each, split) for each in (found, expected))
        order, other = (np.lexsort(x.reshape(len(x), -1).T) for x in (ours[0], theirs[0]))
        np.testing.assert_array_equal(ours[0][order], theirs[0][other])
        np.testing.assert_array_equal(ours[1][order], theirs[1][other])
    copy = pickle.loads(pickle.dumps(found.train))
    x, y = np.zeros((1, 3, 8, 8), np.float32), np.zeros(1, np.int32)
    copy.read(np.array([5]), x, y)
    np.testing.assert_array_equal(x, read(found, "train", [5])[0])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_range_names_shards_and_labels_are_whole_numbers(
    tmp_path: Path, net: Net, read: Any
) -> None:
    for shard in range(9, 12):
        files = {f"{i}.rgb.png": image(i) for i in range(4)}
        files |= {f"{i}.mask.png": image(9) for i in range(4)}
        files |= {f"{i}.json": json.dumps({"kind": i % 2}).encode() for i in range(4)}
        write(tmp_path / f"s-{shard}.tar", {**files, "._0.png": b"", "LICENSE": b"free"})
    network = net((3, 8, 8), 2)
    spec = f"webdataset:{tmp_path}/s-{{9..11}}.tar?image=RGB.png&label=kind"
    found = open_data(spec, network)
    assert (len(found.train), len(found.test)) == (9, 3)
    assert found.classes == ("0", "1")
    assert (
        "18 files are left out: no images: 15 (12 .png, 3 no suffix); hidden: 3" in found.notes[0]
    )
    assert open_data(f"{spec}&classes=no,yes", network).classes == ("no", "yes")
    with pytest.raises(UserError, match=r"s-12\.tar does not exist"):
        open_data(f"webdataset:{tmp_path}/s-{{9..999999999}}.tar?label=kind", network)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"1.png": b"", "1.txt": b"0"},
            r"1\.png has no label: its files are \.png, \.txt; .* \.cls",
        ),
        ({"1.cls": b"0", "1.heic": b""}, r"s\.tar/1 has \.cls, \.heic but no image"),
        ({"1.png": b"", "1.jpg": b"", "1.cls": b"0"}, r"several images, png and jpg; .*image=png"),
        ({"1.png": b"", "1.PNG": b"", "1.cls": b"0"}, r"has 1\.PNG twice"),
        ({"1.png": b"", "1.cls": b" "}, r"1\.cls has no label \(''\)"),
        ({"1.png": b"", "1.cls": b"\xff"}, r"1\.cls cannot be read .*; expected a label"),
        ({"1.png": b"", "1.json": b'{"label": [1]}'}, r"1\.json has no label"),
        ({"1.png": b"", "1.json": b"["}, r"1\.json cannot be read .*; expected a label"),
        ({"readme.txt": b""}, r"has no samples \(1 file is left out: no images: 1 \(1 \.txt\)\)"),
        ({}, "has no samples; expected files with a common name"),
    ],
)
def test_odd_samples_are_one_line(
    tmp_path: Path, net: Net, files: dict[str, bytes], message: str
) -> None:
    path = write(tmp_path / "s.tar", files)
    with pytest.raises(UserError, match=message) as caught:
        open_data(f"webdataset:{path}", net((3, 8, 8), 2))
    assert "\n" not in str(caught.value)


def test_no_damaged_archive_loses_a_sample_silently(tmp_path: Path, net: Net, read: Any) -> None:
    files = {name: content for i in range(6) for name, content in sample(i, str(i % 2)).items()}
    path, network = write(tmp_path / "s.tar", files), net((3, 8, 8), 2)
    expected = read(open_data(f"webdataset:{path}", network))
    content = path.read_bytes()
    end = len(content.rstrip(b"\0")) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE + tarfile.BLOCKSIZE
    random = np.random.default_rng(0)
    for cut in (*range(0, end + 1, tarfile.BLOCKSIZE), *random.integers(0, end, 20)):
        path.write_bytes(content[:cut])
        with pytest.raises(UserError, match=r"s\.tar"):
            read(open_data(f"webdataset:{path}", network))
    for start in range(0, end, tarfile.BLOCKSIZE):
        if content[start + 257 : start + 262] == b"ustar":
            path.write_bytes(content[: start + 100] + b"\x80" + content[start + 101 :])
            with pytest.raises(UserError, match=r"s\.tar"):
                read(open_data(f"webdataset:{path}", network))
    path.write_bytes(content + content)
    with pytest.raises(UserError, match="damaged header, or another archive"):
        open_data(f"webdataset:{path}", network)
    path.write_bytes(content[: end + tarfile.BLOCKSIZE])
    for ours, theirs in zip(read(open_data(f"webdataset:{path}", network)), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_links_and_compressed_archives_are_refused(tmp_path: Path, net: Net) -> None:
    spec, network = f"webdataset:{tmp_path / 's.tar'}", net((3, 8, 8), 2)
    write(tmp_path / "s.tar", {"1.cls": b"0", "1.png": b""}, kind=tarfile.SYMTYPE)
    with pytest.raises(UserError, match="but no image"):
        open_data(spec, network)
    with tarfile.open(tmp_path / "s.tar", "w:gz") as archive:
        archive.add(__file__)
    with pytest.raises(UserError, match="it is compressed"):
        open_data(spec, network)
