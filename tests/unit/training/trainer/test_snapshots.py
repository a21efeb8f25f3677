"""Runs continue from snapshots with the same bits, and leave nothing in memory when they end."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain import AfterStep, BatchNorm2d, Conv2d, Dense, Flatten, Network, ReLU, Trainer
from dptrain.comm.signals import StopRequest
from dptrain.errors import UserError
from dptrain.training.persistence import snapshots
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.persistence.snapshots import SnapshotFolder, promote, read_token

GIVEN = {
    "backend": "reference", "batch_size": 16, "learning_rate": 0.05, "seed": 3, "progress": False,
    "baseline_steps": 0, "checkpoint_seconds": 1e6, "validation": 0.25, "snapshot_every": 5,
}  # fmt: skip
"""No checkpoint is written before the last step, so that everything comes from snapshots."""


class NoSignals(StopRequest):
    """Lets a signal that ends the tests end them; otherwise it would stop a run in order, and the
    test would fail because the run was not killed.
    """

    def listen(self, *signals: signal.Signals) -> None:
        pass


class KilledError(Exception):
    """Ends a run as a killed process does: nothing is written any more."""


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Two folders in the place of /dev/shm and the temporary directory."""
    places = tmp_path / "shm", tmp_path / "tmp"
    for place in places:
        place.mkdir()
    monkeypatch.setattr(snapshots, "places", lambda: places)
    yield places
    assert list(places[0].iterdir()) == [], "nothing is left in memory"


def data(count: int = 96) -> tuple[Any, ...]:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((count, 1, 8, 8)).astype(np.float32)
    y = generator.integers(0, 3, count)
    return x, y, x[:16], y[:16]


LAYERS = [Conv2d(2), BatchNorm2d(), ReLU(), Flatten(), Dense(3)]
NETWORK = Network((1, 8, 8), LAYERS, name="small")
"""Has parameters, state of the optimizer and running statistics."""


def run(
    folder: Path,
    *,
    killed_at: int | None = None,
    after_step: Callable[[Trainer], None] = lambda trainer: None,
    **changes: Any,
) -> Trainer:
    """Train, or resume if there is a run; end as if killed after a step."""

    def kill(trainer: Trainer, result: Any) -> None:
        after_step(trainer)
        if trainer.step == killed_at:
            raise KilledError

    settings = {**GIVEN, "epochs": 6, "snapshots": True, **changes}
    callbacks = [AfterStep(kill)]
    if (folder / "config.toml").exists():
        names = ("snapshots", "snapshot_every") if settings["snapshots"] else ("snapshots",)
        chosen = {name: settings[name] for name in names}
        trainer = Trainer.resume(folder, data(), callbacks=callbacks, progress=False, **chosen)
    else:
        trainer = Trainer(NETWORK, data(), run_dir=folder, callbacks=callbacks, **settings)
    with trainer:
        if killed_at is None:
            trainer.fit(stop=NoSignals())
        else:
            with pytest.raises(KilledError):
                trainer.fit(stop=NoSignals())
    return trainer


def states(folder: Path) -> dict[str, bytes]:
    """Return the arrays of the last and of the best checkpoint."""
    found = [*folder.glob("checkpoints/*/state.safetensors"), *folder.glob("best/*/state.*")]
    newest = sorted(path for path in found if path.parts[-3] == "checkpoints")[-1]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if path == newest or path.parts[-3] == "best"
    }


@pytest.mark.parametrize("kills", [(5,), (7,), (11, 13), (5, 10, 15, 20), (9, 18, 27), (26,)])
def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path: Path, kills: Any) -> None:
    whole = run(tmp_path / "whole")
    for step in kills:
        made = run(tmp_path / "run", killed_at=step).job
        assert made.first_step >= 0
        assert not (tmp_path / "run" / "summary.json").exists()
    rest = run(tmp_path / "run")
    # The callback that ends the run precedes the snapshot of its step.
    assert rest.job.first_step == (kills[-1] - 1) // 5 * 5
    assert states(tmp_path / "run") == states(tmp_path / "whole")
    assert whole.summary is not None
    assert rest.summary is not None
    assert rest.summary["selected_step"] == whole.summary["selected_step"]


