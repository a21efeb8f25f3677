"""A replica that differs, or shared state that changes, ends a job on all ranks with one error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dptrain import Trainer
from dptrain.comm.world import CorruptedError, World
from dptrain.training.callbacks import AfterStep

pytestmark = pytest.mark.mpi

AT = 3
"""Step after which a bit is flipped."""


def corrupted(world: World, array: str, *, flips: bool = True, **settings: Any) -> str | None:
    """Return the error of a job in which a bit of the last rank is flipped; None if none is."""

    def flip(trainer: Trainer, result: object) -> None:
        if flips and trainer.step == AT and world.rank == world.size - 1:
            arrays = trainer.job.replica.arrays
            flat = arrays.parameters if array == "parameters" else arrays.state[array]
            # Rank 0 updates the first elements if ranks share the memory.
            flat.view(np.uint32)[1] ^= np.uint32(1)
        world.barrier()

    trainer = Trainer(
        "mlp-5", "irradiance?samples=64", batch_size=16, steps=8, optimizer="sgd", momentum=0.9,
        backend="reference", threads=1, progress=False, world=world,
        callbacks=[AfterStep(flip)], **settings,
    )  # fmt: skip
    try:
        trainer.fit()
    except CorruptedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("array", ["parameters", "momentum"])
def test_all_ranks_name_the_replica_that_differs(connected: World, array: str) -> None:
    text = corrupted(connected, array, transport="mpi", digest_every=4)
    size = connected.size
    if size == 1:
        assert text is None, "nothing to compare"
        return
    assert text is not None
    assert connected.all_gather_json(text) == [text] * size
    assert "after step 4, " in text
    named = [rank for rank in range(size) if f"rank {rank} on " in text]
    assert named == ([0, 1] if size == 2 else [size - 1])


def test_all_ranks_name_the_owner_of_shared_state(connected: World) -> None:
    if connected.size == 1:
        return
    text = corrupted(connected, "parameters", transport="shared", digest_every=1)
    assert text is not None
    assert connected.all_gather_json(text) == [text] * connected.size
    assert text.startswith("rank 0: silent corruption: ")
    assert f" step {AT} " in text


@pytest.mark.parametrize("kind", ["mpi", "shared", "central"])
def test_undisturbed_jobs_raise_no_alarm(connected: World, kind: str) -> None:
    settings = {"strategy": "central"} if kind == "central" else {"transport": kind}
    if connected.size > 1:
        assert corrupted(connected, "", flips=False, digest_every=1, **settings) is None
