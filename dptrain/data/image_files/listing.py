"""The image files of a folder, and what is left out of it and why.

Training, evaluation, prediction and checks find images with `find_images`, so that they agree.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dptrain.errors import UserError, shown
from dptrain.files import require_regular

SUFFIXES = (
    ".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".bmp", ".dib", ".gif", ".ppm",
    ".pgm", ".pbm", ".pnm", ".tif", ".tiff", ".webp", ".avif",
)  # fmt: skip
"""Files with these suffixes, in upper or lower case, are images; others are if they begin so."""
UNREADABLE_SUFFIXES = (
    ".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpx", ".svg", ".psd", ".tga", ".ico",
    ".exr", ".hdr", ".dcm", ".dng", ".nef", ".cr2", ".cr3", ".arw", ".orf", ".rw2", ".raf",
)  # fmt: skip
"""Suffixes of images that dptrain does not read. Raw photographs begin as TIFF files do."""
TYPES = "PNG, JPEG, BMP, GIF, PPM, PGM, PBM, TIFF, WebP or AVIF"

_HEAD_BYTES = 64
_HEADS = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*|II\+\0|MM\0\+|RIFF.{4}WEBP"
    rb"|.{4}ftypavi[fs]|BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0"
    rb"|P[1-6]\s+(#[^\n]*\n\s*)*\d+\s",
    re.DOTALL,
)
"""The first bytes of files of the types that dptrain reads."""

HIDDEN = "hidden"
NOT_IMAGES = "no images"
UNREADABLE = "images of types that dptrain does not read"
BROKEN = "broken links"
SPECIAL = "no regular files"
REPEATED = "links to folders that are read already"
OUTSIDE = "images outside of the folders of classes"
NO_SPLIT = "images in folders that are no split"
_BY_SUFFIX = (NOT_IMAGES, UNREADABLE)
"""Reasons that are reported with the suffixes of the files."""
_MOST_SUFFIXES = 4


@dataclass
class LeftOut:
    """Files of a folder that are not used, counted by reason.

    Attributes:
        folder: the names of files are relative to it.
        counts: number of files for each reason.
        suffixes: for some reasons, the number of files for each suffix.
        first: the first file for each reason.
    """

    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    suffixes: dict[str, Counter[str]] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, path: Path, reason: str) -> None:
        """Count a file."""
        self.counts[reason] += 1
        self.suffixes.setdefault(reason, Counter())[path.suffix.lower() or "no suffix"] += 1
        self.first.setdefault(reason, path.relative_to(self.folder).as_posix())

    def __str__(self) -> str:
        """Return a line such as "3 files are left out: no images: 2 (2 .txt); hidden: 1 (.git)".

        It is empty if every file is used.
        """
        total = self.counts.total()
        if not total:
            return ""
        parts = [
            f"{reason}: {count:,} ({self._example(reason)})"
            for reason, count in sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        ]
        files = "1 file is" if total == 1 else f"{total:,} files are"
        return f"{files} left out: {'; '.join(parts)}"

    def _example(self, reason: str) -> str:
        if reason not in _BY_SUFFIX:
            return shown(self.first[reason], 60)
        found = self.suffixes[reason].most_common()
        parts = [f"{count:,} {shown(suffix, 20)}" for suffix, count in found[:_MOST_SUFFIXES]]
        return ", ".join(parts) + (", …" if len(found) > _MOST_SUFFIXES else "")


def is_image(path: Path) -> bool:
    """Return True if a file is an image by its suffix, or by its first bytes.

    Raises:
        OSError: the file must be opened and cannot be.
    """
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        return True
    if suffix in UNREADABLE_SUFFIXES:
        return False
    require_regular(path)
    with path.open("rb") as file:
        return begins_as_image(file.read(_HEAD_BYTES))


def begins_as_image(head: bytes) -> bool:
    """Return True if a file with these first bytes has one of the types in `TYPES`.

    Example:
        >>> begins_as_image(b"GIF89a"), begins_as_image(b"GIF is a format")
        (True, False)
    """
    return _HEADS.match(head) is not None


def find_images(folder: Path, left_out: LeftOut, root: Path | None = None) -> list[Path]:
    """Return the image files in a folder and in its sub-folders, in the order of their names.

    Files and folders whose names begin with a dot are left out. Links are followed, but no folder
    is read twice.

    Args:
        folder: to read.
        left_out: counts the files that are no images.
        root: folder that contains `folder`; links to it are not followed. None: `folder`.

    Raises:
        OSError: a folder or a file cannot be read.
    """
    found = []
    for path, reason in _files(folder, root or folder):
        if reason:
            left_out.add(path, reason)
        else:
            found.append(path)
    return sorted(found, key=lambda path: path.parts)


def count_unused(path: Path, left_out: LeftOut, reason: str = OUTSIDE) -> None:
    """Count a file that is not used, or the files of a folder; `reason` is that of images."""
    if path.name.startswith("."):
        left_out.add(path, HIDDEN)
    elif path.is_dir():
        for image in find_images(path, left_out):
            left_out.add(image, reason)
    else:
        left_out.add(path, _reason(path) or reason)


def _files(folder: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file and the reason for which it is left out, or ""."""
    known = {_identity(path) for path in (root.resolve(), *root.resolve().parents)}
    known.add(_identity(folder))
    pending = [folder]
    while pending:
        inner = pending.pop()
        with os.scandir(inner) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            path = inner / entry.name
            if entry.name.startswith("."):
                yield path, HIDDEN
            elif not _is_folder(entry, path):
                # The entry of a regular file needs no further access to the file system.
                yield path, _reason(path, is_regular=entry.is_file(follow_symlinks=False))
            elif (identity := _identity(path)) in known:
                yield path, REPEATED
            else:
                known.add(identity)
                pending.append(path)


def _is_folder(entry: os.DirEntry[str], path: Path) -> bool:
    # A link to itself is an error for the entry, and no folder for the path.
    return path.is_dir() if entry.is_symlink() else entry.is_dir()


def _reason(path: Path, *, is_regular: bool = False) -> str:
    """Return why a file is left out, or ""; `is_regular` if it is known to be a regular file."""
    if not is_regular and not path.is_file():
        return BROKEN if path.is_symlink() and not path.exists() else SPECIAL
    if path.suffix.lower() in UNREADABLE_SUFFIXES:
        return UNREADABLE
    return "" if is_image(path) else NOT_IMAGES


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def sub_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden, in the order of their names."""
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


def no_images(folder: Path, left_out: LeftOut) -> UserError:
    """Return the error for a folder without images."""
    tail = f" ({left_out})" if left_out.counts else ""
    return UserError(f"{folder} has no images{tail}; expected {', '.join(SUFFIXES)}")
