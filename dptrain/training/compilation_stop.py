"""Signals that end the compilation of kernels, before a run has made a step.

What is compiled is kept in the kernel cache, so the next start of the run compiles only the rest.
With a short time limit, a batch job may thus need several starts. After SIGUSR1, the warning of a
batch system, a start that has completed no kernel continues until it has, for up to `FIRST_S`. If
that is too short, it is fruitless; the second fruitless start in a row ends with a message, as do
those of training.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

from dptrain.backends.base import Backend
from dptrain.comm.abort import print_at_once
from dptrain.comm.collective import call_on_rank_zero
from dptrain.comm.deadline import RankTimeoutError
from dptrain.comm.signals import StoppedError, end_on
from dptrain.comm.world import AgreedError, World
from dptrain.native.compilation import SIGNAL_POLL_S
from dptrain.training.resources import COMPILATION_TIMEOUT_S, compile_kernels

WHEN = "while kernels were compiled; the next run continues with the rest"

OTHERS_S = 20.0
"""Time for a signal to reach all ranks while they compile; 5 s were too short on a busy machine.
If it does not reach them, the rank that received it ends the job."""

FIRST_S = 45.0
"""Longest time from SIGUSR1 to the first kernel. `slurm/requeue.sh` is warned 120 s before its time
limit; on a machine with a load of ten times its cores, a kernel took over 50 s."""

FRUITLESS = ".compilation"
"""File of a run directory: the last start was stopped before it completed a kernel."""


class StoppedCompilationError(AgreedError):
    """A signal ended the compilation on some rank."""

    exit_code = 75


def compile_unless_stopped(
    world: World, backend: Backend, run: Path | None, *, quiet: bool = False
) -> None:
    """Compile the kernels that were bound; SIGTERM and SIGUSR1 end this on all ranks.

    Args:
        world: the ranks; every rank calls this function.
        backend: of this rank.
        run: the run directory, on rank 0.
        quiet: True prints nothing if this takes long.

    Raises:
        StoppedCompilationError: a signal was received.
        UserError: the second start in a row was stopped by SIGUSR1 before it completed a kernel.
    """
    error: StoppedError | None = None
    try:
        with (
            end_on(signal.SIGTERM, WHEN, print_at_once),
            end_on(signal.SIGUSR1, WHEN, lambda _: _wait_for_first_kernel(backend)),
        ):
            compile_kernels(world, backend, quiet=quiet)
    except StoppedError as stopped:
        error = stopped
    if not _is_stopped(world, error):
        if run is not None:
            with contextlib.suppress(OSError):
                (run / FRUITLESS).unlink(missing_ok=True)
        return
    texts = world.all_gather_json(None if error is None else str(error))
    text = next(text for text in texts if text is not None)
    if text.startswith(signal.SIGUSR1.name):
        has_none = _has_no_kernel(backend)
        call_on_rank_zero(world, lambda: _refuse_fruitless_starts(run, is_fruitless=has_none))
    raise StoppedCompilationError(text)


def _has_no_kernel(backend: Backend) -> bool:
    """Return True if this start compiles kernels and has completed none."""
    done, count = backend.compilation_progress()
    return count > 0 and not done


def _wait_for_first_kernel(backend: Backend) -> None:
    """Let the compiler's thread complete a kernel; the main thread is in a signal handler."""
    end = time.monotonic() + FIRST_S
    while _has_no_kernel(backend) and time.monotonic() < end:
        time.sleep(SIGNAL_POLL_S)


def _is_stopped(world: World, error: StoppedError | None) -> bool:
    """Return whether a signal has stopped any rank; every rank calls this."""
    limit_s = COMPILATION_TIMEOUT_S
    if error is not None:
        limit_s = OTHERS_S + FIRST_S * str(error).startswith(signal.SIGUSR1.name)
    try:
        return world.any_rank(error is not None, limit_s)
    except RankTimeoutError:
        if error is None:
            raise
        raise error from None


def _refuse_fruitless_starts(run: Path | None, *, is_fruitless: bool) -> None:
    """Note whether this start has completed no kernel; on rank 0.

    Raises:
        UserError: neither this start nor the one before has.
    """
    if run is None:
        return
    note = run / FRUITLESS
    with contextlib.suppress(OSError):
        if not is_fruitless:
            note.unlink(missing_ok=True)
        elif not note.exists():
            note.touch()
        else:
            note.unlink()
            raise AgreedError(
                f"{signal.SIGUSR1.name} stopped two starts in a row while kernels were compiled, "
                "and neither completed one, so the job would be started again without end; request "
                "a longer time limit, such as --time=60 of sbatch, or compile the kernels first "
                "with dptrain train --dry-run on a node of this kind; DPTRAIN_CACHE_DIR must be a "
                "directory that can be written"
            )
