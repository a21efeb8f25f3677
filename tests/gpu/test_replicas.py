"""Many replicas in one process: their threads end and their memory is freed."""

from __future__ import annotations

import gc
import threading
import time

import dptrain
from dptrain.network import Conv2d, Dense, Flatten, Network, ReLU

REPLICAS = 300
"""With threads that did not end, a process on 16 cores could start no thread after 250 replicas."""


def free_bytes() -> int:
    import cupy

    gc.collect()
    cupy.cuda.Device().synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    return int(cupy.cuda.runtime.memGetInfo()[0])


def test_dropped_replicas_of_cuda_end_their_threads_and_free_their_memory() -> None:
    def train(number: int) -> None:
        # Another number of filters is another source, so that each replica compiles one.
        layers = [Conv2d(4 + number % 5), ReLU(), Flatten(), Dense(3)]
        replica = dptrain.make_replica(Network((3, 8, 8), layers), "cuda", 64)
        assert replica.memory_bytes

    train(0)
    threads, free = threading.active_count(), free_bytes()
    for number in range(REPLICAS):
        train(number)
    end = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    # Loaded kernels and streams take some memory; 300 replicas with streams of their own do not.
    assert free - free_bytes() < 1 << 30
