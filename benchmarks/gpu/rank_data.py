"""Time epochs of training on augmented images on several GPUs, one rank per GPU.

    mpirun -n 2 python -m benchmarks.gpu.rank_data bf16 cifar 32 npz:images.npz?fit=crop

The batch size is that of each GPU. Rank 0 prints a JSON list: the mean time of a step in µs, for
each epoch that counts (`benchmarks.gpu.data`).
"""

from __future__ import annotations

import json
import sys

import dptrain
from benchmarks.gpu.data import EpochClock, fit, make_trainer
from dptrain.training.trainer import connect_ranks


def main(precision: str, network: str, batch_size: int, data: str) -> None:
    """Train, and print the times on rank 0."""
    world, clock = connect_ranks(), EpochClock()
    fit(make_trainer(
        dptrain.get_network(network), data, "cuda", precision, batch_size * world.size, clock,
        world=world,
    ))  # fmt: skip
    if world.is_rank_zero:
        print(json.dumps(clock.step_us), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
