"""Ranks compute each other's parts of a step again, and agree on who is wrong."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from dptrain import Trainer
from dptrain.comm.collective import exchange_arrays
from dptrain.comm.world import CorruptedError, World
from dptrain.network import BatchNorm2d, Conv2d, Dense, Dropout, Flatten, Network, ReLU
from dptrain.training.callbacks import AfterStep

pytestmark = pytest.mark.mpi

NETWORK = Network(
    (3, 8, 8),
    [Conv2d(4), BatchNorm2d(), ReLU(), Dropout(0.2), Conv2d(4), Flatten(), Dense(4)],
)
AT = 3


def trainer(world: World, callback: AfterStep | None = None, **settings: Any) -> Trainer:
    random = np.random.default_rng(3)
    x = random.integers(0, 256, (48, 8, 8, 3), np.uint8)
    given: dict[str, Any] = {"batch_size": 18, "shards": 6, "steps": 6, "replay_every": 1}
    return Trainer(
        NETWORK, (x, random.integers(0, 4, 48)), world=world, threads=1, progress=False,
        baseline_steps=0, validation=0.0, callbacks=[] if callback is None else [callback],
        **{**given, **settings},
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "shared"},
        {"transport": "mpi", "flip": True, "crop": 1, "cutmix": 1.0},
        {"strategy": "central", "backend": "reference", "shards": 5},
        {"balance": "fixed", "batch_size": 13, "clip_norm": 0.1},
    ],
)
def test_replays_change_nothing(connected: World, settings: dict[str, Any]) -> None:
    if settings.get("balance"):
        shares = ",".join(str(1 + rank % 3) for rank in range(connected.size))
        settings = {**settings, "balance": shares if connected.size > 1 else "off"}
    found = []
    for every in (1, 0):
        trained = trainer(connected, **{**settings, "replay_every": every})
        trained.fit()
        found.append({name: values.tobytes() for name, values in trained.parameters.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("wrong", [0, -1])
def test_all_ranks_name_the_one_that_is_wrong(connected: World, wrong: int) -> None:
    rank = wrong % connected.size

    def flip(trained: Trainer, result: object) -> None:
        engine = cast("Any", trained.job.engine)
        if trained.step == AT and connected.rank == rank:

            def run() -> None:
                trained.job.replica.run()
                trained.job.replica.gradient_slots[0].view(np.uint32)[5] ^= np.uint32(1)

            engine._run = run

    with pytest.raises(CorruptedError) as caught:
        trainer(connected, AfterStep(flip)).fit()
    text = str(caught.value)
    assert connected.all_gather_json(text) == [text] * connected.size
    assert f"before the update of step {AT + 1}, dense1.weight (gradient) of rank {rank} on" in text


def test_arrays_are_exchanged(connected: World) -> None:
    size, rank = connected.size, connected.rank
    for shift in range(size):
        arrays = {"a": np.full((rank, 2), rank, np.float32), "b": np.arange(rank + 3, dtype="u1")}
        target, source = (rank + shift) % size, (rank - shift) % size
        found = exchange_arrays(connected, arrays, target, source)
        assert found["a"].shape == (source, 2)
        assert (found["a"] == source).all()
        np.testing.assert_array_equal(found["b"], np.arange(source + 3, dtype="u1"))
