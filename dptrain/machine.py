"""Cores and memory that this process may use, and the name of the processor."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def available_cores() -> int:
    """Return the number of physical cores that this process may use.

    These are the physical cores in the affinity mask, limited by the CPU quota of the cgroup. A
    second compute thread on a core shares its vector units with the first one, so hardware threads
    do not count. A fractional quota is rounded down: with one thread more, the kernel would stop
    threads for part of the time, and the other threads would wait for them.
    """
    cores = len(physical_cores(own_cores()))
    quota = _cgroup_cores(Path("/"))
    return cores if quota is None else max(1, min(cores, int(quota)))


def physical_cores(
    threads: set[int], topology: Path = Path("/sys/devices/system/cpu")
) -> set[frozenset[int]]:
    """Return the physical cores of some hardware threads.

    Args:
        threads: numbers of hardware threads, as in an affinity mask.
        topology: folder of the description of processors; tests pass another folder.

    Returns:
        For each core the numbers of all its hardware threads. A thread without a description, for
        example on macOS, counts as a core.
    """
    return {
        frozenset(_numbers(_text(topology / f"cpu{thread}/topology/thread_siblings_list")))
        or frozenset({thread})
        for thread in threads
    }


def _numbers(ranges: str) -> Iterator[int]:
    """Yield the numbers of a list such as ``0,64`` or ``0-1``."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        yield from range(int(first), int(last or first) + 1)


def own_cores() -> set[int]:
    """Return the numbers of the hardware threads in the affinity mask of this process.

    Systems without affinity masks, such as macOS, allow all of them.
    """
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def allowed_cores() -> set[int]:
    """Return the numbers of the hardware threads that the cgroup of this process allows.

    They are more than `own_cores` if a launcher or `taskset` binds this process.
    """
    if not hasattr(os, "sched_setaffinity"):
        return own_cores()

    def allowed() -> set[int]:
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:  # The mask is that of one thread, which ends.
        return pool.submit(allowed).result()


def has_smaller_mask() -> bool:
    """Return True if the affinity mask of this process excludes cores that its cgroup allows.

    `taskset` sets such a mask, and so do batch systems without cgroups.
    """
    return len(own_cores()) < len(allowed_cores())


def available_memory() -> int:
    """Return the machine's memory in bytes, limited by the memory limit of the cgroup."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    root = Path("/")
    limits = [
        *_cgroup_values(root, "", "memory.max"),
        *_cgroup_values(root, "memory", "memory.limit_in_bytes"),
    ]
    return min([memory, *(int(limit) for limit in limits if limit.isdigit())])


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    # Linux reports KiB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory() -> int:
    """Return how many bytes of memory this process can still allocate without swapping.

    It is the smallest of the memory that the machine has available and the memory that each limit
    of the process's cgroups leaves. Cached pages of files, which the kernel can drop, count as
    free.
    """
    return min([_available_on_machine(), *_cgroup_headroom(Path("/"))])


def _available_on_machine() -> int:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) * 1024 if match else available_memory()


def process_age_s() -> float | None:
    """Return the seconds since this process was started; None if /proc is not available."""
    try:
        # The name of the command is in parentheses and can contain any character.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return up - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _cgroup_cores(root: Path) -> float | None:
    """Return the smallest CPU quota of this process's cgroup and its parents, in cores, or None.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, ``cpu.max``: microseconds of time in
    each period, or ``max``; version 1 has a file for each, and −1 for no quota.
    """
    pairs = [text.split() for text in _cgroup_values(root, "", "cpu.max")]
    quotas = _cgroup_values(root, "cpu", "cpu.cfs_quota_us")
    periods = _cgroup_values(root, "cpu", "cpu.cfs_period_us")
    pairs += [list(pair) for pair in zip(quotas, periods, strict=False)]
    return min((int(q) / int(p) for q, p in pairs if q.isdigit() and int(p)), default=None)


def _cgroup_headroom(root: Path) -> Iterator[int]:
    """Yield the bytes that each memory limit of this process's cgroups leaves.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, ``memory.current`` and
    ``memory.stat``; version 1 has other names and counts cgroups below under ``total_``.
    """
    for controller, limit_file, use_file, pages in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroup_folders(root, controller):
            limit, use = _text(folder / limit_file), _text(folder / use_file)
            if limit.isdigit() and use.isdigit():
                found = re.search(rf"^{pages} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
                yield max(int(limit) - int(use) + (int(found[1]) if found else 0), 0)


def _cgroup_values(root: Path, controller: str, name: str) -> Iterator[str]:
    """Return the contents of the file `name` in each of `_cgroup_folders` that has it."""
    texts = (_text(folder / name) for folder in _cgroup_folders(root, controller))
    return (text for text in texts if text)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of its parents.

    Args:
        root: root of the file system; tests pass another folder.
        controller: controller of cgroup version 1, or ``""`` for version 2.
    """
    memberships = _text(root / "proc/self/cgroup").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in memberships if line.count(":") > 1):
        if controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controller
        inside = Path(path.lstrip("/"))
        yield from (mount / folder for folder in (inside, *inside.parents))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def cpu_model() -> str:
    """Return the name of the processor."""
    match = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()
