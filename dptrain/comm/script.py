"""Python scripts on many ranks: an exception that a script does not catch ends the whole job."""

from __future__ import annotations

import os
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
    from dptrain.comm.job import leave_job

    code = fail(error)
    # All ranks raise an agreed error, so all arrive here and can leave MPI in order.
    leave_job()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
