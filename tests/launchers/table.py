"""The table of launchers and events, which is also on the page of exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dptrain.toml import read_toml
from tests.launchers.jobs import Outcome

FILE = Path(__file__).with_name("table.toml")

SLURM = ("srun-pmi2", "srun-pmix")
"""Launchers that tests/slurm tests."""

CAUSES = ("rank ", "SIGTERM ended", "SIGTERM while", "SIGUSR1 while", "interrupted")
"""Beginnings of texts that name why a job failed or was not trained."""

LOSES_CODE = "mpich4"
"""A launcher that may return 0 after a signal that it passed on (`tests.system.launch`)."""

KILLS_SOON = "openmpi5"
"""A launcher that kills ranks 0.25 s after a signal. On a busy machine no rank may run before, and
then none names the signal."""

SAVED = ("checkpoint", "result", "nothing", "perhaps")


@dataclass(frozen=True)
class Cell:
    """What is expected of one launcher after one event.

    Attributes:
        launcher, event: their keys.
        printed: texts that dptrain prints; empty if it prints nothing about the event.
        code: exit code of the launcher.
        saved: ``checkpoint``, ``result``, ``nothing``, or ``perhaps`` a checkpoint.
        quick: True if the quick tier tests it.
    """

    launcher: str
    event: str
    printed: tuple[str, ...]
    code: int
    saved: str
    quick: bool


def cells() -> Iterator[Cell]:
    """Yield every cell that has been observed."""
    for event in read_toml(FILE)["events"]:
        for launcher, (code, saved, *printed) in event["cells"].items():
            yield Cell(
                launcher,
                event["key"],
                tuple(filter(None, printed or event["printed"])),
                code,
                saved,
                launcher in event.get("quick", ()),
            )


def is_silent(cell: Cell, outcome: Outcome) -> bool:
    """Return whether the ranks were killed before one of them could name the signal."""
    starts = cell.event.endswith(("-starting", "-compiling"))
    return cell.launcher == KILLS_SOON and starts and not outcome.causes


def check(cell: Cell, outcome: Outcome) -> None:
    """Compare what happened with a cell."""
    is_lost = outcome.code == 0 and cell.launcher == LOSES_CODE and cell.code == 75
    assert outcome.code == cell.code or is_lost, f"code {outcome.code}\n{outcome.output}"
    if cell.saved == "perhaps":  # The launcher kills the ranks, perhaps in the middle of a line.
        return
    assert outcome.saved == cell.saved, outcome.output
    for text in cell.printed:
        assert text in outcome.output, outcome.output
    has_cause = any(text.startswith(CAUSES) for text in cell.printed)
    assert len(outcome.causes) == has_cause, outcome.output
    assert outcome.output.count("Traceback") == (cell.event == "exception")
    assert "Exception ignored" not in outcome.output
    is_stopped = cell.saved == "checkpoint" and cell.event != "SIGKILL-launcher"
    assert is_stopped <= ("stopped on request" in outcome.output)
