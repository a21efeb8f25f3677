"""Locks of a run directory: one for the process that trains, one for the process of its ranks."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from dptrain.errors import UserError, shown


def lock(path: Path) -> int:
    """Lock a file of a run directory for this process, which it then names.

    Args:
        path: the file, which is created if it does not exist.

    Returns:
        A file descriptor; closing it, or any other one of the file, releases the lock.

    Raises:
        OSError: the file cannot be written.
        UserError: another process has locked it; the message names it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        # POSIX locks also work on network disks, unlike flock.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"{shown(holder) or 'another process'} is training in run directory "
                f"{path.parent}; wait until it ends, or choose another --run-dir"
            ) from None
        # The disk has no locks, so other processes cannot be detected.
    os.ftruncate(descriptor, 0)
    os.write(descriptor, _myself().encode())
    return descriptor


def is_locked(path: Path) -> bool:
    """Return True if another process has locked a file."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EACCES, errno.EAGAIN)
        finally:
            os.close(descriptor)
    return False


def _myself() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}," if job else "")
