"""Bring what every rank's recorder kept to rank 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.world import World
from dptrain.measure.analysis import MS, Measured
from dptrain.measure.recorder import StepRecorder

MOST_BYTES = 1 << 27
"""Of all ranks' rows on rank 0: of very many ranks fewer steps are taken."""


def gather_measured(
    world: World, recorder: StepRecorder, *, ahead: int, skip: int = 0, most: int | None = None
) -> Measured | None:
    """Rows of all ranks' steps that had a whole minibatch.

    Args:
        world: the ranks; every rank calls this, after the same steps, of which there is one at
            least.
        recorder: of this rank.
        ahead: steps that may be under way when the next one is begun, so that only some are timed
            stage by stage. Such a step tells nothing of how long others take, nor do so many behind
            it, which find the device at rest. 0 where stages are done when they return.
        skip: leave out so many steps at the start.
        most: take the last so many of each sort of steps; where left out, all that rank 0 has room
            for.

    Returns:
        What rank 0 knows then; None elsewhere.
    """
    rows, samples, timed = recorder.all_rows()
    most = most or max(MOST_BYTES // (world.size * rows[0].nbytes), 1)
    numbers = np.arange(recorder.steps - len(rows), recorder.steps)
    whole = (samples == samples.max()) & (numbers >= skip)
    ordinary, by_stage = whole, whole & timed
    if ahead:
        since = np.convolve(timed, np.ones(ahead + 1))[: len(timed)]
        undisturbed = whole & (since == 0)
        ordinary = undisturbed if undisturbed.any() else whole
    first = _of_all_ranks(world, rows[ordinary], most)
    second = _of_all_ranks(world, rows[by_stage], most) if ahead else first
    means = world.gather_json(recorder.mean_samples(int(samples.max())))
    if first is None or second is None or means is None:
        return None
    return Measured(recorder.names, first, second, tuple(means))


def _of_all_ranks(world: World, rows: NDArray[np.int64], most: int) -> NDArray[np.float64] | None:
    """Milliseconds (ranks, steps, names) of the last rows, on rank 0."""
    gathered = world.gather(np.ascontiguousarray(rows[-most:]))
    return None if gathered is None else MS * np.stack(gathered)
