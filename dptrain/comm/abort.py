"""End the whole job if one rank fails, and print the first cause once, with its rank.

What ends a job, and who prints the cause:

- An exception, `sys.exit`, or an exception in a thread: the `guard` of that rank prints and calls
  MPI_Abort.
- A mistake that all ranks agreed on: rank 0 prints, and every rank exits with code 2.
- SIGKILL, `os._exit`, a segmentation fault: the watchdog of the node
  (`dptrain.comm.watchdog.watch`) names the rank. The launcher ends the other ranks; if it does not,
  the watchdog ends those of its node. The watchdogs of several nodes inform each other
  (`dptrain.comm.watchdog.node_links`).
- MPI_Abort does not return, for example because the launcher cannot be reached: the watchdog ends
  this rank after `_ABORT_S`, and then the other ranks.
- A rank that hangs or is stopped: the waits of the other ranks end after `World.timeout`. The rank
  that is stopped, or neither waits nor has left (`dptrain.comm.node.activity`), is named: by a rank
  of its node, or by the watchdog of its node if the ranks of another node waited.
- A rank whose program has ended: if all others wait, their waits end after seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dptrain.comm.deadline import RankTimeoutError
from dptrain.comm.job import Job, current_job, kill_after, start_job
from dptrain.comm.launching.launcher import find_launch
from dptrain.comm.launching.start import start_mpi
from dptrain.comm.signals import open_launcher_output
from dptrain.comm.watchdog.mpi_files import own_files
from dptrain.comm.watchdog.watch import HYDRA, find_launcher, program_names
from dptrain.comm.world import AgreedError, World
from dptrain.errors import UserError, path_user_error
from dptrain.memory import memory_user_error

_JOIN_S = 30.0
"""Time in which the other ranks have to start MPI, so that they receive this rank's error. On 2
cores with a load of 20, Open MPI took longer than 5 s."""

_ABORT_S = 5.0
"""Time in which MPI_Abort has to end this rank."""

_SECOND_S = 10.0
"""Time in which the rank that prints has to end this rank, on a busy machine."""

_OTHER_NODES_S = 1.0
_DELIVERY_S = 0.5
"""MPICH's mpirun drops output of an aborting rank that it has not read yet."""


def guard(main: Callable[[], int]) -> int:
    """Run a command so that a failure on any rank ends the whole job, and is printed once.

    A command ends regularly by a return. If there are several ranks, `sys.exit` inside `main` is a
    failure, with code 0 too, because the other ranks would wait.

    Args:
        main: the command; returns its exit code.

    Returns:
        The exit code, for `sys.exit`; 2 for a user's mistake. If other ranks would be left
        waiting, this function does not return: MPI_Abort ends this rank too.
    """
    with contextlib.suppress(RuntimeError, OSError):  # No stderr, or none with a descriptor.
        faulthandler.enable()
    previous = threading.excepthook
    threading.excepthook = _thread_failed
    try:
        return main()
    except MemoryError as error:
        return fail(memory_user_error(error))
    except OSError as error:
        return fail(path_user_error(error) or error)
    except BaseException as error:
        return fail(error)
    finally:
        threading.excepthook = previous


