"""Compile and run traffic.c: the memory traffic of a sum in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.coarse_check import WrongResultError
from benchmarks.node.workers.running import MissingError

SOURCE = Path(__file__).with_name("traffic.c")
COMPILE_S, RUN_S = 60.0, 60.0
WRONG = 1
"""Exit status of the program if a parameter is wrong."""


@dataclass(frozen=True)
class Traffic:
    """The compiled program."""

    path: Path

    def run(self, threads: int, elements: int, repeats: int, cores: Sequence[int]) -> list[int]:
        """Return the nanoseconds of each sum with update.

        Raises:
            WrongResultError: a parameter is wrong.
        """
        command = [
            str(self.path),
            str(threads),
            str(elements),
            str(repeats),
            ",".join(map(str, cores)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
        if done.returncode == WRONG:
            raise WrongResultError(f"traffic.c with {threads} threads: {done.stderr.strip()}")
        done.check_returncode()
        return [int(line) for line in done.stdout.split()]


def compile_traffic(folder: Path) -> Traffic:
    """Compile traffic.c for this processor.

    Raises:
        MissingError: there is no C compiler, or it fails.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise MissingError("no C compiler (cc, gcc)")
    path = folder / "traffic"
    command = [compiler, "-O3", "-march=native", "-std=gnu11", "-pthread", str(SOURCE), "-o"]
    command.append(str(path))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
    except OSError as error:
        raise MissingError(f"no C compiler: {error}") from None
    if done.returncode:
        raise MissingError(f"{compiler} failed: {done.stderr.strip()}")
    return Traffic(path)
