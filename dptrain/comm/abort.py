"""Failing with one voice: the first cause is named once, with its rank, and no rank stays behind.

What ends a job, and who says so:

- an exception, `sys.exit`, or a crash of a thread: that rank's `guard` prints and calls MPI_Abort;
- a mistake that all ranks agreed on: rank 0 prints, every rank exits with 2 in good order;
- SIGKILL, `os._exit`, a segmentation fault: the node's helper (`dptrain.comm.watch`) names the
  rank; the launcher ends the others, or the helper those of its node that the launcher leaves
  alone; on several nodes, each node's helper may name its first;
- a rank that hangs or is stopped: the others' waits end after `World.timeout`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from dptrain.comm.job import Job, current_job, last_words
from dptrain.comm.launcher import find_launch
from dptrain.comm.world import AgreedError, World
from dptrain.errors import UserError
from dptrain.memory import memory_user_error

_JOIN_S = 5.0
_SECOND_S = 3.0
_DELIVERY_S = 0.5
"""MPICH's mpirun forgets what it has not read yet of the output of ranks that abort."""


def guard(main: Callable[[], int]) -> int:
    """Run a command; whatever happens in it on any rank, the whole job ends and says why once.

    A regular end is a return: of many ranks, `sys.exit` inside `main`, with 0 too, counts as
    leaving the others alone.

    Args:
        main: the command; returns its exit code.

    Returns:
        Exit code, for `sys.exit`: 2 for a user's mistake. Where other ranks would be left
        waiting, there is no return: MPI_Abort ends this rank too.
    """
    with contextlib.suppress(RuntimeError, OSError):  # No stderr, or none with a descriptor.
        faulthandler.enable()
    previous = threading.excepthook
    threading.excepthook = _thread_failed
    try:
        return main()
    except MemoryError as error:
        return _fail(memory_user_error(error))
    except BaseException as error:
        return _fail(error)
    finally:
        threading.excepthook = previous


def _thread_failed(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
        os._exit(_fail(arguments.exc_value))


def _fail(error: BaseException) -> int:
    job = current_job()
    if job is not None:
        if not isinstance(error, AgreedError):
            _end(job, error)
        if job.rank == 0:
            _print(describe(error, 0, 1))
        return exit_code(error)
    if find_launch().size == 1 or "mpi4py.MPI" in sys.modules:
        return _leave(error)
    return _fail_before_mpi(error)


def _fail_before_mpi(error: BaseException) -> int:
    """Other ranks may be on their way into MPI and would wait there for ever: meet them there."""
    launch = find_launch()
    text = describe(error, launch.rank, launch.size)
    try:
        with last_words(_JOIN_S, text):
            if isinstance(error, UserError):
                World.connect(error=error)
            else:
                World.join(2 * _JOIN_S)
    except UserError as other:
        if current_job() is not None:
            return _fail(other)
    job = current_job()
    if job is not None:
        _end(job, error)
    return _leave(error)


def _leave(error: BaseException) -> int:
    """Print and give the exit code, where nobody waits.

    Without MPI, many processes with the same mistake are told apart by the launcher's word alone:
    the first one speaks.
    """
    if isinstance(error, SystemExit) and not error.code:
        return 0
    silent = isinstance(error, UserError) and find_launch().rank > 0
    if not silent and not (isinstance(error, SystemExit) and isinstance(error.code, int)):
        _print(describe(error, 0, 1))
    return exit_code(error)


def _end(job: Job, error: BaseException) -> NoReturn:
    """Print unless another rank has, and take all ranks down."""
    from mpi4py import MPI

    # Ranks of other nodes cannot see this node's claim: the first node has the first word.
    time.sleep(min(0.25 * job.node, 2.0))
    if job.claim():
        _print(describe(error, job.rank, job.size))
        time.sleep(_DELIVERY_S)
    else:
        time.sleep(_SECOND_S)  # Who claimed is about to print, and to end this rank too.
    MPI.COMM_WORLD.Abort(exit_code(error))
    os._exit(exit_code(error))


def exit_code(error: BaseException) -> int:
    """2 for a user's mistake, 130 for Ctrl-C, what `sys.exit` said unless that was 0, else 1."""
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1
    return 1


def describe(error: BaseException, rank: int, size: int) -> str:
    """What is printed: the traceback of a bug, then one line with the cause and, of many, the rank.

    Example:
        >>> describe(UserError("batch size is 0; expected at least 1"), 2, 4).strip()
        'dptrain: rank 2 of 4: batch size is 0; expected at least 1'
    """
    prefix = f"dptrain: rank {rank} of {size}: " if size > 1 else "dptrain: "
    if isinstance(error, UserError):
        return f"{prefix}{error}\n"
    if isinstance(error, KeyboardInterrupt):
        return f"{prefix}interrupted\n"
    if isinstance(error, SystemExit):
        reason = f"sys.exit({error.code!r}) in the middle of the run" if size > 1 else error.code
        return f"{prefix}{reason}\n"
    summary = traceback.TracebackException.from_exception(error)
    cause = list(summary.format_exception_only())
    trace = list(summary.format())[: -len(cause)]
    return f"{''.join(trace)}{prefix}{''.join(cause)}"


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
