"""Files that are whole or not there, and JSON that every reader takes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.errors import UserError

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, by the string that stands for each."""


@contextmanager
def writing(path: Path, flag: str = "--run-dir") -> Iterator[None]:
    """Turn what the operating system refuses inside the block into one line about `path`.

    Args:
        path: what is written.
        flag: what chooses another place.

    Raises:
        UserError: in place of `OSError`: no space left, no permission, a read-only disk.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; "
            f"make room or mend its permissions, or choose another {flag}"
        ) from error


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's list of names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str | bytes, flag: str = "--run-dir") -> None:
    """Write a file so that, whenever the power fails, the old or the new one is there whole.

    Args:
        path, flag: as `writing` has them.
        text: contents; text is written as UTF-8.

    Raises:
        UserError: it cannot be written; the old file is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path, flag):
        try:
            partial.write_bytes(text.encode() if isinstance(text, str) else text)
            sync(partial)
            partial.replace(path)
            sync(path.parent)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON text; NaN and infinities, which JSON lacks, become strings.

    The strings are ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which Python's ``float`` and
    JavaScript's ``Number`` turn back into numbers, and so does `parse_json`.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def parse_json(text: str | bytes) -> Any:
    """Value of `text` written by `dump_json`, not-finite numbers included.

    Raises:
        ValueError: `text` is no JSON.
    """
    return _restored(json.loads(text))


def _finite(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
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
