"""Files in tar archives, which are read at their offset and never extracted."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from dptrain.data.image_files.listing import HIDDEN, SPECIAL, LeftOut
from dptrain.errors import UserError, shown
from dptrain.files import require_regular

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""First bytes of archives that were compressed by gzip, bzip2, xz or zstd."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file in an archive; it is opened as a path is.

    Attributes:
        archive: path of the archive.
        name: of the file in it.
        offset, size: of its content, in bytes.
    """

    archive: Path
    name: str
    offset: int
    size: int

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """Return the content, as a stream of bytes."""
        with self.archive.open(mode) as archive:
            return io.BytesIO(self.read(archive))

    def read(self, archive: BinaryIO) -> bytes:
        """Return the content from the open archive."""
        archive.seek(self.offset)
        return archive.read(self.size)

    def __str__(self) -> str:
        return f"{self.archive}/{self.name}"


ImageFile = Path | TarMember
"""What the decoder opens."""


def tar_members(archive: Path, left_out: LeftOut) -> list[TarMember]:
    """Return the regular files of an archive, in their order.

    Args:
        archive: path of the archive, which is not compressed.
        left_out: counts hidden files, links and devices.

    Raises:
        UserError: the archive is damaged, incomplete or compressed, or has a sparse file; one line
            that names it.
    """
    require_regular(archive)
    try:
        with archive.open("rb") as stream:
            if stream.read(8).startswith(_COMPRESSED):
                raise tarfile.TarError("it is compressed, so that files have no offset")
            stream.seek(0)
            with tarfile.open(fileobj=stream, mode="r:") as opened:
                found = list(_regular_files(opened, archive, left_out))
                _check_end(stream, opened.offset)
        return found
    # Numbers in a damaged header may be anything.
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        raise UserError(
            f"{archive} cannot be read as tar ({shown(str(error), 200)}); expected a complete "
            "archive without compression"
        ) from None


def _regular_files(
    opened: tarfile.TarFile, archive: Path, left_out: LeftOut
) -> Iterator[TarMember]:
    for info in opened:
        place = Path(archive.name, info.name.lstrip("/"))
        if info.size < 0 or info.issparse():
            kind = "is a sparse file" if info.issparse() else f"has {info.size} bytes"
            raise tarfile.TarError(f"{shown(info.name)} {kind}")
        if info.isdir():
            continue
        if place.name.startswith("."):
            left_out.add(place, HIDDEN)
        elif not info.isreg():
            left_out.add(place, SPECIAL)
        else:
            yield TarMember(archive, info.name, info.offset_data, info.size)


def _check_end(stream: BinaryIO, end: int) -> None:
    """Raise `TarError` unless the rest of an archive is zero: `tarfile` ends at any bad header."""
    stream.seek(end)
    rest = stream.read(_CHUNK)
    if len(rest) < tarfile.BLOCKSIZE:
        raise tarfile.TarError(f"it ends after {end:,} bytes without the mark of its end")
    while rest:
        if any(rest):
            raise tarfile.TarError(
                f"after {end:,} bytes there is a damaged header, or another archive"
            )
        rest = stream.read(_CHUNK)
