"""Steps until a signal comes; run by test_abort."""

from __future__ import annotations

import sys
import time

import numpy as np

from dptrain.comm.abort import guard
from dptrain.comm.signals import StopRequest
from dptrain.comm.world import World


def _main() -> int:
    world = World.connect()
    world.barrier()
    if sys.argv[1:]:
        world.timeout = float(sys.argv[1])  # From here on: ranks may start at different times.
    with StopRequest() as stop:
        for step in range(1_000_000):
            wishes = np.array([float(stop.requested)])
            world.all_reduce(wishes)
            if wishes[0]:
                break
            if step == 3 and world.is_rank_zero:
                print("training", flush=True)
            time.sleep(0.01)
    names = [name for name in world.all_gather_json(stop.signal_name) if name]
    print(f"stopped after step {step} by {names[0]}\n", end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guard(_main))
