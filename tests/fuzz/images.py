"""Folders of images: formats, names, nesting, splits and damage."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dptrain.data import open_data
from dptrain.data.image_files.listing import SUFFIXES
from dptrain.errors import UserError
from tests.fuzz.conversion import (
    LUMA,
    Split,
    check_stratified,
    check_union,
    linear_network,
    read_split,
    resized,
    write_linear_network,
)
from tests.fuzz.damage import damage_file
from tests.fuzz.image_files import Written, write_image
from tests.fuzz.outcome import ACCEPTED, COMPARED, Outcome, call, expect, refused

CLASSES = ("cat", "dog", "0", "10", "2", "Ära", "a b", "B", "it's", "日本", "x.png", "train2")
FOLDERS = ("more", "2024", "a.jpg", "deep/er")
CLUTTER = ("notes.txt", ".hidden.png", "Thumbs.db", "labels.csv", ".DS_Store", ".git/a.png")
LAYOUTS = (("",), ("train", "test"), ("train", "val"), ("train", "test", "valid"))


@dataclass
class Case:
    """A folder of images.

    Attributes:
        files: each image with its split and class.
        classes: names in alphabetical order.
        splits: names of the folders of splits; "" if there are none.
        damaged: the damaged file, if there is one.
    """

    files: dict[Path, tuple[Written, str, str]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    splits: tuple[str, ...] = ("",)
    clutter: list[Path] = field(default_factory=list)
    damaged: Path | None = None


def trial(random: np.random.Generator, folder: Path) -> Outcome:
    """Open a folder, and compare pixels, classes and counts."""
    root = folder / "images"
    plain = bool(random.random() < 0.65)
    case = make_case(random, root, plain=plain)
    if random.random() < 0.3:
        case.damaged = list(case.files)[int(random.integers(len(case.files)))]
        damage_file(random, case.damaged)
    shape = (int(random.choice((1, 3))), *(int(random.integers(1, 13)) for _ in range(2)))
    network = folder / "linear.toml"
    write_linear_network(network, shape, len(case.classes), "classes")
    written = [each for each, _, _ in case.files.values()]
    must_fail = any(each.must_be_refused for each in written)
    may_fail = case.damaged is not None or must_fail or any(each.may_be_refused for each in written)
    described = call("data", "describe", f"folder:{root}", "--network", network, "--json")
    try:
        dataset = open_data(f"folder:{root}", linear_network(shape, len(case.classes), "classes"))
        splits = [read_split(dataset, part) for part in dataset.splits]
    except UserError as error:
        if not may_fail:
            return refused(str(error), is_valid=True)
        expect(described.code == 2, "`data describe` accepts what cannot be read")
        return _check_refusal(case, str(error))
    if described.code:
        return described.refusal(is_valid=not may_fail)
    if _is_known_by_content(case.damaged):
        return ACCEPTED  # Whether it is still an image is decided by its content.
    expect(not must_fail or case.damaged is not None, "an image of more than 8 bits is read")
    compare(case, shape, splits)
    compare_counts(case, described.output)
    return COMPARED if case.damaged is None else ACCEPTED


def _is_known_by_content(path: Path | None) -> bool:
    return path is not None and path.suffix.lower() not in SUFFIXES


def _check_refusal(case: Case, message: str) -> Outcome:
    """Check that the message names a file that may be refused."""
    candidates = [
        path for path, (written, _, _) in case.files.items()
        if written.may_be_refused or written.must_be_refused or path == case.damaged
    ]  # fmt: skip
    named = [path for path in candidates if str(path).encode().decode() in message]
    # Characters that cannot be printed are escaped.
    # A damaged image that is known by its content alone is no image any more, but is counted.
    is_counted = _is_known_by_content(case.damaged) and "left out" in message
    expect(
        bool(named) or is_counted or not all(path.name.isprintable() for path in candidates),
        f"the message names no file that is damaged or of an unusual format: {message}",
    )
    return refused(message)


def make_case(random: np.random.Generator, root: Path, *, plain: bool) -> Case:
    """Write a random folder of images."""
    count = int(random.integers(2, 5))
    names = tuple(sorted(random.permutation(CLASSES)[:count]))
    case = Case(classes=names, splits=LAYOUTS[int(random.choice(4, p=(0.55, 0.15, 0.15, 0.15)))])
    for split in case.splits:
        for name in names:
            _write_class(random, case, root / split / name, split, name, plain=plain)
    return case


def _write_class(
    random: np.random.Generator, case: Case, folder: Path, split: str, name: str, *, plain: bool
) -> None:
    folder.mkdir(parents=True)
    is_nested = bool(random.random() < 0.15)
    for number in range(int(random.integers(1, 5))):
        inner = folder
        if is_nested and random.random() < 0.5:
            inner = folder / FOLDERS[int(random.integers(len(FOLDERS)))]
            inner.mkdir(parents=True, exist_ok=True)
        partial = inner / "partial"
        written = write_image(random, partial, plain=plain)
        stem = ("{}", "img {}", "ü{}", "a?{}", "b,{}", "{}.x", "-{}", "#{}")[
            int(random.integers(8)) if random.random() < 0.3 else 0
        ].format(number)
        suffix = written.suffix
        if random.random() < 0.03:
            suffix = (".jpg", ".png", ".webp")[int(random.integers(3))]
        elif random.random() < 0.04:
            suffix = ""
        path = inner / f"{stem}{suffix}"
        partial.rename(path)
        case.files[path] = (written, split, name)
    if random.random() < 0.2:
        extra = folder / CLUTTER[int(random.integers(len(CLUTTER)))]
        extra.parent.mkdir(exist_ok=True)
        extra.write_bytes(b"nothing to see")
        case.clutter.append(extra)


def expected_input(written: Written, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the input of a network for an image; NaN if no rule determines it."""
    if written.pixels is None:
        return np.full(shape, np.nan)
    images = written.pixels.transpose(2, 0, 1)[None]
    if shape[0] == 1:
        images = sum(part * images[:, i : i + 1] for i, part in enumerate(LUMA))
    if images.shape[2:] != shape[1:]:
        images = resized(images, shape[1:])
    return np.asarray(images[0] * (2.0 / 255.0) - 1.0)


