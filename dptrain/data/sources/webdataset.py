"""Images in tar files, ``webdataset:SHARDS``: the files of a sample have a common key.

The key of ``train/0001.jpg`` and ``train/0001.cls`` is ``train/0001``: a name up to its first dot,
as in the library webdataset. An index of all samples is made once from the headers of the archives;
then samples are read at their offset, in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.data.assembly import split_rows
from dptrain.data.base import Dataset
from dptrain.data.image_files.listing import NOT_IMAGES, SUFFIXES, LeftOut
from dptrain.data.image_files.tar_members import TarMember, tar_members
from dptrain.data.preprocessing.classes import coded_labels, labels_in
from dptrain.data.preprocessing.names import find_path
from dptrain.data.sources.arrays import all_names
from dptrain.data.sources.folder import check_network, dataset_of_images
from dptrain.data.spec import Request, existing, unescape
from dptrain.errors import UserError, shown

SUFFIX = ".tar"
LABELS = ("cls", "label")
"""Suffix of the file with the label of a sample, or the name of the label in its .json file."""
SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("val", "valid", "validation", "dev", "eval"),
}
"""Words in the name of a shard, or of its folder, that state its split."""
MOST_LABEL_BYTES = 1 << 20

_RANGE = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}")
_WHOLE = re.compile("-?[0-9]{1,18}")


class Sample(NamedTuple):
    """An image, and the text of its label."""

    image: TarMember
    label: str


def open_webdataset(request: Request) -> Dataset:
    """Open tar files, of which a sample is an image and a label with the same key.

    The path is an archive, ``name-{000..009}.tar`` or a folder of archives. A label is the content
    of a file ``.cls`` or the field ``label`` of a ``.json`` file, or what the option label names: a
    whole number or a name. If the names of shards, or of their folders, have the words train and
    test or val, they are the splits; otherwise dptrain chooses a fifth of the samples for the test.
    Images are converted as those of `dptrain.data.sources.folder.open_folder`.
    """
    where = unescape(request.path)
    check_network(request, where)
    shards, left_out = shard_paths(request), LeftOut(Path())
    splits = [
        [sample for shard in part for sample in _samples(shard, request, left_out)]
        for part in _splits(shards, where)
    ]
    if not all(splits):
        raise UserError(
            f"{where} has no samples{f' ({left_out})' if left_out.counts else ''}; expected files "
            "with a common name, such as 0001.jpg and 0001.cls"
        )
    targets, names = coded_labels(
        _targets([[sample.label for sample in part] for part in splits]),
        all_names(request, None),
        where,
    )
    images = [[sample.image for sample in part] for part in splits]
    parts: list[tuple[Sequence[TarMember], NDArray[Any]]]
    if len(splits) > 1:
        parts = list(zip(images, targets, strict=True))
    else:
        rows = split_rows(request, len(images[0]), where, labels_in(targets[0], where).values)
        parts = [([images[0][row] for row in part], targets[0][part]) for part in rows]
    return dataset_of_images(
        request if names is None else replace(request, names=names),
        parts,
        where,
        has_split=len(splits) > 1,
        notes=tuple(filter(None, [str(left_out)])),
    )


def shard_paths(request: Request) -> list[Path]:
    """Return the archives that the path of a specification names, in order."""
    path = find_path(Path(unescape(request.path)))
    if path.is_dir():
        inner = (each for each in path.rglob(f"*{SUFFIX}") if not each.name.startswith("."))
        found = sorted(inner, key=lambda each: each.parts)
        if not found:
            raise UserError(f"{path} has no files {SUFFIX}; expected a folder of them")
        return found
    texts = [str(path)] if path.exists() else _expand(str(path))
    return [existing(Path(text), "file") for text in texts]


def _expand(text: str) -> Iterator[str]:
    """Yield a path for each number of a range such as {000..009}."""
    found = _RANGE.search(text)
    if found is None:
        yield text
        return
    first, last = found.groups()
    if int(first) > int(last):
        raise UserError(f"{text}: the range {found[0]} is empty; expected {{{last}..{first}}}")
    width = len(first) if first.startswith("0") else 0
    for number in range(int(first), int(last) + 1):
        yield from _expand(f"{text[: found.start()]}{number:0{width}}{text[found.end() :]}")


def _splits(shards: Sequence[Path], where: str) -> list[list[Path]]:
    """Return the shards of training, test and perhaps validation; all in one list if not split."""
    base = Path(where) if Path(where).is_dir() else Path(where).parent
    found: dict[str, list[Path]] = {name: [] for name in (*SPLITS, "")}
    for shard in shards:
        inner = shard.relative_to(base) if shard.is_relative_to(base) else Path(shard.name)
        words = re.split("[^a-z]+", str(inner).lower())
        found[next((n for n, known in SPLITS.items() if set(words) & set(known)), "")].append(shard)
    train, *others = (found[name] for name in SPLITS)
    parts = [train, *filter(None, others)]
    if not train or len(parts) == 1:
        return [list(shards)]
    if found[""]:
        raise UserError(
            f"{found[''][0]} belongs to no split, but other shards are named train and test; "
            "expected one of these words, or val, in each name"
        )
    return parts


def _samples(shard: Path, request: Request, left_out: LeftOut) -> Iterator[Sample]:
    """Yield the samples of a shard in the order of their first files."""
    groups: dict[str, dict[str, TarMember]] = {}
    for member in tar_members(shard, left_out):
        folder, slash, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        files = groups.setdefault(f"{folder}{slash}{stem}", {})
        if suffix.lower() in files:
            raise UserError(f"{shard} has {shown(member.name)} twice; expected different names")
        files[suffix.lower()] = member
    names = [request.options["label"]] if "label" in request.options else LABELS
    with shard.open("rb") as archive:
        for key, files in groups.items():
            where = f"{shard}/{key}"
            image = _image(files, request.options.get("image", ""), where)
            label = next((name for name in names if name in files), "")
            if image is None and label:
                raise UserError(
                    f"{where} has {_listed(files)} but no image; expected an image with the same "
                    f"name, {', '.join(SUFFIXES)}"
                )
            used = [image, files.get(label or "json")] if image is not None else []
            for member in files.values():
                if member not in used:
                    left_out.add(Path(shard.name, member.name.lstrip("/")), NOT_IMAGES)
            if image is not None:
                yield Sample(image, _label(files, label, names, archive))


def _image(files: dict[str, TarMember], wanted: str, where: str) -> TarMember | None:
    """Return the image among the files of a sample."""
    if wanted:
        return files.get(wanted.lower())
    found = [suffix for suffix in files if f".{suffix.rpartition('.')[2]}" in SUFFIXES]
    if len(found) > 1:
        raise UserError(
            f"{where} has several images, {' and '.join(map(shown, found))}; name one: "
            f"image={shown(found[0])}"
        )
    return files[found[0]] if found else None


def _label(
    files: dict[str, TarMember], suffix: str, names: Sequence[str], archive: BinaryIO
) -> str:
    """Return the label of a sample: the content of a file, or a field of its .json file."""
    member = files.get(suffix or "json")
    expected = " or ".join(f".{name}, or .json with the field {name}" for name in names)
    if member is None:
        raise UserError(
            f"{next(iter(files.values()))} has no label: its files are {_listed(files)}; expected "
            f"{expected}"
        )
    value: Any = None
    if member.size <= MOST_LABEL_BYTES:
        content = member.read(archive)
        try:
            value = content.decode("utf-8").strip() if suffix else json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{member} cannot be read ({error}); expected a label") from None
    if not suffix:
        fields = value if isinstance(value, dict) else {}
        value = next((fields[name] for name in names if name in fields), None)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    text = str(value) if is_whole or isinstance(value, str) else ""
    if not text or not text.isprintable():
        raise UserError(
            f"{member} has no label ({shown(repr(value), 60)}); expected a whole number or the "
            f"name of a class in {expected}"
        )
    return text


def _listed(files: dict[str, TarMember]) -> str:
    return ", ".join(shown(f".{suffix}", 20) for suffix in list(files)[:5])


def _targets(labels: Sequence[Sequence[str]]) -> list[NDArray[Any]]:
    """Return the labels of all splits as integers, or as texts unless all are integers."""
    are_whole = all(_WHOLE.fullmatch(label) for part in labels for label in part)
    return [np.array(part, np.str_).astype(np.int64 if are_whole else np.str_) for part in labels]
