"""Files that MPI libraries make in /dev/shm, and which of them a job has left there.

A library removes its files when it has started, or when the last rank ends. A rank that is killed
leaves them. Their names follow from numbers that only the library and its launcher know, so a file
belongs to a job that has ended if no process uses it.

The watchdog imports this file by its path: it uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
PREFIXES = (
    "mpich_shm_",
    "mpich_vci_",
    "mpich_shar_tmp",  # MPICH 5; MPICH 4.
    "vader_segment.",
    "sm_segment.",  # Open MPI 4; Open MPI 5.
    "ucx_shm_posix_",
)
"""How the names of the files begin."""

_INITIAL_NAMESPACE = "pid:[4026531836]"
"""The process namespace outside of all containers (PROC_PID_INIT_INO of Linux)."""


def sees_all_processes() -> bool:
    """Return whether /proc lists every process of the machine: this is no container."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _INITIAL_NAMESPACE
    except OSError:
        return False


def mapped_files(part: str, pid: int | None = None) -> list[str]:
    """Return the files in the memory of a process whose paths contain `part`, in order.

    Args:
        part: text.
        pid: the process; by default this one.
    """
    try:
        maps = Path(f"/proc/{pid or 'self'}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if part in line)
    return sorted({path for path in paths if part in path})


def own_files() -> list[str]:
    """Return the files of the MPI library of this process."""
    names = tuple(f"{SHARED_MEMORY}/{prefix}" for prefix in PREFIXES)
    return [path for path in mapped_files(f"{SHARED_MEMORY}/") if path.startswith(names)]


def recent_files(since: float, folder: str = SHARED_MEMORY) -> dict[Path, os.stat_result]:
    """Return the files of MPI libraries that this user made or changed since a time.

    Args:
        since: time in seconds, as `time.time` returns it.
        folder: for tests.
    """
    found = {}
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir():
            with contextlib.suppress(OSError):  # Its job has just removed it.
                status = path.stat()
                is_own = status.st_uid == os.getuid() and status.st_ctime >= since
                if path.name.startswith(PREFIXES) and is_own:
                    found[path] = status
    return found


def remove_unused(since: float, folder: str = SHARED_MEMORY) -> None:
    """Remove the files that this user's jobs made since a time and that no process uses.

    In a container, nothing is removed: processes of others may use the same folder.

    Args:
        since, folder: see `recent_files`.
    """
    left = recent_files(since, folder) if sees_all_processes() else {}
    if not left:
        return
    identities = {(status.st_dev, status.st_ino) for status in left.values()}
    used = set[tuple[int, int]]()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and used != identities:
            used |= _files_in_use(process, identities)
    for path, status in left.items():
        if (status.st_dev, status.st_ino) not in used:
            path.unlink(missing_ok=True)


def _files_in_use(process: Path, files: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return which of some files a process has open or in its memory."""
    used = set[tuple[int, int]]()
    with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
        for link in list((process / "fd").iterdir()):
            with contextlib.suppress(OSError):
                status = link.stat()
                used.add((status.st_dev, status.st_ino))
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            major, _, minor = device.partition(":")
            used.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return used & set(files)
