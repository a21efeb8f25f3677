"""What a folder contains: training, evaluation and prediction agree, and nothing is left out
without being counted.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dptrain.data import absolute, open_data
from dptrain.data.image_files.listing import SUFFIXES, begins_as_image
from dptrain.data.inputs import open_inputs
from dptrain.data.sources.folder import split_folders
from dptrain.data.spec import escape, unescape
from dptrain.errors import UserError
from dptrain.network import Dense, Flatten, Network
from tests.tiers import tiered

FORMATS = {"PNG": b"", "JPEG": b"", "GIF": b"", "BMP": b"", "TIFF": b"", "WEBP": b"", "PPM": b""}
NFC, NFD = (unicodedata.normalize(form, chr(0xE9)) for form in ("NFC", "NFD"))


def encoded(kind: str) -> bytes:
    if not FORMATS[kind]:
        stream = io.BytesIO()
        Image.new("RGB", (3, 2), (200, 30, 60)).save(stream, kind)
        FORMATS[kind] = stream.getvalue()
    return FORMATS[kind]


def network(classes: int) -> Network:
    return Network((3, 4, 4), [Flatten(), Dense(max(classes, 2))], name="small")


def note_of(data: Any) -> str:
    return " ".join(data.notes)


def counted(note: str) -> int:
    return int(found[1].replace(",", "")) if (found := re.match(r"([\d,]+) file", note)) else 0


class Tree:
    """A random folder of classes, and what must be read from it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng, self.root = np.random.default_rng(seed), root
        self.images: dict[str, str] = {}
        self.outside: set[str] = set()
        self.left_out = 0
        root.mkdir()
        names = self.rng.permutation(["a", "b b", "C", "ñ", "7", "10", "train set", "x.png"])
        self.classes = [str(name) for name in names[: self.rng.integers(2, 5)]]
        for name in self.classes:
            folders = [root / name]
            for depth in range(self.rng.integers(0, 3)):
                folders.append(folders[-1] / f"inner {depth}")
            folders[-1].mkdir(parents=True)
            for _ in range(self.rng.integers(2, 8)):
                self.add_image(folders[self.rng.integers(len(folders))], name)
            for _ in range(self.rng.integers(0, 4)):
                self.add_other(folders[self.rng.integers(len(folders))])
        for _ in range(self.rng.integers(0, 3)):
            self.add_image(root, "")
            self.add_other(root)

    def fresh(self, folder: Path, suffix: str) -> Path:
        return folder / f"{self.rng.integers(1 << 40)}{suffix}"

    def add_image(self, folder: Path, label: str) -> None:
        suffix = self.rng.choice([*SUFFIXES, ".JPG", ".Jfif", "", ".001", ".jpg_large"])
        path = self.fresh(folder, str(suffix))
        target = path
        if self.rng.integers(6) == 0:  # A link to an image is an image.
            target = self.root.parent / path.name
            path.symlink_to(target)
        target.write_bytes(encoded(str(self.rng.choice(list(FORMATS)))))
        name = path.relative_to(self.root).as_posix()
        if label:
            self.images[name] = label
        else:
            self.outside.add(name)
            self.left_out += 1

    def add_other(self, folder: Path) -> None:
        self.left_out += 1
        kind = self.rng.integers(8)
        if kind == 0:
            self.fresh(folder, ".txt").write_text("P5 is no image")
        elif kind == 1:
            self.fresh(folder, ".heic").write_bytes(encoded("TIFF"))
        elif kind == 2:
            (folder / f".{self.rng.integers(1 << 40)}.png").write_bytes(encoded("PNG"))
        elif kind == 3:
            self.fresh(folder, ".png").symlink_to("nowhere")
        elif kind == 4:
            os.mkfifo(self.fresh(folder, ".jpg"))
        elif kind == 5:
            self.fresh(folder, "").write_bytes(b"BM is no image either, although long enough")
        elif kind == 6 and folder != self.root:
            self.fresh(folder, "").symlink_to(self.root)
        else:
            self.fresh(folder, "").touch()


