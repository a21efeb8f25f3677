"""Offsets between the clocks of ranks, measured with messages to rank 0 and back."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from dptrain.comm.world import World

ROUNDS = 40


@dataclass(frozen=True)
class ClockOffset:
    """The offset of this rank's clock from that of rank 0.

    Attributes:
        offset_ns: rank 0's `time.perf_counter_ns` minus this rank's, at the same moment.
        round_trip_ns: round-trip time of the message; the error is at most half of it.
        at_ns: time of the measurement on this rank's clock.
    """

    offset_ns: int
    round_trip_ns: int
    at_ns: int


def clock_offset(world: World) -> ClockOffset:
    """Return the offset with the shortest round trip of many; every rank calls this function.

    Source: Cristian, "Probabilistic clock synchronization", 1989.
    """
    best = ClockOffset(0, 0, time.perf_counter_ns())
    for rank in range(1, world.size):
        if world.is_rank_zero:
            _send_times(world, rank)
        elif world.rank == rank:
            offsets = (_measure_offset(world) for _ in range(ROUNDS))
            best = min(offsets, key=lambda found: found.round_trip_ns)
    return best


def _send_times(world: World, rank: int) -> None:
    """Reply to each request of a rank with the time of rank 0."""
    assert world.comm is not None
    now = np.zeros(1, np.int64)
    for _ in range(ROUNDS):
        world.wait(world.comm.Irecv(now, rank), "a request for the time of rank 0")
        now[0] = time.perf_counter_ns()
        world.wait(world.comm.Isend(now, rank), "the time of rank 0 to be sent")


def _measure_offset(world: World) -> ClockOffset:
    """Request the time of rank 0 once."""
    assert world.comm is not None
    received = np.zeros(1, np.int64)
    begin = time.perf_counter_ns()
    world.wait(world.comm.Isend(received.copy(), 0), "a request for the time to be sent")
    world.wait(world.comm.Irecv(received, 0), "the time of rank 0")
    end = time.perf_counter_ns()
    middle = begin + (end - begin) // 2
    return ClockOffset(int(received[0]) - middle, end - begin, middle)
