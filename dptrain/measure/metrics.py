"""`metrics.jsonl`: the measurements of a run, one JSON object a line, in order of time."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dptrain.errors import UserError, shown
from dptrain.files import dump_json, parse_json, read_regular, write_whole, writing


class MetricsFile:
    """A file of records; each line is passed to the operating system as soon as it is appended.

    A line is complete once its line break is written. A crash can truncate only the last line;
    `read` ignores a truncated line, and it is dropped before the next one is appended. Lines are
    strict JSON; `dptrain.files.dump_json` describes how NaN and infinities are written.

    Args:
        path: the file; it need not exist.
        before_write: called before every write; it may refuse with an exception.
    """

    def __init__(self, path: Path, before_write: Callable[[], None] | None = None) -> None:
        self.path = path
        self._before_write = before_write
        self._descriptor: int | None = None
        self._close: weakref.finalize[Any, Any] | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one line.

        Raises:
            UserError: the line cannot be written, for example because the disk is full.
        """
        line = f"{dump_json(record)}\n".encode()
        with writing(self.path, check=self._before_write):
            try:
                descriptor = self._open()
                while line:
                    line = line[os.write(descriptor, line) :]
            except OSError:
                self.close()  # The next append opens the file again and drops the truncated line.
                raise

    def read(self) -> list[dict[str, Any]]:
        """Return every complete record, oldest first; an empty list if there is no file.

        Raises:
            UserError: the file cannot be read, or a complete line is not a JSON object.
        """
        lines = self._lines()
        return [self._parse(number, line) for number, line in enumerate(lines, 1)]

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps, which a resumed run writes again.

        Records without a ``step`` stay. After a crash the old or the new file is complete.

        Args:
            step: last step whose records stay.

        Raises:
            UserError: the file cannot be read or written, or a line is damaged.
        """
        if self._before_write is not None:
            self._before_write()
        self.close()
        lines = self._lines()
        records = (self._parse(number, line) for number, line in enumerate(lines, 1))
        kept = [line for line, r in zip(lines, records, strict=True) if r.get("step", 0) <= step]
        if len(kept) < len(lines):
            write_whole(self.path, b"".join(kept), check=self._before_write)

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._close is not None:
            self._close()
        self._descriptor = self._close = None

    def _open(self) -> int:
        """Return the file descriptor for appending; opening is slow on shared disks."""
        if self._descriptor is None:
            length = sum(map(len, self._whole_lines()))
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._close = weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, length)
            self._descriptor = descriptor
        return self._descriptor

    def _lines(self) -> list[bytes]:
        try:
            return self._whole_lines()
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error

    def _whole_lines(self) -> list[bytes]:
        try:
            content = read_regular(self.path)
        except FileNotFoundError:
            return []
        lines = content.splitlines(keepends=True)
        return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        text = shown(line[:200].decode(errors="replace").rstrip(), 40)
        if not isinstance(record, dict):
            raise UserError(
                f"{self.path}, line {number}: expected a JSON object, found '{text}'; "
                "correct or remove that line"
            )
        step = record.get("step", 0)
        if type(step) is not int:
            raise UserError(
                f"{self.path}, line {number}: step is {shown(repr(step), 40)}; expected a whole "
                "number; correct or remove that line"
            )
        return record
