"""Gathers the recorded times of all ranks on rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.world import World
from dptrain.measure.profile.analysis import MS, Measured
from dptrain.measure.recorder import StepRecorder

MAX_BYTES = 1 << 27
"""Largest size of the rows of all ranks on rank 0; with very many ranks, fewer steps are used."""


def gather_measured(
    world: World,
    recorder: StepRecorder,
    *,
    ahead: int,
    skip: int = 0,
    without: Sequence[int] = (),
    most: int | None = None,
) -> Measured | None:
    """Gather the rows of all steps with a whole minibatch.

    Args:
        world: the ranks; every rank calls this after the same steps, at least one.
        recorder: recorder of this rank.
        ahead: number of steps that may be enqueued when the next one starts; 0 on a CPU. On a GPU
            only some steps are timed by stage. These, and `ahead` steps after them, which start on
            an idle device, do not count for the time per step.
        skip: number of steps to ignore at the start.
        without: numbers of further steps to ignore; at least one step must remain.
        most: largest number of steps of each sort, the last ones; None for the limit of memory.

    Returns:
        The times on rank 0; None on other ranks.
    """
    rows, samples, timed = recorder.all_rows()
    most = most or max(MAX_BYTES // (world.size * rows[0].nbytes), 1)
    numbers = np.arange(recorder.steps - len(rows), recorder.steps)
    whole = (samples == samples.max()) & (numbers >= skip) & ~np.isin(numbers, without)
    ordinary, by_stage = whole, whole & timed
    if ahead:
        since = np.convolve(timed, np.ones(ahead + 1))[: len(timed)]
        undisturbed = whole & (since == 0)
        ordinary = undisturbed if undisturbed.any() else whole
    first = _of_all_ranks(world, rows[ordinary], most)
    second = _of_all_ranks(world, rows[by_stage], most) if ahead else first
    means = world.gather_json(recorder.mean_samples(int(samples.max())))
    counts = world.gather_json(recorder.mean_counts(int(numbers[ordinary][-most:][0])))
    if first is None or second is None or means is None or counts is None:
        return None
    known = None if any(each is None for each in counts) else np.array(counts, float)
    return Measured(recorder.names, first, second, tuple(means), known)


def _of_all_ranks(world: World, rows: NDArray[np.int64], most: int) -> NDArray[np.float64] | None:
    """Return the times in ms (ranks, steps, names) of the last rows, on rank 0."""
    gathered = world.gather(np.ascontiguousarray(rows[-most:]))
    return None if gathered is None else MS * np.stack(gathered)
