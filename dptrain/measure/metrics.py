"""`metrics.jsonl`: what a run measured, one JSON object a line, in the order it happened."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json, write_whole, writing


class MetricsFile:
    """Records by line; each line is handed to the operating system as soon as it is appended.

    A line is whole once its line break is there: a crash can tear the last one at most, and a
    torn line is ignored by `read` and dropped before anything is appended. Lines are strict JSON;
    `dptrain.files.dump_json` says how NaN and infinities are written.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._close: weakref.finalize[Any, Any] | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line.

        Raises:
            UserError: it cannot be written, for example because the disk is full.
        """
        line = f"{dump_json(record)}\n".encode()
        with writing(self.path):
            try:
                descriptor = self._open()
                while line:
                    line = line[os.write(descriptor, line) :]
            except OSError:
                self.close()  # The next append opens again and drops what was torn.
                raise

    def read(self) -> list[dict[str, Any]]:
        """Every whole record, oldest first; none where there is no file.

        Raises:
            UserError: a line that is not the torn last one is no JSON object.
        """
        return [self._parse(number, line) for number, line in enumerate(self._whole_lines(), 1)]

    def truncate_after(self, step: int) -> None:
        """Drop the records whose ``step`` is above `step`, which a resumed run makes again.

        Records without a ``step`` stay. A crash leaves the old or the new file whole.

        Raises:
            UserError: as `read`, or the file cannot be written.
        """
        self.close()
        lines = self._whole_lines()
        records = (self._parse(number, line) for number, line in enumerate(lines, 1))
        kept = [line for line, r in zip(lines, records, strict=True) if r.get("step", 0) <= step]
        if len(kept) < len(lines):
            write_whole(self.path, b"".join(kept).decode())

    def close(self) -> None:
        """Let go of the file; the next `append` opens it again."""
        if self._close is not None:
            self._close()
        self._descriptor = self._close = None

    def _open(self) -> int:
        """File descriptor to append to, opened once: on a shared disk, opening is slow."""
        if self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._close = weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, sum(map(len, self._whole_lines())))
            self._descriptor = descriptor
        return self._descriptor

    def _whole_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().splitlines(keepends=True)
        return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(
                f"{self.path}, line {number}: expected a JSON object, found "
                f"{line[:40].decode(errors='replace').rstrip()!r}; mend or remove that line"
            )
        return record
