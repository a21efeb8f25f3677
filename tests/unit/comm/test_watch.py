"""The helper that watches ranks, with processes that only hold a pipe as ranks do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dptrain.comm import watch

pytestmark = pytest.mark.skipif(
    not hasattr(select, "epoll"),
    reason="no epoll in this system, so ranks start no helper (Job.watch)",
)

RANK = "import os, sys; os.open(sys.argv[1], os.O_WRONLY); print(flush=True); sys.stdin.read()"
GOOD = RANK.replace("os.open", "pipe = os.open") + "; os.write(pipe, b'!')"


@contextmanager
def job(folder: Path, *ranks: str) -> Iterator[tuple[subprocess.Popen[str], ...]]:
    """The helper, and a program for each rank; a rank whose stdin is closed leaves."""
    names = [str(rank) for rank in range(len(ranks))]
    for name in names:
        os.mkfifo(folder / f"alive-{name}")
    command = [sys.executable, "-I", "-S", watch.__file__, "ranks", str(folder), "here",
               str(len(ranks)), *names]  # fmt: skip
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as helper:
        assert helper.stdout is not None
        assert helper.stdout.read(5) == "begun"
        processes = []
        try:
            for name, rank in zip(names, ranks, strict=True):
                words = [sys.executable, "-c", rank, str(folder / f"alive-{name}")]
                process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
                processes.append(process)
                assert process.stdout is not None
                process.stdout.readline()
            yield (helper, *processes)
        finally:
            for process in (*processes, helper):
                process.kill()
                process.communicate()


def test_ranks_that_a_launcher_leaves_alone_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir()
    with job(folder, RANK, RANK, RANK) as (helper, *ranks):
        ranks[1].communicate(timeout=10)
        _, said = helper.communicate(timeout=10 * watch._LAUNCHER_S)
        assert [rank.wait(10) for rank in ranks] == [-signal.SIGKILL, 0, -signal.SIGKILL]
    assert said.startswith("dptrain: rank 1 of 3: its process on here was killed or left")
    assert said.count("\n") == 1
    assert not folder.exists()


def test_ranks_that_end_in_good_order_are_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir()
    with job(folder, GOOD, GOOD) as (helper, first, last):
        first.communicate(timeout=10)
        with pytest.raises(subprocess.TimeoutExpired):
            helper.wait(watch._LAUNCHER_S + 1.0)
        assert last.poll() is None
        last.communicate(timeout=10)
        _, said = helper.communicate(timeout=10)
        assert (said, first.returncode, last.returncode) == ("", 0, 0)
    assert not folder.exists()
