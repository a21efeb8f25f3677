"""Faults that a run outlived, in the file ``incidents.json`` of its directory.

`dptrain train --survive` adds one when it starts the ranks again. It follows a run by its progress,
the file ``.progress``, which rank 0 writes about once a second.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dptrain.files import read_regular, write_whole, writing
from dptrain.forms import form_of, read_object
from dptrain.records import from_values
from dptrain.runs.names import INCIDENTS

PROGRESS = ".progress"

_LINE_BYTES = 200


@dataclass(frozen=True)
class Incident:
    """A fault after which the ranks were started again.

    Attributes:
        time: when the ranks had ended, in ISO format.
        cause: what dptrain or the launcher printed.
        rank, host: of the process that failed; None if unknown.
        step: last step that was complete; None if unknown.
        ranks: number of ranks before.
        ranks_after: number of ranks that continue.
        steps_lost: steps that are made again.
        seconds_lost: from the last complete step until the first one after it.
    """

    time: str
    cause: str
    rank: int | None
    host: str | None
    step: int | None
    ranks: int
    ranks_after: int
    steps_lost: int = 0
    seconds_lost: float = 0.0

    def __str__(self) -> str:
        parts = [f"rank {self.rank}" if self.rank is not None else "a rank or the launcher"]
        parts += [f"on {self.host}"] if self.host is not None else []
        parts += [f"after step {self.step}"] if self.step is not None else []
        return f"{' '.join(parts)}: {self.cause}"


def read_incidents(folder: Path) -> list[Incident]:
    """Return the incidents of a run directory, the oldest first; none without a file.

    Raises:
        UserError: the file is damaged.
    """
    if not (folder / INCIDENTS).exists():
        return []
    found = read_object(folder / INCIDENTS, {"incidents": [form_of(Incident)]})
    return [from_values(Incident, values) for values in found["incidents"]]


def write_incidents(folder: Path, incidents: Sequence[Incident]) -> None:
    """Write the incidents of a run directory.

    Raises:
        UserError: the file cannot be written.
    """
    values = {"incidents": [asdict(incident) for incident in incidents]}
    write_whole(folder / INCIDENTS, json.dumps(values, indent=1) + "\n")


def summary_line(incidents: Sequence[Incident]) -> str:
    """Return the number of incidents and what they cost; "" if there are none.

    Example:
        >>> lost = {"steps_lost": 3, "seconds_lost": 2.5}
        >>> one = Incident("2026-01-01", "killed", 1, "a", 40, 4, 4, **lost)
        >>> summary_line([one, one])
        '2 restarts after faults cost 6 steps and 5.0 s'
    """
    if not incidents:
        return ""
    steps = sum(each.steps_lost for each in incidents)
    seconds = sum(each.seconds_lost for each in incidents)
    count = len(incidents)
    restarts = f"{count} restart{'s' * (count > 1)} after {'faults' if count > 1 else 'a fault'}"
    return f"{restarts} cost {steps} step{'s' * (steps != 1)} and {seconds:.1f} s"


@dataclass(frozen=True)
class RunProgress:
    """What rank 0 reports about one start of a run.

    Attributes:
        step: last complete step.
        first_step: number of steps that were complete when it started.
        steps_lost: steps after `first_step` that the start before had completed.
        resumed_s: seconds from the last complete step of the start before to the first one of this
            start; 0 if unknown.
        batches: number of minibatches that rank 0 has evaluated.
    """

    step: int
    first_step: int
    steps_lost: int = 0
    resumed_s: float = 0.0
    batches: int = 0


class ProgressFile:
    """The file `PROGRESS` of a run directory.

    Its length is fixed, so that a reader finds a whole line although it is overwritten in place.

    Args:
        folder: the run directory.

    Raises:
        UserError: the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / PROGRESS
        with writing(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write(self, progress: RunProgress) -> None:
        """Replace the content; a full disk is ignored, because the next write may succeed."""
        with suppress(OSError):
            line = json.dumps(asdict(progress)).ljust(_LINE_BYTES - 1) + "\n"
            os.pwrite(self._file, line.encode(), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_progress(folder: Path) -> RunProgress | None:
    """Return the progress of the present start of a run; None if it has not made a step."""
    with suppress(OSError, ValueError, TypeError):
        values: Mapping[str, Any] = json.loads(read_regular(folder / PROGRESS, 1024))
        return RunProgress(**values)
    return None


def forget_progress(folder: Path) -> None:
    """Delete the progress of the start before."""
    with suppress(OSError):
        (folder / PROGRESS).unlink()