@pytest.mark.parametrize("block", tiered(range(4), (0,)))
def test_every_file_of_random_folders_is_read_or_counted(tmp_path: Path, block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        tree = Tree(tmp_path / "tree", seed)
        model, spec = network(len(tree.classes)), f"folder:{tree.root}"
        data: Any = open_data(spec, model)
        assert data.classes == tuple(sorted(tree.classes))
        found = {}
        for split in (data.train, data.test):
            for path, label in zip(split.paths, split.targets, strict=True):
                found[path.relative_to(tree.root).as_posix()] = data.classes[label]
        assert found == tree.images
        assert counted(note_of(data)) == tree.left_out
        whole: Any = open_data(spec, model, preprocessing=data.preprocessing, split=False)
        assert {path.relative_to(tree.root).as_posix() for path in whole.test.paths} == set(found)
        inputs = open_inputs(tree.root, data.preprocessing)
        assert inputs.targets is not None
        targets = dict(zip(inputs.names, (text for (text,) in inputs.targets), strict=True))
        assert targets == {**found, **dict.fromkeys(tree.outside, "")}
        assert counted(" ".join(inputs.notes)) == tree.left_out - len(tree.outside)
        shutil.rmtree(tree.root)


def test_left_out_files_are_named_by_reason(images: Path) -> None:
    (images / "cat" / "a.heic").touch()
    (images / "stray.png").write_bytes(encoded("PNG"))
    (images / "cat" / "gone.png").symlink_to("nowhere")
    (images / "dog" / ".DS_Store").touch()
    note = note_of(open_data(f"folder:{images}", network(2)))
    assert note.startswith("6 files are left out: no images: 2 (2 .txt); ")
    for part in (
        "images of types that dptrain does not read: 1 (1 .heic)",
        "broken links: 1 (cat/gone.png)",
        "hidden: 1 (dog/.DS_Store)",
        "images outside of the folders of classes: 1 (stray.png)",
    ):
        assert part in note


def test_other_folders_next_to_the_splits_are_counted(images: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("train", "test", "unlabelled"):
        shutil.copytree(images, root / name)
    data = open_data(f"folder:{root}", network(2))
    assert (len(data.train), len(data.test)) == (10, 10)
    assert "images in folders that are no split: 10 (unlabelled/cat/0.png)" in note_of(data)
    assert counted(note_of(data)) == 16


@pytest.mark.parametrize("names", [("Training", "Testing"), ("Train", "Test"), ("train", "more")])
def test_folders_that_look_like_splits_are_no_classes(
    images: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    root = tmp_path / "root"
    for name in names:
        shutil.copytree(images, root / name)
    with pytest.raises(UserError, match=rf"{names[0]} has no images but folders.*{root}/train and"):
        open_data(f"folder:{root}", network(2))


@pytest.mark.parametrize("names", [("test", "val"), ("Test", "dev"), ("TEST", "training")])
@pytest.mark.parametrize("has_loose_images", [False, True])
def test_two_folders_with_names_of_splits_are_no_classes(
    images: Path, tmp_path: Path, names: tuple[str, str], has_loose_images: bool
) -> None:
    root = tmp_path / "root"
    for name in names:
        shutil.copytree(images, root / name)
        if has_loose_images:
            shutil.copy(images / "cat" / "0.png", root / name / "preview.png")
    with pytest.raises(UserError, match=rf"folders.*for images that are split.*{root}/train and"):
        open_data(f"folder:{root}", network(2))


def test_other_classes_in_a_split_are_named(images: Path, tmp_path: Path) -> None:
    for name in ("train", "test"):
        shutil.copytree(images, tmp_path / "root" / name)
    (tmp_path / "root" / "test" / "dog").rename(tmp_path / "root" / "test" / "d, e")
    with pytest.raises(UserError, match=r"; missing: dog; unknown: 'd, e'$"):
        open_data(f"folder:{tmp_path / 'root'}", network(2))


def test_folders_of_any_names_are_splits_or_classes_or_refused(tmp_path: Path) -> None:
    """Random names, with sub-folders or not, with a loose image or not."""
    draw, outcomes = np.random.default_rng(11), {"split": 0, "classes": 0, "refused": 0}
    training, tests = ("train", "training"), ("test", "val", "valid", "validation")
    others = ("testing", "dev", "eval", "cat", "dog", "TRAIN", "Train", "Test", "VAL", "Dev")
    names = np.array([*training, *tests, *others])
    for number in range(250):
        root, chosen = tmp_path / str(number), draw.choice(names, draw.integers(1, 6), False)
        is_outer = {name: bool(draw.random() < 0.7) for name in chosen.tolist()}
        has_loose = {name: bool(draw.random() < 0.3) for name in is_outer}
        for name, outer in is_outer.items():
            (root / name / ("rose" if outer else "")).mkdir(parents=True)
            if has_loose[name]:
                (root / name / "1.png").write_bytes(b"")
        second = [name for name in tests if name in is_outer]
        as_splits = [
            name for name, outer in is_outer.items()
            if outer and name.lower() in (*training, *tests, "testing", "dev", "eval")
        ]  # fmt: skip
        only_folders = [n for n in as_splits if n.lower() in training and not has_loose[n]]
        if is_outer.get("train") and second:
            third = [name for name in second[1:] if second[0] == "test"][:1]
            expected = [root / name for name in ("train", second[0], *third)]
            assert split_folders(root) == expected
            outcomes["split"] += 1
        elif len(as_splits) > 1 or only_folders:
            with pytest.raises(UserError, match="for images that are split, expected"):
                split_folders(root)
            outcomes["refused"] += 1
        else:
            assert split_folders(root) == []
            outcomes["classes"] += 1
    assert min(outcomes.values()) > 15, outcomes


def test_a_class_may_have_the_name_of_one_split(images: Path) -> None:
    for old, new in (("cat", "valid"), ("dog", "invalid")):
        (images / "2024").mkdir()
        (images / old).rename(images / "2024" / old)
        (images / "2024").rename(images / new)
    assert open_data(f"folder:{images}", network(2)).classes == ("invalid", "valid")


def test_a_folder_around_the_folders_of_classes_is_named(images: Path) -> None:
    with pytest.raises(UserError, match=f"has one folder, images, .* use folder:{images}$"):
        open_data(f"folder:{images.parent}", network(2))


def test_a_class_may_be_a_train_if_it_has_images(images: Path) -> None:
    (images / "cat").rename(images / "train")
    (images / "train" / "2020").mkdir()
    (images / "train" / "0.png").rename(images / "train" / "2020" / "0.png")
    data = open_data(f"folder:{images}", network(2))
    assert data.classes == ("dog", "train")
    assert not data.has_split
    assert len(data.train) + len(data.test) == 10


def test_names_in_another_form_are_the_same_names(images: Path, tmp_path: Path) -> None:
    root = tmp_path / "cafés"
    for name, form in (("train", NFC), ("test", NFD)):
        shutil.copytree(images, root / name)
        (root / name / "cat").rename(root / name / f"caf{form}")
    other = tmp_path / unicodedata.normalize("NFD", "cafés")
    data = open_data(f"folder:{other}", network(2))
    assert data.classes == (f"caf{NFC}", "dog")
    inputs = open_inputs(root / "test", data.preprocessing)
    assert inputs.targets is not None
    assert set(inputs.targets) == {(f"caf{NFC}",), ("dog",)}
    # Two folders of one name are one class.
    shutil.copytree(root / "test" / f"caf{NFD}", root / "train" / f"caf{NFD}")
    assert len(open_data(f"folder:{root}", network(2)).train) == 15


def test_names_of_other_bytes_must_differ_when_they_are_shown(images: Path) -> None:
    (images / "cat").rename(images / "c\udcff")
    assert open_data(f"folder:{images}", network(2)).classes == ("c?", "dog")
    shutil.copytree(images / "c\udcff", images / "c\udcfe")
    with pytest.raises(UserError, match=r"not UTF-8, 'c\?'; rename one"):
        open_data(f"folder:{images}", network(3))


def test_an_exact_name_precedes_the_same_integer_in_another_form(images: Path) -> None:
    for name, other in (("cat", "3"), ("dog", "7")):
        (images / name).rename(images / other)
    data = open_data(f"folder:{images}", network(2))
    (images / "03").mkdir()
    (images / "3").rename(images / "03" / "7")
    (images / "7").rename(images / "03" / "new")
    assert open_inputs(images, data.preprocessing).targets == [*[("7",)] * 5, *[("3",)] * 5]


@pytest.mark.parametrize("kind", FORMATS)
def test_the_first_bytes_tell_an_image(kind: str) -> None:
    content = encoded(kind)
    assert begins_as_image(content[:64])
    assert not begins_as_image(b"x" + content[:64])


def test_a_file_without_a_suffix_is_predicted_by_its_content(images: Path) -> None:
    data = open_data(f"folder:{images}", network(2))
    (images / "new").write_bytes(encoded("WEBP"))
    assert open_inputs(images / "new", data.preprocessing).names == ("new",)
    (images / "new.heic").write_bytes(encoded("WEBP"))
    with pytest.raises(UserError, match=r"the type '\.heic', which dptrain cannot read"):
        open_inputs(images / "new.heic", data.preprocessing)


# Paths in a specification.


def random_name(rng: np.random.Generator) -> str:
    pieces = ["?", ",", "%", "&", "=", "%3F", "%2c", "%25", ":", "a", "é", " ", "~", "50%", "#"]
    return "".join(rng.choice(pieces) for _ in range(rng.integers(1, 7)))


@pytest.mark.parametrize("block", tiered(range(4), (0,)))
def test_any_path_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    rng = np.random.default_rng(block)
    x, y = np.zeros((10, 2), np.float32), np.arange(10) % 2
    model = Network((2,), [Dense(2)], name="small")
    for index in range(50):
        name, other = random_name(rng), random_name(rng)
        assert unescape(escape(name)) == name
        folder = tmp_path / str(index) / name
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        np.save(folder / "x.npy", x)
        np.save(folder / f"{other}.npy", y)
        relative = f"npy:x.npy,./{escape(other)}.npy"
        for spec in (relative, absolute(relative), absolute(absolute(relative))):
            assert len(open_data(spec, model).train) == 8
        np.savez(folder / f"{name}.npz", x=x, y=y)
        spec = absolute(f"npz:./{escape(name)}.npz?fit=crop")
        monkeypatch.chdir(tmp_path)
        assert len(open_data(spec, model).train) == 8
        assert len(open_data(absolute(relative, folder), model).train) == 8


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("folder:q?m/f", ["no option 'm/f'", "question mark in a path as %3F"]),
        ("npy:a,b/x.npy,y.npy", ["3 files", "comma in a path as %2C"]),
        ("maps:a,b,c.csv?target=x", ["3 files", "comma in a path as %2C"]),
    ],
)
def test_how_to_write_a_path_is_in_the_message(spec: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        open_data(spec, network(2))
    assert not [word for word in words if word not in str(error.value)], error.value
