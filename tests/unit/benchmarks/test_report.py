"""Results on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import Results, write

pytestmark = pytest.mark.more


def test_a_later_run_of_the_day_leaves_the_earlier_one_alone(tmp_path: Path) -> None:
    paths = [
        write(Results({"date": "2026-01-02T03:04+00:00", "run": run}), tmp_path) for run in "abc"
    ]
    assert [path.name for path, _ in paths] == [
        "cpu-2026-01-02.json",
        "cpu-2026-01-02-2.json",
        "cpu-2026-01-02-3.json",
    ]
    for run, pair in zip("abc", paths, strict=True):
        assert all(f"run: {run}" in path.read_text() or f'"{run}"' in path.read_text()
                   for path in pair)  # fmt: skip
