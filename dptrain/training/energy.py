"""The energy of the steps of a job, read between blocks of steps."""

from __future__ import annotations

from dptrain.data.sharding import samples_before
from dptrain.measure.energy import EnergyMeter, open_meter
from dptrain.training.job import Job

BLOCKS = 10
"""Number of blocks of steps; the interval of the energy is over blocks."""

START_UP = 9
"""Steps of a longer training before the energy is read. NVML takes time to start, which would delay
the first step; these steps do not count for the time per step either."""


def metered_gpu(job: Job) -> str:
    """Return the UUID of this rank's GPU; empty if a lower rank of the node has the same GPU.

    Every rank calls this function.
    """
    identity = job.replica.memory.identity if job.replica.memory.on_gpu else ""
    of_ranks = job.world.node_all_gather_json(identity)
    return "" if identity in of_ranks[: job.world.local_rank] else identity


def open_job_meter(job: Job, gpu: str) -> EnergyMeter:
    """Return the meter of this rank: of a GPU, and on one rank of each node of processors.

    Args:
        job: the job.
        gpu: of `metered_gpu`.
    """
    return open_meter(gpu, reads_processors=job.world.first_on_node())


def unopened_meter() -> EnergyMeter:
    """Return the meter of a training that has not reached the step from which energy is read."""
    return EnergyMeter(
        (), [f"training stopped before step {START_UP + 1}, the first one that is measured"]
    )


def samples_between(job: Job, first: int, last: int) -> int:
    """Return the number of samples of steps `first` … `last` − 1, all ranks together."""
    size, batch_size = len(job.dataset.train), job.spec.batch_size
    return samples_before(size, batch_size, last) - samples_before(size, batch_size, first)


def block_bounds(first: int, last: int) -> range:
    """Return the steps between which energy is measured, `BLOCKS` blocks or a few more."""
    return range(first, last + 1, max((last - first) // BLOCKS, 1))


def training_blocks(first: int, last: int) -> range:
    """Return the bounds of the blocks of a training from step `first` to `last`, start-up excluded.

    Example:
        >>> list(training_blocks(0, 30))[:3], list(training_blocks(5, 8))
        ([9, 11, 13], [5, 6, 7, 8])
    """
    start = first + START_UP if last - first > 2 * START_UP else first
    return block_bounds(start, last)
