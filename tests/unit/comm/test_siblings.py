"""The processes of ranks that have not registered."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dptrain.comm.launching import launcher
from dptrain.comm.watchdog import siblings
from dptrain.comm.watchdog.siblings import Siblings

LIMIT_S = 60

pytestmark = pytest.mark.skipif(
    not hasattr(select, "epoll") or not hasattr(os, "pidfd_open"),
    reason="needs epoll and pidfd_open, which this system lacks",
)


def test_the_names_of_ranks_are_those_of_the_launchers() -> None:
    assert tuple(each.rank for each in launcher.LAUNCHERS) == siblings.RANK_NAMES


@contextmanager
def child(rank: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits, of a rank that this process has started."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdout.write('x'); sys.stdout.flush(); "
         "sys.stdin.read()"],
        env={**os.environ, "PMI_RANK": str(rank)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.read(1)
        yield process
        process.kill()


def test_ranks_are_found_and_their_ends_ordered() -> None:
    with select.epoll() as ended, child(0) as first, child(2) as third, child(1) as second:
        found = Siblings(os.getpid(), ended, 4, {"MPI_LOCALNRANKS": "4"})
        assert found.running == {0: first.pid, 1: second.pid, 2: third.pid}
        assert found.absent == [3]
        found.forget(1)
        assert 1 not in found.running
        for process in (third, second, first):
            process.kill()
            process.wait(LIMIT_S)
        end = time.monotonic() + LIMIT_S
        order: list[tuple[int, int] | None] = []
        while len(order) < 2 and time.monotonic() < end:
            order += [found.remove(file) for file, _ in ended.poll(0.1)]
        assert order == [(2, third.pid), (0, first.pid)]
        assert found.running == {}


@pytest.mark.parametrize("environ", [{}, {"MPI_LOCALNRANKS": "1"}])
def test_ranks_of_other_nodes_are_not_absent(environ: dict[str, str]) -> None:
    with select.epoll() as ended:
        assert Siblings(os.getpid(), ended, 2, environ).absent == []
        assert Siblings(None, ended, 2, {"MPI_LOCALNRANKS": "2"}).absent == []


def test_nothing_is_known_when_mpi_has_started() -> None:
    with select.epoll() as ended, child(0):
        found = Siblings(os.getpid(), ended, 2, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
        assert found.absent == [1]
        found.close()
        found.refresh()
        assert (found.running, found.absent) == ({}, [])
