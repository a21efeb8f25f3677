"""Time dptrain's steps on several GPUs, one rank per GPU, with the batch in device memory.

    mpirun -n 2 python -m benchmarks.gpu.rank_steps tf32 auto model0:32 cifar:1024

`auto` is a value of `dptrain train --transport`. Rank 0 prints a JSON list: the time of a step in
µs for each network and batch size, the median over blocks of steps. A step is the one that `dptrain
train` launches: forward, backward, all-reduce of the gradients and update, without loading a
batch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np

import dptrain
from benchmarks.batch import random_batch
from benchmarks.gpu.clock import stream_timer
from benchmarks.gpu.ours import LEARNING_RATE
from dptrain.backends import load_backend
from dptrain.backends.cuda.device.gpu import GPU
from dptrain.backends.device_replica import DeviceReplica
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum
from dptrain.comm.transport import BUCKET_BYTES, choose_transport
from dptrain.comm.world import World
from dptrain.network import Network
from dptrain.plan import SGD, make_buckets, make_plan

STEPS, BLOCKS, WARM_UP = 25, 8, 11
"""The same as for PyTorch (`benchmarks.gpu.peers.ddp`)."""

LEAD = 5
"""Steps between a barrier, which ranks leave up to 1 ms apart, and the start of the clock. They
synchronize the ranks."""


def time_steps(
    world: World, network: Network, batch_size: int, precision: str, transport: str
) -> float:
    """Return the time of a step in µs: the median over blocks that all ranks start together."""
    backend = load_backend("cuda")
    backend.choose_device(world.local_rank)
    plan = make_plan(network, backend, batch_size, precision=precision, optimizer=SGD())
    replica = backend.make_replica(plan)
    carrier = choose_transport(world, replica, transport) if world.size > 1 else "none"
    buckets = make_buckets(plan, BUCKET_BYTES.get(carrier, 0))
    sums = make_gradient_sum("mirrored", world, replica, buckets, carrier)
    assert sums.enqueues, f"an all-reduce by {carrier} is not part of the step's graph"
    x, y = random_batch(network, batch_size, seed=world.rank)
    count = batch_size * world.size
    assert isinstance(replica, DeviceReplica)
    batch = Batch.of(x, y)._replace(global_count=count)
    replica.stage_batch(batch, learning_rate=LEARNING_RATE)
    replica.unpack_staged_batch()
    replica.sums_future()
    due = {bucket.after: number for number, bucket in enumerate(buckets)}

    def after_stage(stage: int) -> None:
        if stage in due:
            sums.start(due[stage])

    def start() -> None:
        replica.run(after_stage, early=sums.is_identity)
        sums.finish()
        sums.update(lambda elements, rate: replica.enqueue_update(rest=sums.is_identity), 0.0)

    assert isinstance(replica.memory, GPU)
    step, timer = replica.memory.program(start), stream_timer(replica.memory.stream)
    for _ in range(WARM_UP):
        step()
    blocks = []
    for _ in range(BLOCKS):
        replica.memory.synchronize()
        world.barrier()
        for _ in range(LEAD):
            step()
        blocks.append(timer(step, STEPS) / STEPS)
    replica.memory.synchronize()
    del step
    sums.close()
    return float(np.median(blocks))


def main(precision: str, transport: str, cases: Sequence[str]) -> None:
    """Time every case, and print the times on rank 0."""
    world = World.connect()
    times = []
    for case in cases:
        name, _, batch_size = case.partition(":")
        network = dptrain.get_network(name)
        times.append(time_steps(world, network, int(batch_size), precision, transport))
    # A step ends when the slowest rank has finished it.
    slowest = np.max(world.all_gather_json(times), axis=0).tolist()
    if world.is_rank_zero:
        print(json.dumps(slowest), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
