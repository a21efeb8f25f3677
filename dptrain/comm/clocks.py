"""How far the clocks of ranks are apart: measured by messages to rank 0 and back."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from dptrain.comm.world import World

ROUNDS = 40


@dataclass(frozen=True)
class ClockOffset:
    """What this rank's clock lacks to rank 0's.

    Attributes:
        offset_ns: rank 0's `time.perf_counter_ns` minus this rank's, at the same moment.
        round_trip_ns: of the message that told it; the error is at most half of this.
        at_ns: when, by this rank's clock.
    """

    offset_ns: int
    round_trip_ns: int
    at_ns: int


def clock_offset(world: World) -> ClockOffset:
    """Ask rank 0 for its time again and again, and believe the answer that came fastest.

    All ranks call this; each is answered in its turn. Source: Cristian, "Probabilistic clock
    synchronization", 1989.
    """
    best = ClockOffset(0, 0, time.perf_counter_ns())
    for rank in range(1, world.size):
        if world.is_rank_zero:
            _answer(world, rank)
        elif world.rank == rank:
            best = min((_ask(world) for _ in range(ROUNDS)), key=lambda found: found.round_trip_ns)
    return best


def _answer(world: World, rank: int) -> None:
    assert world.comm is not None
    now = np.zeros(1, np.int64)
    for _ in range(ROUNDS):
        world.wait(world.comm.Irecv(now, rank), "a question about the time")
        now[0] = time.perf_counter_ns()
        world.wait(world.comm.Isend(now, rank), "an answer about the time")


def _ask(world: World) -> ClockOffset:
    assert world.comm is not None
    answer = np.zeros(1, np.int64)
    begin = time.perf_counter_ns()
    world.wait(world.comm.Isend(answer.copy(), 0), "a question about the time")
    world.wait(world.comm.Irecv(answer, 0), "an answer about the time")
    end = time.perf_counter_ns()
    middle = begin + (end - begin) // 2
    return ClockOffset(int(answer[0]) - middle, end - begin, middle)
