"""What the program that started this process meant, read from its environment without MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dptrain.errors import UserError

ALLOW_SINGLE = "DPTRAIN_ALLOW_SINGLE"
"""Environment variable: set to 1, a rank that finds itself alone goes on alone."""

_NETMOD = "MPIR_CVAR_CH4_NETMOD"
_VARIABLES = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("PALS_LOCAL_SIZE", "PALS_RANKID"),
)
# The most specific first: mpirun inside a Slurm job starts its helpers with srun, so the step's
# task count then speaks of helpers. SLURM_NTASKS is left out on purpose: a batch script that runs
# a program directly has it and still means one process.


@dataclass(frozen=True)
class Launch:
    """Rank and size that the launcher meant; `source` says where it was read, "" for nowhere."""

    rank: int
    size: int
    source: str


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's intent; a process started by hand is rank 0 of 1."""
    for size_name, rank_name in _VARIABLES:
        size, rank = environ.get(size_name, ""), environ.get(rank_name, "0")
        if size.isdecimal() and int(size) > 0 and rank.isdecimal():
            return Launch(int(rank), int(size), f"{size_name}={size}")
    return Launch(0, 1, "")


def shorten_addresses(version: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have MPICH tell Slurm short addresses, which it must before MPI starts.

    Ranks started by ``srun --mpi=pmi2`` give their addresses to Slurm in lines of text, and Slurm
    reads 1024 characters of one. MPICH's way over UCX sends 4096 bytes for each, whatever lies in
    memory behind the address included, in lines as long as these bytes make them: with some
    contents of memory MPI fails to start, or waits forever. Its way over libfabric sends what the
    address takes. Where a user has chosen one, and under MPICH's own mpirun, nothing is changed.

    Args:
        version: the long text in which the MPI that mpi4py loaded describes itself.
        environ: where the launcher left its marks, and MPI will read.
    """
    by_slurm = "PMI_JOBID" in environ and "PMI_HOSTNAME" not in environ  # The latter is mpirun's.
    has_both = re.search(r"^MPICH Device:\s*ch4:ucx ofi", version, re.MULTILINE)
    if by_slurm and has_both and not environ.keys() & {"MPICH_CH4_NETMOD", _NETMOD}:
        environ[_NETMOD] = "ofi"


def refuse_stranger(library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse another MPI under Open MPI's mpirun, before it starts: MPICH dies there in C.

    Args:
        library: name and version of the MPI that mpi4py loaded.
        environ: where the launcher left its marks.

    Raises:
        UserError: Open MPI's launcher, and another library.
    """
    launch = find_launch(environ)
    stranger = launch.source.startswith("OMPI") and not library.startswith("Open MPI")
    if stranger and launch.size > 1 and environ.get(ALLOW_SINGLE) != "1":
        raise UserError(_explain(launch, library))


def refuse_single(size: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to go on as the only rank where the launcher meant many.

    Every process would take itself for rank 0 and train the whole network alone, all writing
    the same files.

    Args:
        size: of COMM_WORLD.
        library: name and version of the MPI that mpi4py loaded.
        environ: where the launcher left its marks.

    Raises:
        UserError: one rank, and the launcher meant more.
    """
    launch = find_launch(environ)
    if size == 1 and launch.size > 1 and environ.get(ALLOW_SINGLE) != "1":
        raise UserError(_explain(launch, library))


def _explain(launch: Launch, library: str) -> str:
    plugin = "pmix" if library.startswith("Open MPI") else "pmi2"
    return (
        f"MPI sees 1 rank but the launcher meant {launch.size} ({launch.source}): "
        f"the launcher does not speak to the MPI that mpi4py loaded ({library}); "
        f"start with that MPI's own mpirun, or with srun --mpi={plugin} (srun --mpi=list shows "
        "others); "
        f"`dptrain doctor` says more, {ALLOW_SINGLE}=1 goes on with one rank"
    )
