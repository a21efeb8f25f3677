"""Records of what ranks do, and the ranks that are named from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.comm.deadline import RankTimeoutError
from dptrain.comm.node import activity
from dptrain.comm.node.activity import CALLBACK, TRAINING, Activity, Wait
from dptrain.comm.world import World


@dataclass
class Ranks:
    """The activities of all ranks of a node, in one process."""

    folder: Path
    size: int
    activities: list[Activity] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.activities = [Activity(rank, self.size, self.folder) for rank in range(self.size)]

    def world(self, rank: int, timeout: float = 300.0) -> World:
        """Return the world of a rank, without MPI."""
        world = World.single()
        world.rank, world.size, world.timeout = rank, self.size, timeout
        world.activity = self.activities[rank]
        return world


def wait(world: World) -> None:
    """Wait for what never comes."""
    poll(Wait(world, "a sum"))


def poll(waiting: Wait) -> None:
    """Wait for what never comes."""
    while True:
        waiting.check()


STATES = st.lists(st.sampled_from(["works", "waits", "left"]), min_size=2, max_size=6)


@given(states=STATES, data=st.data())
def test_the_rank_that_neither_waits_nor_has_left_is_named(
    tmp_path: Path, states: list[str], data: st.DataObject
) -> None:
    ranks = Ranks(tmp_path / str(len(states)), len(states))
    waiting = data.draw(st.integers(0, len(states) - 1))
    for rank, state in enumerate(states):
        if state == "waits" or rank == waiting:
            ranks.activities[rank].begin_wait()
        elif state == "left":
            ranks.activities[rank].leave()
    others = [(rank, state) for rank, state in enumerate(states) if rank != waiting]
    working = [rank for rank, state in others if state == "works"]
    left = [rank for rank, state in others if state == "left"]
    error = ranks.world(waiting).timeout_error("a sum", 7.0)
    assert error.rank == next(iter([*working, *left, waiting]))
    assert error.is_cause == bool(working or left)
    assert "for a sum" in str(error)
    stuck = ranks.activities[waiting].stuck()
    assert len(stuck) == (len(states) if left and not working else 0)


def test_the_message_says_what_the_late_rank_does(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4)
    ranks.activities[1].enter(CALLBACK, 12)
    ranks.activities[2].begin_wait()
    ranks.activities[0].begin_wait()
    error = ranks.world(0).timeout_error("a sum", 25.4)
    assert error.rank == 1
    assert str(error).startswith(f"its process {os.getpid()} on ")
    assert "has not arrived (in a callback after step 12), nor has rank 3; rank 0 waited 25 s" in (
        str(error)
    )


def test_a_rank_that_waited_in_vain_is_not_named_by_the_next(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3)
    ranks.activities[2].enter(TRAINING, 5)
    for rank in (0, 1):
        ranks.activities[rank].begin_wait()
    for rank in (0, 1):
        with pytest.raises(RankTimeoutError, match=r"in step 5\).* waited 0 s for a") as caught:
            wait(ranks.world(rank, timeout=0.05))
        assert caught.value.rank == 2


def test_a_short_wait_is_not_recorded(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    short = Wait(ranks.world(0), "a sum")
    short.check()
    short.end()
    assert ranks.activities[0].records()[0].num_waits == 0


@pytest.mark.parametrize("polls", [True, False])
def test_a_wait_for_a_rank_that_has_left_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polls: bool
) -> None:
    """It goes on while the rank that left does not run: it may have sent what is waited for."""
    monkeypatch.setattr(activity, "STUCK_S", 0.05)
    monkeypatch.setattr(activity, "_CHECK_S", 0.01)
    ranks = Ranks(tmp_path, 2)
    ranks.activities[1].leave()
    waiting = Wait(ranks.world(0, timeout=60.0 if polls else 0.4), "a sum")

    def poll() -> None:
        while True:
            waiting.check()
            if polls:
                ranks.activities[1].poll()

    with pytest.raises(RankTimeoutError, match="its program ended") as caught:
        poll()
    assert (waiting.waited_s < 30.0) if polls else (waiting.waited_s > 0.4)
    assert caught.value.rank == 1


def test_a_wait_goes_on_while_other_waits_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has left, but rank 2 makes progress: it begins new waits."""
    monkeypatch.setattr(activity, "STUCK_S", 0.02)
    monkeypatch.setattr(activity, "_CHECK_S", 0.005)
    ranks = Ranks(tmp_path, 3)
    ranks.activities[1].leave()
    waiting = Wait(ranks.world(0, timeout=0.5), "a sum")

    def poll() -> None:
        while True:
            ranks.activities[2].begin_wait()
            for other in ranks.activities[1:]:
                other.poll()
            waiting.check()

    with pytest.raises(RankTimeoutError, match=r"another rank|its program ended"):
        poll()
    assert waiting.waited_s > 0.5


def test_a_long_wait_ends_after_the_timeout_if_a_rank_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks wait an hour for others that compile, but not for one that cannot."""
    monkeypatch.setattr(activity, "_CHECK_S", 0.01)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        world = Ranks(tmp_path, 2).world(0, timeout=0.1)
        world._processes = [("here", os.getpid()), ("here", other.pid)]
        waiting = Wait(world, "kernels", timeout_s=0.4)
        with pytest.raises(RankTimeoutError, match=r"another rank hangs|has not arrived"):
            poll(waiting)
        assert waiting.waited_s > 0.4
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        with pytest.raises(RankTimeoutError, match=r"is stopped.* for kernels") as caught:
            poll(Wait(world, "kernels", timeout_s=3600.0))
        assert (caught.value.rank, caught.value.is_cause) == (1, True)
        other.kill()


def test_a_forked_child_does_not_write_the_record_of_its_parent(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.activities[1].detach()
    ranks.activities[1].leave()
    assert not ranks.activities[0].records()[1].has_left


def test_ranks_of_other_nodes_have_no_record(tmp_path: Path) -> None:
    first = Activity(0, 3, tmp_path)
    Activity(2, 3, tmp_path).leave()
    first.begin_wait()
    assert [record.rank for record in first.records()] == [0, 2]
    assert first.stuck() == []
    assert not first.all_have_left() or first.others()[0].has_left


def test_without_a_folder_there_is_one_record(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "missing"):
        alone = Activity(1, 4, folder)
        assert [record.rank for record in alone.records()] == [1]
        assert alone.all_have_left()
