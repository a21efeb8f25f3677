"""Cores of each rank as its launcher bound it, and a warning if its threads need more."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dptrain.comm.launching.launcher import find_launch
from dptrain.comm.world import World
from dptrain.machine import own_cores, physical_cores


@dataclass(frozen=True)
class RankCores:
    """The compute threads of a rank and the processors that it may use.

    Attributes:
        host: name of the machine.
        threads: number of compute threads.
        hardware_threads: those of the affinity mask.
        cores: the first hardware thread of each physical core in the mask, also if the mask does
            not contain it.
        num_node_cores: number of physical cores of the machine.
    """

    host: str
    threads: int
    hardware_threads: tuple[int, ...]
    cores: tuple[int, ...]
    num_node_cores: int


def gather_rank_cores(world: World, threads: int) -> list[RankCores]:
    """Return the threads and cores of all ranks; every rank calls this function.

    Args:
        world: the ranks.
        threads: compute threads of this rank.
    """
    mask = own_cores()
    cores = sorted(min(core) for core in physical_cores(mask))
    all_cores = len(physical_cores(set(range(os.cpu_count() or 1))))
    found = world.all_gather_json([socket.gethostname(), threads, sorted(mask), cores, all_cores])
    return [RankCores(host, count, tuple(m), tuple(c), total) for host, count, m, c, total in found]


def binding_warning(
    ranks: Sequence[RankCores], environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return one line if threads must share a core because of the affinity masks, and the cure.

    Ranks that share their cores because they are too many, without a binding, are not reported.

    Args:
        ranks: of all ranks, rank 0 first.
        environ: the environment variables, from which the launcher follows.

    Example:
        >>> print(binding_warning([RankCores("n1", 16, (0,), (0,), 16)], {}))
        rank 0 computes with 16 threads on 1 core of n1 (affinity mask 0); use --threads 1
    """
    for rank, own in enumerate(ranks):
        if own.threads > len(own.cores):
            threads, cores = len(own.hardware_threads), len(own.cores)
            places = _count(cores, "core") + (f" ({threads} hardware threads)" * (threads > cores))
            return (
                f"rank {rank} computes with {_count(own.threads, 'thread')} on {places} of "
                f"{own.host} (affinity mask {_ranges(own.hardware_threads)}); "
                f"{_advice(own, environ)}"
            )
    return _siblings_warning(ranks)


def _siblings_warning(ranks: Sequence[RankCores]) -> str | None:
    """Return one line if two ranks are bound to different hardware threads of one core."""
    owners: dict[tuple[str, int], int] = {}
    for rank, own in enumerate(ranks):
        for core in own.cores:
            other = owners.setdefault((own.host, core), rank)
            if not set(ranks[other].hardware_threads) & set(own.hardware_threads):
                return (
                    f"ranks {other} and {rank} are bound to hardware threads of the same core of "
                    f"{own.host} and share its vector units; start half as many ranks, or with "
                    "Slurm use --hint=nomultithread"
                )
    return None


def _advice(own: RankCores, environ: Mapping[str, str]) -> str:
    threads, fewer = own.threads, f"use --threads {len(own.cores)}"
    if threads > own.num_node_cores:
        return fewer
    source = find_launch(environ).source
    if source.startswith("OMPI"):
        return f"start with mpirun --map-by slot:PE={threads} --bind-to core, or {fewer}"
    if source.startswith("SLURM") or (
        source.startswith("PMI") and "PMI_JOBID" in environ and "PMI_HOSTNAME" not in environ
    ):
        return f"start with srun --cpus-per-task={threads} --cpu-bind=cores, or {fewer}"
    if source.startswith("PMI"):
        return f"start with mpirun -bind-to core:{threads}, or {fewer}"
    return fewer


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges, such as ``0-3,8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
