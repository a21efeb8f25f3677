"""Write files atomically, refuse to read special files, and convert values to strict JSON."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dptrain.errors import UserError

MAX_TEXT_BYTES = 64 * 2**20
"""Largest settings or manifest file that is read; real ones have a few kilobytes."""

FULL_DISK_OF = "_DPTRAIN_FULL_DISK_OF"
"""Environment variable with a folder that `dptrain rehearse` lets seem to be on a full disk, as
long as the folder has the file `FULL_DISK_FILE`."""

FULL_DISK_FILE = ".full_disk"

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, by the string that represents each."""

_ADVICE: dict[int | None, str] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or "),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "correct its permissions, or "),
}
"""What a user can do about an error when writing."""

_SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


@contextmanager
def writing(
    path: Path, flag: str = "--run-dir", check: Callable[[], None] | None = None
) -> Iterator[None]:
    """Convert an `OSError` inside the block to a one-line error about `path`.

    Args:
        path: file or directory that the block writes.
        flag: the flag that selects another location.
        check: called before the block and again after an `OSError`; it may raise a more precise
            error, for example that the directory was moved in the meantime.

    Raises:
        UserError: no space is left, a permission is missing, or the disk is read-only.
    """
    if check is not None:
        check()
    try:
        _refuse_if_rehearsed(path)
        yield
    except OSError as error:
        if check is not None:
            check()
        advice = f"{_ADVICE.get(error.errno, '')}choose another {flag}"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def _refuse_if_rehearsed(path: Path) -> None:
    """Raise the error of a full disk if a rehearsal requests it; see `FULL_DISK_OF`."""
    folder = Path(os.environ.get(FULL_DISK_OF) or os.devnull)
    if (folder / FULL_DISK_FILE).exists() and folder in path.absolute().parents:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sync(path: Path) -> None:
    """Wait until the contents of a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(
    path: Path, flag: str = "--run-dir", check: Callable[[], None] | None = None
) -> Iterator[Path]:
    """Write a file atomically: after a power failure the old or the new file is complete.

    The block writes to the path that it receives, which no other process uses. The file gets its
    name at the end of the block, unless that raises an error.

    Args:
        path: file to write.
        flag: the flag that selects another location, for the error message.
        check: see `writing`.

    Raises:
        UserError: the file cannot be written, or the path is a device, a pipe or a socket; an old
            file is unchanged.
    """
    _refuse_special(path, flag)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with writing(path, flag, check):
        try:
            yield partial
            sync(partial)
            partial.replace(path)
            sync(path.parent)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def _refuse_special(path: Path, flag: str) -> None:
    """Raise a `UserError` if a file would replace a device such as /dev/null, or a pipe."""
    with suppress(OSError):
        kind = _SPECIAL.get(stat.S_IFMT(path.stat().st_mode))
        if kind is not None:
            raise UserError(f"{path} is {kind}, which a file would replace; choose another {flag}")


def write_whole(
    path: Path,
    text: str | bytes,
    flag: str = "--run-dir",
    check: Callable[[], None] | None = None,
) -> None:
    """Write text or bytes to a file atomically.

    Args:
        path: file to write.
        text: contents; text is encoded as UTF-8.
        flag, check, errors: see `replacing`.
    """
    with replacing(path, flag, check) as partial:
        partial.write_bytes(text.encode() if isinstance(text, str) else text)


def require_regular(path: Path) -> int:
    """Return the size of a regular file in bytes without opening it.

    Opening a named pipe blocks, and reading /dev/zero never ends.

    Raises:
        OSError: the file does not exist, is a directory, or is a special file.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _SPECIAL.get(stat.S_IFMT(status.st_mode), "a special file")
        raise OSError(errno.EINVAL, f"it is {kind}; expected a regular file", str(path))
    return status.st_size


def read_regular(path: Path, limit_bytes: int | None = None) -> bytes:
    """Return the contents of a regular file.

    Args:
        path: the file; special files are refused before they are opened.
        limit_bytes: largest size that is read.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large.
    """
    size = require_regular(path)
    if limit_bytes is not None and size > limit_bytes:
        text = f"it has {size:,} bytes; expected at most {limit_bytes:,}"
        raise OSError(errno.EFBIG, text, str(path))
    return path.read_bytes()


def csv_of_rows(rows: Iterable[Iterable[Any]]) -> str:
    r"""Return rows as CSV.

    Example:
        >>> csv_of_rows([("name", "loss"), ("a, b", 0.5)])
        'name,loss\n"a, b",0.5\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def dump_json(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Return `value` as strict JSON; NaN and infinities, which JSON lacks, become strings.

    The strings are ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Python's ``float``, JavaScript's
    ``Number`` and `parse_json` convert them back to numbers.
    """
    finite = _finite(value)
    return json.dumps(finite, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def parse_json(text: str | bytes) -> Any:
    """Return the value of `text` written by `dump_json`, including NaN and infinities.

    Raises:
        ValueError: `text` is not JSON, or is nested too deeply.
    """
    try:
        return _restored(json.loads(text))
    except RecursionError:
        raise ValueError("the brackets are nested too deeply") from None


def _finite(value: Any) -> Any:
    if hasattr(value, "dtype"):
        value = value.item()  # A NumPy scalar; NumPy itself is not imported to start quickly.
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