def compare(case: Case, shape: tuple[int, ...], splits: list[Split]) -> None:
    """Compare the samples of all splits with the pixels that were written."""
    names = case.splits if len(case.splits) > 1 else ("",)
    groups = [splits] if names == ("",) else [[split] for split in splits]
    expect(len(groups) == len(names), f"{len(splits)} splits are read")
    for name, found in zip(names, groups, strict=True):
        listed = [(path, w, c) for path, (w, s, c) in case.files.items() if s == name]
        # Those without known pixels fit any sample, and come after the others.
        listed.sort(key=lambda item: item[1].pixels is None or item[0] == case.damaged)
        x = np.stack([expected_input(written, shape) for _, written, _ in listed])
        y = np.array([case.classes.index(each) for _, _, each in listed])
        levels = np.array([
            np.inf if written.pixels is None or path == case.damaged else written.tolerance
            for path, written, _ in listed
        ])  # fmt: skip
        x[np.isinf(levels)] = 0.0
        # Grey pixels are rounded to a level.
        rows = check_union(found, (x, y), (levels + (0.6 if shape[0] == 1 else 0.0)) / 127.5 + 1e-5)
        if name == "" and len(y) >= 2:
            check_stratified(y, rows, len(found[0][0]))


def compare_counts(case: Case, output: str) -> None:
    """Compare the classes of `data describe` with the files."""
    described = json.loads(output)
    found: dict[str, int] = {}
    for part in described["splits"]:
        for name, count in part["classes"].items():
            found[name] = found.get(name, 0) + count
    expected = {name: sum(c == name for _, _, c in case.files.values()) for name in case.classes}
    expect(found == expected, f"classes {found}; expected {expected}")
    expect(tuple(described["classes"]) == case.classes, f"classes {described['classes']}")
