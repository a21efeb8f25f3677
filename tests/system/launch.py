"""Starting `dptrain` as a user does."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dptrain
from dptrain.comm.watchdog.watch import process_state

ROOT = Path(dptrain.__file__).parents[1]
SCRIPTS = Path(sys.executable).parent
ABSENT = Path(__file__).with_name("absent")
"""Modules that programs cannot import."""

SEVERAL = str(Path(__file__).with_name("several.py"))


def command(
    *arguments: str, ranks: int = 0, program: Sequence[str] = ("-m", "dptrain")
) -> list[str]:
    """``python -m dptrain …``, under mpirun if there are ranks."""
    line = [sys.executable, *program, *arguments]
    if not ranks:
        return line
    return [find_mpirun(), "-n", str(ranks), *line]


def find_mpirun() -> str:
    """Return the path of the launcher: next to Python, or on PATH."""
    found = shutil.which("mpirun", path=os.pathsep.join([str(SCRIPTS), os.environ["PATH"]]))
    assert found is not None, "no mpirun next to Python or on PATH"
    return found


@functools.cache
def _launcher_version() -> str:
    done = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True)
    return done.stdout


def kills_after_signals() -> bool:
    """Return True for Open MPI's mpirun, which kills the ranks after any signal but SIGUSR1."""
    return "(Open" in _launcher_version()


def loses_code() -> bool:
    """Return True for MPICH 4.0's mpirun, which may return 0 after a signal that it passed on.

    That of 4.0.2 did so in 2 of 25 jobs of two shell scripts that ended with 75 after SIGTERM.
    """
    return re.search(r"^\s*Version:\s*4\.0", _launcher_version(), re.MULTILINE) is not None


def dptrain_lines(errors: str) -> list[str]:
    """Return the lines that dptrain printed on standard error; launchers add their own."""
    assert "Traceback" not in errors, errors
    return [line for line in errors.splitlines() if line.startswith("dptrain: ")]


def under_launcher(folder: Path, name: str, line: Sequence[str]) -> list[str]:
    """A command under a process with the name of a launcher, which provides no MPI."""
    shell = folder / name
    if not shell.exists():
        shell.symlink_to("/bin/sh")
    return [str(shell), "-c", '"$@"; exit $?', name, *line]


def environment(**variables: str) -> dict[str, str]:
    """This process's, without settings of dptrain's but the place of compiled kernels."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DPTRAIN_") or name == "DPTRAIN_CACHE_DIR"
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, (ABSENT, ROOT))), **variables}


def launch(
    *arguments: Any,
    ranks: int = 0,
    program: Sequence[str] = ("-m", "dptrain"),
    cwd: Path | None = None,
    timeout: float = 300,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run `dptrain` to its end."""
    done = subprocess.run(
        command(*map(str, arguments), ranks=ranks, program=program),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=cwd,
        env=environment(**variables),
    )
    done.stderr = without_notice(done.stderr)
    return done


def without_notice(errors: str) -> str:
    """Remove the line that a job prints if the compilation of its kernels takes more than 2 s."""
    return re.sub(r"^dptrain: compiling .*\n", "", errors, flags=re.MULTILINE)


def succeed(*arguments: Any, **options: Any) -> str:
    """Run `dptrain`, which must succeed; what it printed."""
    done = launch(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def succeed_together(*commands: Sequence[Any], ranks: int, cwd: Path) -> None:
    """Run commands that need no processes of their own in the same ones: starting takes longest."""
    lines = (shlex.join(map(str, words)) for words in commands)
    succeed(*lines, ranks=ranks, cwd=cwd, program=(SEVERAL,))


def descendants(pid: int, word: str) -> list[int]:
    """Processes below `pid` that are Python's and have `word` in their command line."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        line = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if line[1:3] == [b"-m", word.encode()]:
            found.append(child)
        found += descendants(child, word)
    return found


def wait_until_ended(pids: Sequence[int]) -> None:
    """Wait until processes that were killed have ended; launchers do not always wait for them."""
    end = time.monotonic() + 60
    while running := [pid for pid in pids if process_state(pid) not in ("", "Z")]:
        assert time.monotonic() < end, f"still running: {running}"
        time.sleep(0.02)


PARSER = """\
#!PYTHON
import json, os, sys
from dptrain.cli.main import train
from dptrain.cli.options import set_flags
from dptrain.cli.survive import split_flags
from dptrain.comm.launching.launcher import find_launch
from dptrain.training.settings import load_settings

assert sys.argv[1] == "train"
values = dict(train.make_context("train", sys.argv[2:]).params)
file = values.pop("file")
assert not values.pop("dry")
assert not values.pop("verbose")
values, survival = split_flags(values)
assert not survival["survive"]
config = load_settings(set_flags(values), os.environ, file)
launch = find_launch()
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
found = dict(config.to_toml_values(), rank=launch.rank, size=launch.size, gpus=gpus)
print(json.dumps(found) + "\\n", end="", flush=True)
"""
"""A `dptrain train` that only reads its command line and says what it understood, in JSON."""


def write_program(folder: Path, name: str, text: str) -> Path:
    """An executable for `folder`, which is to stand on PATH; the folder."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text.replace("PYTHON", sys.executable))
    path.chmod(0o755)
    return folder
