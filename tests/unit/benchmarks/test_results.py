"""Stored results belong to a page or a program, and are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.report import Report
from benchmarks.tables import tables_of

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"

MAX_BYTES = 150_000
"""Largest size of a file; larger ones are compressed."""


def test_every_result_is_cited() -> None:
    pages = [
        *(RESULTS / "log").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docs").rglob("*.py"),
    ]
    pages.append(ROOT / "README.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    cited = set(re.findall(r"([a-z]+[a-z0-9-]*)\.(?:md|json|svg|csv)", text))
    stored = {path.name.partition(".")[0] for path in RESULTS.iterdir() if path.is_file()}
    assert sorted(stored - cited) == [], "results that no page or log cites are deleted"


def test_results_are_small() -> None:
    large = [path.name for path in RESULTS.rglob("*") if path.stat().st_size > MAX_BYTES]
    assert not large


@pytest.mark.parametrize(
    "path",
    sorted([*RESULTS.glob("node-*.json*"), *RESULTS.glob("gpu-*.json")]),
    ids=lambda path: path.name,
)
def test_results_of_nodes_and_gpus_are_read(path: Path) -> None:
    report = Report.read(path)
    # Stages and layers of earlier versions have no tables.
    assert tables_of(report) or report.rows.keys() <= {"stages", "layers"}
    assert report.rows
