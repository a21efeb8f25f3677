"""Nodes that find out that all of their ranks wait for one that has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptrain.comm.watchdog.idle_nodes import CONFIRM_S, IDLE_S, IdleNode, IdleNodes
from dptrain.comm.watchdog.watch import ACTIVITY, LEFT, MIN_POLLS, WAITING, WORKING

STEP_S = 0.1


class Node:
    """A simulated node, whose ranks have states that a test sets.

    Attributes:
        states: of its ranks.
        waits: number of waits of each rank.
        ended: the rank for which its ranks waited; None while they may wait.
    """

    def __init__(self, folder: Path, ranks: range, size: int) -> None:
        self.ranks, self.size, self.path = ranks, size, folder / f"activity-{ranks.start}"
        self.states, self.waits = [WAITING] * len(ranks), [1] * len(ranks)
        self.polls, self.runs = 0, True
        self.lines: list[str] = []
        self.ended: int | None = None
        node = IdleNode(self.path, ACTIVITY, (WORKING, WAITING, LEFT), MIN_POLLS)
        self.idle = IdleNodes(node, size, self.lines.append, self._end)

    def _end(self, rank: int) -> None:
        self.ended = rank

    def write(self) -> None:
        """Write the records of this node's ranks."""
        self.polls += self.runs
        records = [ACTIVITY.pack(*[0] * 8) for _ in range(self.size + 1)]
        for rank, state, waits in zip(self.ranks, self.states, self.waits, strict=True):
            records[rank] = ACTIVITY.pack(99, state, 0, 0, waits, self.polls, 0, 0)
        self.path.write_bytes(b"".join(records))


class Nodes:
    """Two nodes of two ranks; the first one listens."""

    def __init__(self, folder: Path) -> None:
        self.all = [Node(folder, range(2), 4), Node(folder, range(2, 4), 4)]
        self.now = 0.0

    def run(self, seconds: float) -> None:
        """Let both watchdogs work for so long."""
        first, second = self.all
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for node in self.all:
                node.write()
            second.idle.check(None, self.now)
            first.idle.check(second.lines[-1:], self.now)
            if first.lines:
                second.idle.receive(first.lines[-1])

    @property
    def ended(self) -> list[int | None]:
        return [node.ended for node in self.all]


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


@pytest.mark.parametrize("rank", range(4))
def test_all_nodes_learn_which_rank_has_left(nodes: Nodes, rank: int) -> None:
    nodes.all[rank // 2].states[rank % 2] = LEFT
    nodes.run(IDLE_S)
    assert nodes.ended == [None, None]
    nodes.run(CONFIRM_S + 1.0)
    assert nodes.ended == [rank, rank]
    assert len(nodes.all[0].lines) == 1


def test_waits_go_on_if_no_rank_has_left(nodes: Nodes) -> None:
    nodes.run(8.0)
    assert nodes.ended == [None, None]


@pytest.mark.parametrize("node", range(2))
def test_waits_go_on_while_a_rank_works(nodes: Nodes, node: int) -> None:
    nodes.all[0].states[0] = LEFT
    nodes.all[node].states[1] = WORKING
    nodes.run(8.0)
    assert nodes.ended == [None, None]
    nodes.all[node].states[1] = WAITING
    nodes.run(10.0)
    assert nodes.ended == [0, 0]


@pytest.mark.parametrize("node", range(2))
def test_waits_go_on_while_some_end(nodes: Nodes, node: int) -> None:
    nodes.all[0].states[0] = LEFT
    for _ in range(8):
        nodes.all[node].waits[1] += 1
        nodes.run(1.0)
    assert nodes.ended == [None, None]


@pytest.mark.parametrize("node", range(2))
def test_waits_go_on_if_a_rank_does_not_run(nodes: Nodes, node: int) -> None:
    nodes.all[0].states[0] = LEFT
    nodes.all[node].runs = False
    nodes.run(8.0)
    assert nodes.ended == [None, None]


def test_a_node_whose_ranks_have_all_left_says_so_at_once(nodes: Nodes) -> None:
    nodes.all[1].states = [LEFT, LEFT]
    nodes.run(2 * STEP_S)
    assert nodes.all[1].lines[-1] == "idle 2 2"
