"""Rank and number of ranks as the launcher set them in the environment, without MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dptrain.errors import UserError

ALLOW_SINGLE = "DPTRAIN_ALLOW_SINGLE"
"""Environment variable: if it is 1, a rank that MPI does not connect to others runs alone."""

_NETMOD = "MPIR_CVAR_CH4_NETMOD"
_VARIABLES = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("PALS_LOCAL_SIZE", "PALS_RANKID"),
)
# The most specific first: mpirun inside a Slurm job starts its proxies with srun, so the task count
# of the step is then that of the proxies. SLURM_NTASKS is not used: it is also set for a program
# that a batch script runs directly, as one process.


_PREFIXES = (
    "ALPS_", "FLUX_", "JSM_", "LSB_", "MPI", "MV2_", "OMPI_", "PALS_", "PMI", "PRTE_",
    "SLURM_PROCID", "SLURM_STEP",
)  # fmt: skip
"""How the names of variables begin that launchers set, also those whose sizes are not known."""


@dataclass(frozen=True)
class Launch:
    """Rank and size that the launcher set; `source` is the variable of the size, or ""."""

    rank: int
    size: int
    source: str


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return rank and size of this process; without a launcher, rank 0 of 1."""
    for size_name, rank_name in _VARIABLES:
        size, rank = environ.get(size_name, ""), environ.get(rank_name, "0")
        if size.isdecimal() and int(size) > 0 and rank.isdecimal():
            return Launch(int(rank), int(size), f"{size_name}={size}")
    return Launch(0, 1, "")


def has_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a launcher may have started this process; without one, there is one rank."""
    return any(name.startswith(_PREFIXES) for name in environ)


def shorten_addresses(version: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Select libfabric for MPICH under srun, because UCX sends addresses that Slurm truncates.

    Ranks started by ``srun --mpi=pmi2`` pass their addresses to Slurm in lines of text, of which
    Slurm reads 1024 characters. With UCX, MPICH sends 4096 bytes per address, including unused
    memory; depending on its contents, MPI fails to start or waits forever. With libfabric it sends
    only the address. If the user chose a netmod, or under MPICH's own mpirun, nothing changes.

    Args:
        version: the version text of the MPI library that mpi4py loaded.
        environ: the environment variables; changed before MPI starts.
    """
    by_slurm = "PMI_JOBID" in environ and "PMI_HOSTNAME" not in environ  # The latter is mpirun's.
    has_both = re.search(r"^MPICH Device:\s*ch4:ucx ofi", version, re.MULTILINE)
    if by_slurm and has_both and not environ.keys() & {"MPICH_CH4_NETMOD", _NETMOD}:
        environ[_NETMOD] = "ofi"


def refuse_other_mpi(library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to start another MPI library under Open MPI's mpirun, where MPICH would abort.

    Args:
        library: name and version of the MPI that mpi4py loaded.
        environ: the environment variables.

    Raises:
        UserError: the launcher is Open MPI's, and the library is another one.
    """
    launch = find_launch(environ)
    is_other = launch.source.startswith("OMPI") and not library.startswith("Open MPI")
    if is_other and launch.size > 1 and environ.get(ALLOW_SINGLE) != "1":
        raise UserError(_explain(launch, library))


def refuse_single(size: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to run as a single rank if the launcher started several processes.

    Otherwise every process would be rank 0, train alone and write the same files.

    Args:
        size: of COMM_WORLD.
        library: name and version of the MPI that mpi4py loaded.
        environ: the environment variables.

    Raises:
        UserError: MPI has one rank, and the launcher started more.
    """
    launch = find_launch(environ)
    if size == 1 and launch.size > 1 and environ.get(ALLOW_SINGLE) != "1":
        raise UserError(_explain(launch, library))


def _explain(launch: Launch, library: str) -> str:
    plugin = "pmix" if library.startswith("Open MPI") else "pmi2"
    return (
        f"MPI reports 1 rank, but the launcher started {launch.size} ({launch.source}): the "
        f"launcher does not support the MPI that mpi4py loaded ({library}); use the mpirun of "
        f"that MPI, or srun --mpi={plugin} (srun --mpi=list shows the alternatives); `dptrain "
        f"doctor` reports more, and {ALLOW_SINGLE}=1 continues with one rank"
    )
