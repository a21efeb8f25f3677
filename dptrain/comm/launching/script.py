"""Python scripts on many ranks: an exception that a script does not catch ends the whole job."""

from __future__ import annotations

import sys
from types import TracebackType


def end_job_on_exception() -> None:
    """Install an exception hook that reports the first cause once and ends all ranks.

    Without it, a rank that fails would leave the others waiting for it. The hook replaces
    `sys.excepthook`; calling this function again changes nothing.
    """
    if sys.excepthook is not _end_job:
        sys.excepthook = _end_job


def _end_job(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    from dptrain.comm.abort import fail

    # The interpreter then exits regularly with this code. `os._exit` would leave out the functions
    # that MPICH has registered for the end of the process, and its mpirun would kill other ranks.
    sys.exit(fail(error))