def _thread_failed(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
        os._exit(fail(arguments.exc_value))


def fail(error: BaseException) -> int:
    """Report an error once, and end all ranks unless all of them raise it.

    Args:
        error: what ended this rank's program.

    Returns:
        The exit code of this process, if all ranks end in order.
    """
    job = current_job()
    if job is not None:
        if not isinstance(error, AgreedError):
            _end(job, error)
        if job.rank == 0:
            # The launcher may kill a rank that exits last; the watchdog must not name it too.
            text = describe(error, 0, 1)
            if job.claim():
                job.report("named")
                _print(text)
        return exit_code(error)
    if find_launch().size == 1 or "mpi4py.MPI" in sys.modules:
        return _leave(error)
    return _fail_before_mpi(error)


def print_at_once(error: BaseException) -> None:
    """Print an error at once under Open MPI's mpirun, which kills ranks soon after a signal.

    Args:
        error: will end this rank's program.
    """
    job = current_job()
    output = None if job is None else open_launcher_output()
    if job is None or output is None:
        return
    if job.claim():
        job.has_printed = True
        with contextlib.suppress(OSError):
            os.write(output, describe(error, job.rank, job.size).encode())
        job.report("named")
    os.close(output)


def _fail_before_mpi(error: BaseException) -> int:
    """Start MPI to send the error to other ranks, which may wait there without limit."""
    launch = find_launch()
    text = describe(error, launch.rank, launch.size)
    try:
        with kill_after(_JOIN_S, text):
            if isinstance(error, UserError):
                World.connect(error=error)
            else:
                World.join(2 * _JOIN_S)
    except UserError as other:
        if current_job() is not None:
            return fail(other)
    job = current_job()
    if job is not None:
        _end(job, error)
    return _leave(error)


def end_start(code: int) -> NoReturn:
    """End all ranks before MPI has started: start it here too, and call MPI_Abort.

    This process is not known to the watchdog. If the other ranks do not start MPI, it is killed.

    Args:
        code: the exit code.
    """
    with contextlib.suppress(UserError), kill_after(_JOIN_S, ""):
        world = start_mpi().COMM_WORLD
        _remove_files_of_mpi()
        world.Abort(code)
    os._exit(code)


def _leave(error: BaseException) -> int:
    """Print the error and return the exit code, if no other rank waits.

    If several processes of a node make the same mistake without MPI, the first one prints it.
    """
    if isinstance(error, SystemExit) and not error.code:
        return 0
    silent = isinstance(error, UserError) and _is_printed_by_another()
    if not silent and not (isinstance(error, SystemExit) and isinstance(error.code, int)):
        _print(describe(error, 0, 1))
    return exit_code(error)


def _is_printed_by_another() -> bool:
    """Return whether another rank of this node prints the mistake.

    Processes without a known launcher do not share a folder of their own. Each prints.
    """
    launch = find_launch()
    if launch.size == 1 or find_launcher(os.getpid()) is None:
        return False
    return not start_job(launch.rank, launch.size).claim()


def _end(job: Job, error: BaseException) -> NoReturn:
    """Print the error unless another rank has printed one, and end all ranks."""
    from mpi4py import MPI

    # Ranks of other nodes cannot read this node's claim, so each node waits longer than the one
    # before it. A rank that only waited for others prints after ranks that have found the cause.
    time.sleep(min(0.25 * job.node, 2.0))
    if isinstance(error, RankTimeoutError) and not error.is_cause:
        job.report("late")
        time.sleep(_OTHER_NODES_S)
    text = describe(error, job.rank, job.size)
    if job.has_printed:
        time.sleep(_DELIVERY_S)
    elif job.claim():  # If it is killed before it prints, no process prints.
        job.report("named")
        _print(text)
        time.sleep(_DELIVERY_S)
    else:
        time.sleep(_SECOND_S)  # The rank that claimed prints, and ends this rank too.
    _remove_files_of_mpi()
    with job.limit_call("MPI_Abort to end the job", _ABORT_S):
        MPI.COMM_WORLD.Abort(exit_code(error))
    os._exit(exit_code(error))


def exit_at_once(code: int) -> NoReturn:
    """End this process without the exit functions of C; all ranks call this.

    MPICH registers one, and its mpirun kills the other ranks if the first one has not called it.
    There, MPI_Abort ends the ranks; `srun` would return another code after it.

    Args:
        code: the exit code.
    """
    job, launcher = current_job(), find_launcher(os.getpid())
    if job is not None and launcher is not None and program_names(launcher) & set(HYDRA):
        from mpi4py import MPI

        time.sleep(_DELIVERY_S)
        _remove_files_of_mpi()
        with job.limit_call("MPI_Abort to end the job", _ABORT_S):
            MPI.COMM_WORLD.Abort(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _remove_files_of_mpi() -> None:
    """Remove the files that MPI_Abort leaves; the watchdog knows them only after the start."""
    for path in own_files():
        with contextlib.suppress(OSError):  # Another rank has removed it.
            Path(path).unlink()


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that an error ends.

    It is 2 for a user's mistake, 3 if training diverged, 130 for Ctrl-C, that of `sys.exit` unless
    it is 0, and 1 for a bug.
    """
    if isinstance(error, AgreedError):
        return error.exit_code
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1
    return 1


def describe(error: BaseException, rank: int, size: int) -> str:
    """Return the text to print: the traceback of a bug, then one line with the cause.

    If there are several ranks, the line names the rank.

    Example:
        >>> describe(UserError("batch size is 0; expected at least 1"), 2, 4).strip()
        'dptrain: rank 2 of 4: batch size is 0; expected at least 1'
    """
    prefix = f"dptrain: rank {rank} of {size}: " if size > 1 else "dptrain: "
    if isinstance(error, UserError):
        return f"{prefix}{error}\n"
    if isinstance(error, RankTimeoutError):
        return f"dptrain: rank {error.rank} of {size}: {error}\n"
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