def test_a_process_that_outlives_its_successor_changes_no_snapshot(
    tmp_path: Path, memory: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that hung, and goes on after the job was started again, which was killed as well."""
    folder = tmp_path / "run"
    run(tmp_path / "whole")

    def start_another(trainer: Trainer) -> None:
        if trainer.step == 9:
            run(folder, killed_at=killed_at)

    for killed_at in (8, 23):  # The first time, the old process is ahead of its successor.
        run(folder, killed_at=18, after_step=start_another)
        assert "no new snapshot on" in capsys.readouterr().err
        (kept,) = memory[0].iterdir()
        expected = (killed_at - 1) // 5 * 5
        assert SnapshotFolder(kept).newest_step == (expected if expected > 5 else -1)
        assert max(RunDirectory.open(folder).checkpoints.steps()) == 5
    assert run(folder).job.first_step == 20
    assert states(folder) == states(tmp_path / "whole")


def test_the_last_step_is_known_after_a_kill(tmp_path: Path) -> None:
    run(tmp_path / "run", killed_at=9)
    token = read_token(tmp_path / "run")
    assert token is not None
    (folder,) = SnapshotFolder.find(token)
    step, time_ns = folder.last_step
    assert (folder.newest_step, step) == (5, 8)
    assert 0 <= time.time_ns() - time_ns < 3600e9
    rest = run(tmp_path / "run")
    assert rest.job.snapshots is not None
    assert rest.job.snapshots.recovered.last_step == 8


def test_a_snapshot_becomes_a_checkpoint_when_a_job_is_given_up(tmp_path: Path) -> None:
    run(tmp_path / "run", killed_at=14)
    directory = RunDirectory.open(tmp_path / "run")
    assert promote(directory) == 10
    assert promote(directory) is None
    assert directory.checkpoints.steps()[-1] == 10
    assert run(tmp_path / "run", snapshots=False).job.first_step == 10


def test_a_run_that_goes_on_without_snapshots_removes_them(
    tmp_path: Path, memory: tuple[Path, Path]
) -> None:
    run(tmp_path / "run", killed_at=14)
    run(tmp_path / "run", killed_at=17, snapshots=False)
    assert list(memory[0].iterdir()) == []
    assert run(tmp_path / "run").job.first_step == 10


def test_damaged_snapshots_are_not_used(tmp_path: Path, memory: tuple[Path, Path]) -> None:
    run(tmp_path / "run", killed_at=14)
    (state,) = memory[0].glob("*/checkpoints/*/state.safetensors")
    state.write_bytes(state.read_bytes()[:-1])
    assert run(tmp_path / "run").job.first_step == 0


def test_a_copy_and_a_new_run_do_not_use_the_snapshots_of_another(tmp_path: Path) -> None:
    run(tmp_path / "run", killed_at=14)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert run(tmp_path / "copy").job.first_step == 0
    shutil.move(tmp_path / "run", tmp_path / "moved")
    (tmp_path / "run").mkdir()
    assert run(tmp_path / "run").job.first_step == 0
    assert run(tmp_path / "moved").job.first_step == 10


def test_the_temporary_directory_replaces_memory_that_is_too_small(
    tmp_path: Path, memory: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: _Full() if path == memory[0] else real(path))
    made = run(tmp_path / "run", killed_at=14)
    assert made.job.snapshots is not None
    assert str(memory[1]) in made.job.snapshots.text
    assert run(tmp_path / "run").job.first_step == 10
    made = run(tmp_path / "small", killed_at=14, snapshot_mib=1)
    assert made.job.snapshots is not None
    assert made.job.snapshots.folder is None
    assert "but --snapshot-mib is 1; a lost rank costs" in made.job.snapshots.text
    assert run(tmp_path / "small").job.first_step == 0
    assert list(memory[1].iterdir()) == []


class _Full:
    f_bavail, f_frsize, f_blocks = 1, 4096, 1000


def test_a_full_disk_ends_snapshots_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any) -> None:
        raise UserError("cannot write /dev/shm: No space left on device")

    monkeypatch.setattr("dptrain.training.persistence.snapshotting.save_state", refuse)
    trainer = run(tmp_path / "run")
    assert trainer.step == trainer.job.spec.steps
    error = capsys.readouterr().err
    assert error.count("no new snapshot on") == 1
    assert "No space left on device" in error


def test_the_interval_follows_from_the_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due, clock = list[int](), [0.0]
    monkeypatch.setattr("dptrain.training.persistence.snapshotting.monotonic", lambda: clock[0])

    def save(*arguments: Any) -> None:
        clock[0] += 0.1
        due.append(arguments[2])

    def tick(trainer: Trainer, result: Any) -> None:
        clock[0] += 1.0

    monkeypatch.setattr("dptrain.training.persistence.snapshotting.save_state", save)
    settings = {**GIVEN, "snapshot_every": None, "steps": 120, "snapshots": True}
    callbacks = [AfterStep(tick)]
    with Trainer("mlp-5", "irradiance?samples=256", run_dir=tmp_path / "run", callbacks=callbacks,
                 **settings) as trainer:  # fmt: skip
        trainer.fit()
    assert due[0] == 20
    # 0.1 s of 20 s is 0.5%; rounding may add a step.
    assert all(after - before in (20, 21) for before, after in itertools.pairwise(due))
    assert len(due) >= 5


def test_snapshots_that_were_left_long_ago_are_removed(
    tmp_path: Path, memory: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "old", killed_at=14)
    (progress,) = memory[0].glob("*/progress")
    run(tmp_path / "new")
    assert progress.exists()
    monkeypatch.setattr(snapshots, "STALE_S", 0.0)
    run(tmp_path / "newer")
    assert not progress.exists()


def test_snapshots_of_a_long_run_are_not_old(tmp_path: Path, memory: tuple[Path, Path]) -> None:
    """Steps are recorded in mapped memory, which does not change the time of a file."""
    folder = SnapshotFolder.of_token(memory[0], "a1")
    folder.open("run")
    folder.record(7)
    folder.close()
    for path in (folder.path / "progress", folder.path):
        os.utime(path, (0, 0))
    assert not folder.is_stale()
    (folder.path / "progress").unlink()  # As if killed between the folder and the file.
    assert not folder.is_stale()
    os.utime(folder.path, (0, 0))
    assert folder.is_stale()
    folder.remove()


def test_a_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, memory: tuple[Path, Path]
) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: place != memory[0])
    assert snapshots.choose_place(1 << 20, 2) == (memory[1], "")
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    reason = " and ".join(f"{place} cannot be written" for place in memory)
    assert snapshots.choose_place(1 << 20, 2) == (None, f"they need 1.0 MiB; {reason}")


def test_intervals_need_snapshots() -> None:
    with pytest.raises(UserError, match="--snapshot-every is 5, but it has no effect without"):
        Trainer("model0", data(), **{**GIVEN, "snapshots": False})
