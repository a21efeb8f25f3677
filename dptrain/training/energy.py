"""The energy of the steps of a job, read between blocks of steps."""

from __future__ import annotations

from dptrain.measure.energy import EnergyMeter, open_meter
from dptrain.training.job import Job

BLOCKS = 10
"""Number of blocks of steps; the interval of the energy is over blocks."""


def open_job_meter(job: Job) -> EnergyMeter:
    """Return the meter of this rank: of its GPU, and on one rank of each node of processors."""
    identity = job.replica.memory.identity if job.replica.memory.on_gpu else ""
    return open_meter(identity, reads_processors=job.world.first_on_node())


def block_bounds(first: int, last: int) -> range:
    """Return the steps between which energy is measured, `BLOCKS` blocks or a few more."""
    return range(first, last + 1, max((last - first) // BLOCKS, 1))
