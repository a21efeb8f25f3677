"""A program of ranks: prints what each rank finds out about its node and its network, as JSON."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np

from dptrain.comm.world import World

SIZE_BYTES = 4 << 20


def received_bytes() -> int:
    """Return how many bytes this node has received from others."""
    return int(Path("/sys/class/net/net0/statistics/rx_bytes").read_text())


def main() -> None:
    """Exchange one byte and then many between the first rank and the last."""
    world = World.connect(timeout=100.0)
    assert world.comm is not None
    ends = (0, world.size - 1)
    seconds: list[float] = []
    received = 0
    if world.rank in ends:
        other = ends[world.rank == 0]
        for size in (1, 1, SIZE_BYTES):  # The first exchange connects.
            data = np.zeros(size, np.uint8)
            first, start = received_bytes(), time.perf_counter()
            if world.is_rank_zero:
                world.wait(world.comm.Isend(data, other), "sending")
                world.wait(world.comm.Irecv(data, other), "receiving")
            else:
                world.wait(world.comm.Irecv(data, other), "receiving")
                world.wait(world.comm.Isend(data, other), "sending")
            seconds.append(time.perf_counter() - start)
            received = received_bytes() - first
    world.barrier()
    found = {
        "rank": world.rank,
        "host": os.uname().nodename,
        "shm": sorted(file.name for file in Path("/dev/shm").glob("marker*")),
        "local": [world.local_rank, world.local_size, world.local_cores],
        "round_trip_s": seconds,
        "received_bytes": received,
    }
    print(json.dumps(found) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
