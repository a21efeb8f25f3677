"""Loss and accuracy on a split, by all ranks together; predictions into a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Replica
from dptrain.comm.world import World
from dptrain.data.base import Samples, empty_batch
from dptrain.data.sharding import shard


@dataclass(frozen=True)
class Score:
    """What a network achieves on a split.

    Attributes:
        loss: mean over samples.
        accuracy: share of correct answers; None where targets are values.
        samples: number of samples.
    """

    loss: float
    accuracy: float | None
    samples: int

    def __str__(self) -> str:
        if self.accuracy is None:
            return f"loss {self.loss:.4g}"
        return f"{self.accuracy:.1%}"


def batches_of(
    replica: Replica, samples: Samples, indices: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32 | np.int32]]]:
    """Read `indices` in pieces of at most the replica's batch size; the arrays are reused."""
    network, room = replica.plan.network, replica.plan.batch_size
    x, y = empty_batch(network, room)
    for start in range(0, len(indices), room):
        chosen = indices[start : start + room]
        n = len(chosen)
        samples.read(chosen, x[:n], y[:n])
        yield chosen, x[:n], y[:n]


def score(replica: Replica, samples: Samples, world: World) -> Score:
    """Evaluate every sample once, a share on each rank; all ranks get the same answer."""
    mine = shard(len(samples), world.rank, world.size)
    totals = np.zeros(2)
    for _, x, y in batches_of(replica, samples, np.arange(len(samples), dtype=np.int64)[mine]):
        loss, correct = replica.evaluate(x, y)
        totals += loss, correct
    world.all_reduce(totals)
    count = len(samples)
    has_answers = replica.plan.network.loss.targets != "values"
    accuracy = float(totals[1]) / count if has_answers else None
    return Score(float(totals[0]) / count, accuracy, count)
