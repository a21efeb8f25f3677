"""Each cell of the table of launchers, if its launcher is on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.tools.reference import launcher_table
from dptrain.toml import read_toml
from tests.launchers.jobs import find_launcher, run_event
from tests.launchers.table import FILE, SAVED, SLURM, Cell, cells, check, is_silent


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: MPI libraries put sockets there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell, id=f"{cell.launcher}-{cell.event}", marks=() if cell.quick else pytest.mark.more
        )
        for cell in cells()
        if cell.launcher not in SLURM
    ],
)
def test_a_job_ends_as_the_table_states(cell: Cell, folder: Path) -> None:
    launcher = find_launcher(cell.launcher, folder)
    if launcher.missing:
        pytest.skip(launcher.missing)
    outcome = run_event(launcher, cell.event, folder)
    for attempt in ("2", "3"):
        if not is_silent(cell, outcome):
            break
        (folder / attempt).mkdir()
        outcome = run_event(launcher, cell.event, folder / attempt)
    check(cell, outcome)


def test_the_table_is_complete_and_on_the_page() -> None:
    table, page = read_toml(FILE), launcher_table()
    launchers, events = table["launchers"], table["events"]
    found = list(cells())
    assert {cell.launcher for cell in found} == {
        key for key, launcher in launchers.items() if "observed" in launcher
    }
    assert all(
        ("observed" in launcher) != ("reason" in launcher) for launcher in launchers.values()
    )
    assert {cell.saved for cell in found} == set(SAVED)
    assert len({event["key"] for event in events}) == len(events)
    for event in events:
        main = {"none"} if event["key"] == "SIGTERM-all" else set()
        assert set(event["cells"]) >= {"mpich5", "openmpi5"} | main, event["key"]
        assert set(event.get("quick", ())) <= set(event["cells"])
        assert page.count(f"| {event['title']} |") == 1
    for cell in found:
        assert f"{cell.code}, {cell.saved}" in page
