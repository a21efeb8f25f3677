"""The start of MPI: everything that would make it abort or wait without limit is found before."""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dptrain.comm.job import Job, start_job
from dptrain.comm.launching.launcher import (
    prepare_mpi,
    refuse_other_mpi,
    refuse_single,
    shorten_addresses,
)
from dptrain.comm.watchdog.mpi_files import SHARED_MEMORY, mapped_files, own_files, recent_files
from dptrain.errors import UserError
from dptrain.memory import format_bytes

_LIBRARY_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib64/mpich/lib", "/usr/lib")
"""Where distributions install MPICH."""

_RECENT_S = 60.0
"""Age of a file in /dev/shm that another rank of this job may have made."""


def start_mpi(timeout: float | None = None) -> Any:
    """Start MPI and return the module `mpi4py.MPI`.

    Args:
        timeout: time limit in seconds, for which this process reports to the watchdog; without one
            it does not.

    Raises:
        UserError: MPI cannot start, or not with the ranks that the launcher started.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized():
        return module  # By the program that uses dptrain.
    launch = prepare_mpi()
    with warnings.catch_warnings():
        # `refuse_single` reports a wrong launcher once, with advice.
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")
        module = import_mpi()
        version, library = module.Get_library_version(), library_name(module)
        has_pmix = "pmix" in version.lower() or bool(mapped_files("libpmix.so"))
        refuse_other_mpi(library, has_pmix=has_pmix)
        shorten_addresses(version)
        refuse_small_memory(version, library, local_size(launch.size))
        with ExitStack() as stack:
            job = None
            if launch.size > 1 and timeout is not None:
                job = start_job(launch.rank, launch.size)
                stack.enter_context(job.limit_call("MPI to start", timeout))
                stack.callback(report_files, job)
            module.Init_thread(module.THREAD_FUNNELED)
            if job is None:
                atexit.register(_finalize, os.getpid())
    refuse_single(module.COMM_WORLD.Get_size(), library)
    return module


def _finalize(process: int) -> None:
    """Shut MPI down at the end of the process that has started it, unless a job does so."""
    from mpi4py import MPI

    if os.getpid() == process and not MPI.Is_finalized():
        MPI.Finalize()


def report_files(job: Job) -> None:
    """Let the watchdog remove the files of the MPI library if this process is killed.

    Outside of containers, it also finds those of ranks that are killed before they call this.
    """
    for path in own_files():
        job.report(f"file {path}")


def library_name(module: Any) -> str:
    """Return name and version, such as ``MPICH 5.0.2``.

    Args:
        module: `mpi4py.MPI`.
    """
    name, version = module.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def import_mpi() -> Any:
    """Import `mpi4py.MPI`, without starting MPI.

    Raises:
        UserError: mpi4py or an MPI library is missing.
    """
    try:
        import mpi4py

        # mpi4py would also shut MPI down at the end of a child that was forked.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(_explain_absence(reason, find_mpich())) from None
    return MPI


def _explain_absence(reason: str, mpich: Path | None) -> str:
    """Return the error if mpi4py finds no MPI library.

    Args:
        reason: what mpi4py or the loader reported.
        mpich: an MPICH whose file has another name than mpi4py's wheel loads.
    """
    if mpich is not None and "libmpi.so.12" in reason:
        return (
            f"mpi4py's wheel does not find {mpich}, because it looks for MPICH by the name "
            "libmpi.so.12; build mpi4py for this library (Debian: apt install libmpich-dev): "
            "MPICC=mpicc.mpich pip install --force-reinstall --no-cache-dir --no-binary mpi4py "
            "mpi4py"
        )
    return (
        f"mpi4py finds no MPI library ({reason}); install one with pip install "
        "'.[mpi]', or load the MPI module of your cluster"
    )


def find_mpich(
    environ: Mapping[str, str] = os.environ, folders: Sequence[str] = _LIBRARY_FOLDERS
) -> Path | None:
    """Return the MPICH library of a distribution that calls it libmpich.so.12; None without one."""
    named = Path(environ.get("MPI4PY_LIBMPI", ""))
    if named.name.startswith("libmpich.so") and named.is_file():
        return named
    return next(_find(environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), folders), None)


def _find(search_path: Sequence[str], patterns: Sequence[str]) -> Iterator[Path]:
    folders = [Path(folder) for folder in search_path if folder]
    for pattern in patterns:
        folders += sorted(Path("/").glob(pattern.lstrip("/")))
    return (folder / "libmpich.so.12" for folder in folders if (folder / "libmpich.so.12").exists())


# Shared memory.


def local_size(size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks of the job run on this node; at least 1 if the launcher does not say.

    Args:
        size: number of ranks of the job.
        environ: the environment variables.
    """
    text = environ.get("MPI_LOCALNRANKS") or environ.get("SLURM_NTASKS_PER_NODE") or ""
    return min(int(text), size) if text.isdecimal() and int(text) > 0 else 1


def needed_memory(version: str, library: str, ranks: int) -> int:
    """Return how many bytes of /dev/shm an MPI library needs to start, for the ranks of a node.

    MPICH 5.0.1 and 5.0.2 make a file of 1,057,344 bytes for each rank and one page. UCX, which
    MPICH 4.0.2 of Debian 12 uses, needs 4,292,720 bytes and three pages for each rank; in MPICH 5
    it needs none. Open MPI 4.1 and 5 start without /dev/shm. For other libraries, the result is 0.

    Args:
        version: the version text of the MPI library that mpi4py loaded.
        library: see `library_name`.
        ranks: number of ranks of the node.
    """
    name, _, number = library.partition(" ")
    if name != "MPICH":
        return 0
    if int(number.partition(".")[0]) >= 5:
        return 4096 + 1_057_344 * ranks
    return 4_305_008 * ranks if "ch4:ucx" in version else 0


def refuse_small_memory(
    version: str, library: str, ranks: int, folder: Path = Path(SHARED_MEMORY)
) -> None:
    """Refuse to start an MPI library that would abort, because /dev/shm is too small.

    Args:
        version, library, ranks: see `needed_memory`.
        folder: for tests; the default is /dev/shm.

    Raises:
        UserError: the memory does not exist, or is too small.
    """
    needed = needed_memory(version, library, ranks)
    if not needed:
        return
    available = available_memory(folder)
    if available >= needed:
        return
    found = (
        f"{folder} does not exist or cannot be written"
        if available < 0
        else f"{folder} has {format_bytes(available)} free"
    )
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    raise UserError(
        f"{found}, but {library} needs {format_bytes(needed)} of it to start {count} on a node; "
        "increase it for a container (docker run --shm-size=1g; Kubernetes: a volume of medium "
        "Memory at /dev/shm), remove old files there, or use Open MPI"
    )


def available_memory(folder: Path) -> int:
    """Return how many bytes of /dev/shm this job can use, including what its ranks have taken.

    Returns:
        -1 if the folder does not exist or cannot be written.
    """
    if not os.access(folder, os.W_OK):
        return -1
    status = os.statvfs(folder)
    if not status.f_blocks:  # A file system without a limit.
        return 1 << 62
    recent = recent_files(time.time() - _RECENT_S, str(folder)).values()
    own = sum(found.st_blocks * 512 for found in recent)
    return int(status.f_bavail * status.f_frsize) + own
