"""Incidents come back as they were written, and damaged files are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptrain.errors import UserError
from dptrain.runs.incidents import (
    Incident,
    ProgressFile,
    RunProgress,
    forget_progress,
    read_incidents,
    read_progress,
    summary_line,
    write_incidents,
)

INCIDENT = Incident("2026-11-30T14:00:00+00:00", "killed", 1, "node3", 40, 4, 3, 5, 2.5)


def test_incidents_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_incidents(tmp_path) == []
    unknown = Incident("2026-11-30T15:00:00+00:00", "the launcher ended", None, None, None, 3, 3)
    write_incidents(tmp_path, [INCIDENT, unknown])
    assert read_incidents(tmp_path) == [INCIDENT, unknown]
    assert summary_line([INCIDENT, unknown]) == "2 restarts after faults cost 5 steps and 2.5 s"
    (tmp_path / "incidents.json").write_text('{"incidents": [{"time": 3}]}')
    with pytest.raises(UserError, match=r"incidents\.json"):
        read_incidents(tmp_path)


def test_progress_is_replaced_in_place(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    file = ProgressFile(tmp_path)
    assert read_progress(tmp_path) is None
    for progress in (RunProgress(123456, 5, 7, 12.25), RunProgress(9, 5)):
        file.write(progress)
        assert read_progress(tmp_path) == progress
    file.close()
    forget_progress(tmp_path)
    assert read_progress(tmp_path) is None
