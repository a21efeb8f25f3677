"""The energy of the steps of a job, read between blocks of steps."""

from __future__ import annotations

from functools import partial

from dptrain.data.loading.sharding import samples_before
from dptrain.measure.machine.background_meter import BackgroundMeter
from dptrain.measure.machine.energy import EnergyMeter, open_meter
from dptrain.training.job import Job

BLOCKS = 40
"""Number of blocks of steps; the interval of the energy is over blocks."""

LATE = "a rank without samples does not know when the steps of the others end"

START_UP = 9
"""Steps of a longer training before the energy is read. They include compilation and the capture of
CUDA graphs, and do not count for the time per step either."""


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
        >>> list(training_blocks(0, 100))[:3], list(training_blocks(5, 8))
        ([9, 11, 13], [5, 6, 7, 8])
    """
    start = first + START_UP if last - first > 2 * START_UP else first
    return block_bounds(start, last)


class TrainingEnergy:
    """Reads the energy of a training between blocks of steps, without delaying steps.

    Use it in ``with``; afterwards `Job.meter` has the readings. Every rank makes it.

    Args:
        job: the job.
        first: number of steps that were complete at the start.
    """

    def __init__(self, job: Job, first: int) -> None:
        self._job, self._blocks = job, training_blocks(first, job.spec.steps)
        self._gpu = metered_gpu(job)
        self._meter: BackgroundMeter | None = None
        self._is_late = False

    def __enter__(self) -> TrainingEnergy:
        return self

    def __exit__(self, *error: object) -> None:
        if self._meter is not None:
            meter = self._meter.close()
            if self._is_late and meter.names:
                meter = EnergyMeter((), [*meter.missing, LATE])
            self._job.meter = meter
            return
        reason = f"training stopped before step {START_UP + 1}, the first one that is measured"
        self._job.meter = EnergyMeter((), [reason])

    def after_step(self, step: int) -> None:
        """Read the counters if step number `step` ends a block; 0 is the start of training."""
        self._is_late = self._is_late or self._job.engine.idles
        if step in self._blocks:
            if self._meter is None:
                self._meter = BackgroundMeter(partial(open_job_meter, self._job, self._gpu))
            self._meter.read(samples_between(self._job, self._blocks[0], step))
        elif self._meter is not None:
            self._meter.poll()
