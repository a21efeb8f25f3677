"""Results on disk: one JSON file for each kind of machine, rewritten after each measurement."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dptrain.files import write_whole

FOLDER = Path(__file__).resolve().parents[1] / "results" / "studies"

PARTIAL = "partial"
"""Key of values that a measurement has stored before its end; it is made again."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A stored result.

    Attributes:
        kind: kind of machine, such as ``cpu-16`` or ``gpu-h100``.
        name: name of the measurement.
        about: machine, versions, date, load.
        values: what was measured.
    """

    kind: str
    name: str
    about: Mapping[str, Any]
    values: Mapping[str, Any] = field(repr=False)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of a folder, and hold it in the context."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Store:
    """The results in a folder.

    Args:
        folder: created with the first result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, kind: str) -> dict[str, Record]:
        """Return the records of a kind of machine by name of the measurement."""
        path = self._path(kind)
        if not path.exists():
            return {}
        found: dict[str, Record] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def add(
        self, kind: str, name: str, about: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        """Store a result; it replaces one of the same kind and name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Several processes may measure at the same time.
        with locked(self.folder):
            records = self.read(kind)
            records[name] = {"about": dict(about), "values": dict(values)}
            text = json.dumps(records, ensure_ascii=False, allow_nan=False)
            write_whole(self._path(kind), text + "\n", "--output")

    def merge(self, other: Store) -> list[str]:
        """Add the complete results of another store; return their names with the kind.

        A result replaces one of the same kind and name.
        """
        added = []
        for result in other.results():
            if not result.values.get(PARTIAL):
                self.add(result.kind, result.name, result.about, result.values)
                added.append(f"{result.kind}: {result.name}")
        return added

    def results(self) -> Iterator[Result]:
        """Yield all results of all kinds of machines."""
        for path in sorted(self.folder.glob("*.json")):
            for name, record in self.read(path.stem).items():
                yield Result(path.stem, name, record["about"], record["values"])

    def _path(self, kind: str) -> Path:
        return self.folder / f"{kind}.json"
