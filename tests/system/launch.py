"""Starting `dptrain` as a user does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dptrain

ROOT = Path(dptrain.__file__).parents[1]
SCRIPTS = Path(sys.executable).parent


def command(*arguments: str, ranks: int = 0) -> list[str]:
    """``python -m dptrain …``, under mpirun if there are ranks."""
    line = [sys.executable, "-m", "dptrain", *arguments]
    if not ranks:
        return line
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(SCRIPTS), os.environ["PATH"]]))
    assert mpirun is not None, "no mpirun beside Python or on PATH"
    return [mpirun, "-n", str(ranks), *line]


def environment(**variables: str) -> dict[str, str]:
    """This process's, without settings of dptrain's but the place of compiled kernels."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DPTRAIN_") or name == "DPTRAIN_CACHE_DIR"
    }
    return {**kept, "PYTHONPATH": str(ROOT), **variables}


def launch(
    *arguments: Any, ranks: int = 0, cwd: Path | None = None, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `dptrain` to its end."""
    return subprocess.run(
        command(*map(str, arguments), ranks=ranks),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=cwd,
        env=environment(**variables),
    )


def succeed(*arguments: Any, **options: Any) -> str:
    """Run `dptrain`, which must succeed; what it printed."""
    done = launch(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def descendants(pid: int, word: str) -> list[int]:
    """Processes below `pid` that are Python's and have `word` in their command line."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        line = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if line[1:3] == [b"-m", word.encode()]:
            found.append(child)
        found += descendants(child, word)
    return found
