"""Time PyTorch on several GPUs: DistributedDataParallel, and a captured step with one all-reduce.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
        python -m benchmarks.gpu.peers.ddp tf32 model0:32 cifar:1024

Rank 0 prints a JSON list with an object for each network and batch size: the times of a step in µs,
medians over blocks of steps.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

import dptrain
from benchmarks.batch import random_batch
from benchmarks.gpu.clock import Start, torch_timer
from benchmarks.gpu.ours import LEARNING_RATE
from benchmarks.gpu.peers.theirs import GPUMode, capture, set_arithmetic
from benchmarks.programs.torch_network import LOSSES
from dptrain.network import Network

STEPS, BLOCKS, WARM_UP, LEAD = 25, 8, 11, 5
"""Steps of a block, blocks, steps before the first block (DDP requires 11 before a capture), and
steps between a barrier and the start of the clock, which synchronize the ranks."""


class Rank:
    """The network and the batch of this process.

    Attributes:
        mode: layout and precision, the same for both programs.
    """

    def __init__(self, network: Network, batch_size: int, precision: str) -> None:
        self.mode = GPUMode("", precision=precision)
        x, y = random_batch(network, batch_size, seed=distributed.get_rank())
        self.x, self.y = torch.from_numpy(x).cuda(), torch.from_numpy(y).cuda()
        self.modules = self.mode.network(network).cuda().train()
        self.weights: list[Tensor] = list(self.modules.parameters())
        self.loss = LOSSES[network.loss.targets]

    def gradients(self, modules: torch.nn.Module) -> Callable[[], Tensor]:
        """Return a function that computes the loss."""
        return lambda: self.mode.function(lambda a, b: self.loss(modules(a), b))(self.x, self.y)

    @torch.no_grad()
    def update(self, gradients: list[Tensor], share: float) -> None:
        """Update all parameters in one call."""
        torch._foreach_add_(self.weights, gradients, alpha=-LEARNING_RATE * share)

    def ddp(self) -> Start:
        """Return a step that uses DistributedDataParallel as its documentation recommends."""
        wrapped = DistributedDataParallel(self.modules, gradient_as_bucket_view=True)
        loss = self.gradients(wrapped)

        def step() -> None:
            loss().backward()
            self.update([weight.grad for weight in self.weights if weight.grad is not None], 1.0)
            for weight in self.weights:
                weight.grad = None

        return step

    def captured(self) -> Start:
        """Return a graph of forward, backward, one all-reduce of all gradients and the update."""
        loss = self.gradients(self.modules)
        flat = torch.zeros(sum(weight.numel() for weight in self.weights), device="cuda")
        parts = flat.split([weight.numel() for weight in self.weights])
        views = [part.view_as(w) for part, w in zip(parts, self.weights, strict=True)]
        share = 1.0 / distributed.get_world_size()

        def step() -> None:
            torch._foreach_copy_(views, torch.autograd.grad(loss(), self.weights))
            distributed.all_reduce(flat)
            self.update(views, share)

        # NCCL's watchdog thread queries events during the capture.
        return capture(step, WARM_UP, capture_error_mode="thread_local")


def time_steps(step: Start) -> float:
    """Return the time of a step in µs: the median over blocks that all ranks start together."""
    for _ in range(WARM_UP):
        step()
    blocks = []
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        distributed.barrier()
        for _ in range(LEAD):
            step()
        blocks.append(torch_timer(step, STEPS) / STEPS)
    return float(np.median(blocks))


def main(precision: str, cases: Sequence[str]) -> list[dict[str, float]]:
    """Time both programs for every case."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    set_arithmetic(precision)
    torch.backends.cudnn.benchmark = True
    times = []
    for case in cases:
        name, _, batch_size = case.partition(":")
        network, n = dptrain.get_network(name), int(batch_size)
        graph = time_steps(Rank(network, n, precision).captured())
        ddp = time_steps(Rank(network, n, precision).ddp())
        times.append({"PyTorch graph": graph, "PyTorch DDP": ddp})
    return times


if __name__ == "__main__":
    measured = main(sys.argv[1], sys.argv[2:])
    if os.environ["RANK"] == "0":
        print(json.dumps(measured), flush=True)
    # At exit, NCCL can wait forever for graphs that use its communicator.
    os._exit(0)
