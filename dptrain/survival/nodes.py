"""The nodes of a Slurm allocation that can still start ranks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from dptrain.scaling.launching import Launcher

_DOWN = re.compile(r"(down|fail|unk|no_respond).*|.*\*", re.IGNORECASE)
"""States of `sinfo` in which a node starts no ranks; ``*`` marks one that does not respond."""

_QUERY_S = 30.0


def within_allocation(
    launcher: Launcher, ranks: int, environ: Mapping[str, str] = os.environ
) -> tuple[Launcher, int]:
    """Return the launcher for the nodes that are left, and the number of ranks that fit there.

    Without Slurm, or if Slurm does not reply, both are unchanged.

    Args:
        launcher: of the job.
        ranks: number of ranks of the job.
        environ: the environment variables of the batch script.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None or not launcher.is_srun:
        return launcher, ranks
    names = _query("squeue", "--noheader", "--job", job, "--format=%N").strip()
    states = _query("sinfo", "--noheader", "--Node", "--nodes", names, "--format=%N %t")
    found = dict(line.split() for line in states.splitlines() if len(line.split()) == 2)
    usable = sorted(node for node, state in found.items() if not _DOWN.fullmatch(state))
    if not usable or len(usable) == len(found) == _count(environ):
        return launcher, ranks
    tasks = int(environ.get("SLURM_NTASKS_PER_NODE") or -(-ranks // max(_count(environ), 1)))
    ranks = min(ranks, tasks * len(usable))
    nodes = min(len(usable), -(-ranks // tasks))
    options = (f"--nodelist={','.join(usable[:nodes])}", f"--nodes={nodes}")
    return replace(launcher, arguments=(*launcher.arguments, *options)), ranks


def _count(environ: Mapping[str, str]) -> int:
    """Return the number of nodes with which the allocation began; 0 if unknown."""
    text = environ.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdecimal() else 0


def _query(*command: str) -> str:
    """Return what a command of Slurm prints; "" if it fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_QUERY_S,
            stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
