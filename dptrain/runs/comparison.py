"""Runs side by side: the settings in which they differ, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dptrain.runs.records import RESULTS, Record

ABOUT = ("run", "started", "state", "tags", "note", "host", "cpu", "digest")
"""Names that differ between most runs and are no settings."""

MEASURED = ("steps", *RESULTS, "step_ms", "memory_bytes")
"""Names of results, which a comparison always shows if a run has them."""


@dataclass(frozen=True)
class Comparison:
    """Values of several runs by name, in the order of the runs.

    Attributes:
        runs: directories of the runs.
        settings: settings and versions that are not the same in all runs.
        results: results that at least one run has.
    """

    runs: tuple[str, ...]
    settings: dict[str, tuple[Any, ...]]
    results: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Comparison:
        """Compare runs by their records."""
        names = list(dict.fromkeys(name for record in records for name in record))

        def values(name: str) -> tuple[Any, ...]:
            return tuple(record.get(name) for record in records)

        settings = [name for name in names if name not in (*ABOUT, *MEASURED)]
        return cls(
            runs=tuple(str(record["run"]) for record in records),
            settings={n: values(n) for n in settings if len(set(map(str, values(n)))) > 1},
            results={n: values(n) for n in MEASURED if any(v is not None for v in values(n))},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"runs": self.runs, "settings": self.settings, "results": self.results}
