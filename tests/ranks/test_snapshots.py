"""A run continues from the newest snapshot of any node, and each node keeps its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dptrain import Trainer
from dptrain.comm.collective import call_on_rank_zero
from dptrain.comm.world import World
from dptrain.training.callbacks import AfterStep
from dptrain.training.persistence import snapshots
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.persistence.snapshots import SnapshotFolder, new_token, recover

pytestmark = pytest.mark.mpi

FACTS = {"updates": 1}


def state(step: int) -> dict[str, np.ndarray]:
    return {"parameters/w": np.full((2, 3), step, np.float32), "momentum/w": np.float32([step])}


def test_the_newest_snapshot_of_any_node_is_written_to_the_run_directory(
    connected: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank counts as a node with a /dev/shm of its own; the last one has the newest state."""
    world = connected
    monkeypatch.setattr(snapshots, "places", lambda: (tmp_path,))
    monkeypatch.setattr(world, "local_rank", 0)
    folder = Path(world.broadcast_json(str(tmp_path / "run")))

    def make() -> str:
        folder.mkdir()
        (folder / "config.toml").touch()
        RunDirectory.open(folder).save_checkpoint(3, state(3), FACTS)
        return new_token(folder)

    token = world.broadcast_json(call_on_rank_zero(world, make))
    own = SnapshotFolder.of_token(tmp_path, token)
    own.open(str(folder))
    own.record(20 + world.rank)
    if world.rank:  # The first node lost its snapshots.
        best = own.save_checkpoint(5, state(5), FACTS)
        own.best.link(best, 5)
        own.save_checkpoint(10 + world.rank, state(10 + world.rank), FACTS)
    own.close()
    run = RunDirectory.open(folder) if world.is_rank_zero else None
    for keeps in (True, False):
        assert recover(world, run, keeps=keeps).last_step == 19 + world.size
        assert own.path.exists() == keeps
    if run is not None:
        newest = 3 if world.size == 1 else 9 + world.size
        loaded = run.checkpoints.load()
        assert loaded.step == newest
        assert loaded.facts == FACTS
        for name, values in state(newest).items():
            assert loaded.arrays[name].tobytes() == values.tobytes()
        assert run.best.steps() == ([] if world.size == 1 else [5])


def test_each_node_keeps_the_same_state(
    two_per_node: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = two_per_node
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setattr(snapshots, "places", lambda: (place,))
    folder = world.broadcast_json(str(tmp_path / "run"))
    found = []

    def look(trainer: Trainer, result: object) -> None:
        if trainer.step == 8:
            found.extend(path.read_bytes() for path in place.glob("*/checkpoints/*/state.*"))

    trainer = Trainer(
        "mlp-5", "irradiance?samples=64", world=world, backend="reference", batch_size=8, steps=9,
        shards=world.size, transport="mpi", threads=1, seed=1, progress=False, run_dir=folder,
        snapshots=True, snapshot_every=4, callbacks=[AfterStep(look)], validation=0.0,
        baseline_steps=0,
    )  # fmt: skip
    with trainer:
        trainer.fit()
    states = [
        bytes.fromhex(text) for text in world.all_gather_json("".join(b.hex() for b in found))
    ]
    kept = [each for each in states if each]
    assert len(kept) == sum(world.all_gather_json(world.first_on_node()))
    assert len(set(kept)) == 1
    assert list(place.iterdir()) == []
