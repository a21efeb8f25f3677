"""Faults that a user plans for a rehearsal: ``2@100`` is rank 2 after step 100."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from dptrain.errors import UserError, shown
from dptrain.runs.incidents import Incident
from dptrain.survival.local_ranks import LocalRanks
from dptrain.tables import Table


@dataclass(frozen=True)
class PlannedFault:
    """A signal to a rank.

    Attributes:
        signal: SIGKILL, which ends it, or SIGSTOP, after which it hangs.
        rank: the rank.
        step: last step before the signal, at least.
    """

    signal: signal.Signals
    rank: int
    step: int

    def __str__(self) -> str:
        verb = "kill" if self.signal == signal.SIGKILL else "stop"
        return f"{verb} {self.rank}@{self.step}"


def parse_fault(text: str, number: signal.Signals, ranks: int) -> PlannedFault:
    """Return the fault that a text describes.

    Args:
        text: such as ``2@100``.
        number: the signal.
        ranks: number of ranks.

    Raises:
        UserError: the text is not of this form, or there is no such rank.

    Example:
        >>> str(parse_fault("2@100", signal.SIGKILL, 4))
        'kill 2@100'
    """
    found = re.fullmatch(r"(\d{1,9})@(\d{1,18})", text)
    flag = "--kill" if number == signal.SIGKILL else "--stop"
    if found is None:
        raise UserError(f"{flag} is '{shown(text)}'; expected RANK@STEP, such as 1@100")
    rank, step = map(int, found.groups())
    if rank >= ranks:
        raise UserError(f"{flag} is {text}, but the ranks are 0 to {ranks - 1}")
    return PlannedFault(number, rank, step)


class Rehearsal:
    """Makes planned faults, each once.

    Args:
        faults: the faults.
    """

    def __init__(self, faults: Sequence[PlannedFault]) -> None:
        self._left = sorted(faults, key=lambda fault: fault.step)

    @property
    def left(self) -> tuple[PlannedFault, ...]:
        """The faults that were not made."""
        return tuple(self._left)

    def act(self, ranks: LocalRanks, step: int | None) -> None:
        """Make the faults that are due.

        Args:
            ranks: those that run.
            step: last complete step; None if it is unknown.
        """
        for fault in self.left:
            pid = ranks.process_of(fault.rank)
            if step is not None and step >= fault.step and pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, fault.signal)
                self._left.remove(fault)


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
