"""Runs side by side: the settings in which they differ, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptrain.runs.records import RESULTS, Record, read_spans
from dptrain.runs.spans import Spans

ABOUT = (
    "run", "started", "state", "resumed_after", "resumed", "incidents", "planned_steps", "tags",
    "note", "host", "cpu", "digest",
)  # fmt: skip
"""Names that differ between most runs and are no settings."""

MEASURED = ("steps", "selected_step", *RESULTS, "step_ms", "timed_steps", "memory_bytes")
"""Names of results, which a comparison always shows if a run has them. `steps` is the number of
completed steps, no setting."""


@dataclass(frozen=True)
class Comparison:
    """Values of several runs by name, in the order of the runs.

    Attributes:
        runs: directories of the runs.
        settings: settings and versions that are not the same in all runs.
        results: results that at least one run has.
        resumes: for each run, after which steps it was resumed and what changed then; else empty.
    """

    runs: tuple[str, ...]
    settings: dict[str, tuple[Any, ...]]
    results: dict[str, tuple[Any, ...]]
    resumes: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Sequence[Record]) -> Comparison:
        """Compare runs by their records."""
        names = list(dict.fromkeys(name for record in records for name in record))

        made = [read_spans(Path(str(record["run"]))) for record in records]

        def values(name: str) -> tuple[Any, ...]:
            return tuple(
                _value(record, spans, name) for record, spans in zip(records, made, strict=True)
            )

        settings = [name for name in names if name not in (*ABOUT, *MEASURED)]
        return cls(
            runs=tuple(str(record["run"]) for record in records),
            settings={n: values(n) for n in settings if len(set(map(str, values(n)))) > 1},
            results={n: values(n) for n in MEASURED if any(v is not None for v in values(n))},
            resumes=tuple(str(record.get("resumed") or "") for record in records),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "runs": self.runs,
            "settings": self.settings,
            "results": self.results,
            "resumes": self.resumes,
        }


def _value(record: Record, spans: Spans, name: str) -> Any:
    """Return a value of a record; all values of a setting that changed before the kept step."""
    selected = record.get("selected_step")
    kept = spans if selected is None else spans.until(selected)
    if name not in MEASURED and len({str(span.value(name)) for span in kept.items}) > 1:
        return spans.value_text(name, selected)
    return record.get(name)
