"""Faults that a user plans for a rehearsal: ``2@100`` is rank 2 after step 100."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dptrain.errors import UserError, shown
from dptrain.files import FULL_DISK_FILE, FULL_DISK_OF
from dptrain.runs.incidents import Incident
from dptrain.survival.local_ranks import LocalRanks
from dptrain.tables import Table

KILL, STOP, FULL_DISK = "kill", "stop", "full-disk"

_SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP}


@dataclass(frozen=True)
class PlannedFault:
    """A fault of a rehearsal.

    Attributes:
        kind: `KILL`, which ends a rank; `STOP`, after which it hangs; or `FULL_DISK`, after which
            no file of the run directory can be written until the ranks have ended.
        step: last step before the fault, at least.
        rank: the rank; None for `FULL_DISK`.
    """

    kind: str
    step: int
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.step if self.rank is None else f'{self.rank}@{self.step}'}"


def parse_fault(kind: str, text: str, ranks: int) -> PlannedFault:
    """Return the fault that a text describes.

    Args:
        kind: as in `PlannedFault`.
        text: such as ``2@100``; the step alone for `FULL_DISK`.
        ranks: number of ranks.

    Raises:
        UserError: the text is not of this form, or there is no such rank.

    Example:
        >>> str(parse_fault("kill", "2@100", 4))
        'kill 2@100'
    """
    form = r"()(\d{1,18})" if kind == FULL_DISK else r"(\d{1,9})@(\d{1,18})"
    found = re.fullmatch(form, text)
    if found is None:
        expected = "STEP, such as 100" if kind == FULL_DISK else "RANK@STEP, such as 1@100"
        raise UserError(f"--{kind} is '{shown(text)}'; expected {expected}")
    rank = int(found[1]) if found[1] else None
    if rank is not None and rank >= ranks:
        raise UserError(f"--{kind} is {text}, but the ranks are 0 to {ranks - 1}")
    return PlannedFault(kind, int(found[2]), rank)


class Rehearsal:
    """Makes planned faults, each once.

    Args:
        faults: the faults.
        run_dir: the run directory, which `FULL_DISK` concerns.
    """

    def __init__(self, faults: Sequence[PlannedFault], run_dir: Path) -> None:
        self._left = sorted(faults, key=lambda fault: fault.step)
        self._full_disk = run_dir.absolute() / FULL_DISK_FILE

    @property
    def left(self) -> tuple[PlannedFault, ...]:
        """The faults that were not made."""
        return tuple(self._left)

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Let files of the run directory be refused while the disk seems full, also in ranks."""
        if any(fault.kind == FULL_DISK for fault in self._left):
            os.environ[FULL_DISK_OF] = str(self._full_disk.parent)
        try:
            yield
        finally:
            self.free_disk()
            os.environ.pop(FULL_DISK_OF, None)

    def act(self, ranks: LocalRanks, step: int | None) -> None:
        """Make the faults that are due.

        Args:
            ranks: those that run.
            step: last complete step; None if it is unknown.
        """
        for fault in self.left:
            if step is None or step < fault.step:
                continue
            if fault.rank is None:
                self._full_disk.touch()
            elif (pid := ranks.process_of(fault.rank)) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, _SIGNALS[fault.kind])
            else:
                continue
            self._left.remove(fault)

    def free_disk(self) -> bool:
        """Let the disk have space again; return True if it seemed full."""
        was_full = self._full_disk.exists()
        self._full_disk.unlink(missing_ok=True)
        return was_full


def incidents_table(incidents: Sequence[Incident]) -> Table:
    """Return what was noticed of faults, and what each has cost."""
    names = ("after step", "cause", "ranks", "steps made again", "time lost (s)")
    rows = [
        (
            "" if each.step is None else str(each.step),
            each.cause if each.rank is None else f"rank {each.rank}: {each.cause}",
            str(each.ranks) if each.ranks == each.ranks_after else (
                f"{each.ranks}, then {each.ranks_after}"
            ),
            str(each.steps_lost),
            f"{each.seconds_lost:.1f}",
        )
        for each in incidents
    ]  # fmt: skip
    return Table.of_rows("Restarts after faults", names, rows, text=("cause",))
