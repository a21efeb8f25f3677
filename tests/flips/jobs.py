"""The jobs in which bits are flipped."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dptrain.backends.digests import PARAMETERS, STATISTICS
from dptrain.comm.world import World
from dptrain.network import BatchNorm2d, Conv2d, Dense, Flatten, Network, ReLU
from dptrain.training.callbacks import AfterStep
from dptrain.training.trainer import Trainer
from tests.run import BIN

LIMIT_S = 600.0
"""Time limit of a job on a busy machine."""

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "shared": (3, {"transport": "shared"}),
    "central": (3, {"strategy": "central"}),
    "mirrored": (3, {"transport": "mpi"}),
}
"""Number of ranks and settings of jobs."""

ARRAYS = (PARAMETERS, "momentum", STATISTICS)


class Flip(NamedTuple):
    """A flipped bit of a tensor of a rank."""

    rank: int
    array: str
    tensor: str
    element: int
    bit: int


def network() -> Network:
    layers = [
        Conv2d(6),
        BatchNorm2d(),
        ReLU(),
        Conv2d(4),
        BatchNorm2d(),
        ReLU(),
        Flatten(),
        Dense(5),
    ]
    return Network((2, 8, 8), layers, name="flips")


def data(seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((160, 2, 8, 8)).astype(np.float32)
    y = rng.integers(0, 5, 160)
    return x[:128], y[:128], x[128:], y[128:]


def make_trainer(
    world: World | None, seed: int, callback: Callable[[Trainer], None], **settings: Any
) -> Trainer:
    """Return a trainer that calls a function after each step."""
    return Trainer(
        network(), data(seed), world=world, batch_size=16, shards=4, optimizer="sgd", momentum=0.9,
        seed=seed, threads=1, progress=False, timeout=120.0,
        callbacks=[AfterStep(lambda trainer, result: callback(trainer))], **settings,
    )  # fmt: skip


def flat_of(trainer: Trainer, array: str) -> Any:
    replica = trainer.job.replica
    if array == STATISTICS:
        return replica.statistics.flat
    return replica.arrays.parameters if array == PARAMETERS else replica.arrays.state[array]


def choose(rng: random.Random, trainer: Trainer, rank: int, arrays: tuple[str, ...]) -> list[Flip]:
    """Return one to three random bits of a tensor."""
    array, plan = rng.choice(arrays), trainer.job.plan
    layout = plan.statistics if array == STATISTICS else plan.trained
    slot = rng.choice(layout.slots)
    elements = [slot.start + rng.randrange(slot.parameter.size) for _ in range(rng.randint(1, 3))]
    bits = {(element, rng.randrange(32)) for element in elements}
    return [Flip(rank, array, slot.name, element, bit) for element, bit in sorted(bits)]


def apply(trainer: Trainer, flips: list[Flip]) -> None:
    for flip in flips:
        if flip.rank == trainer.job.world.rank:
            words = flat_of(trainer, flip.array).view(np.uint32)
            words[flip.element] ^= np.uint32(1 << flip.bit)


def start(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    launcher = [str(BIN / "mpirun"), "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "tests.flips", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
