"""Training with validation data: the best epoch, early stopping, and runs that are resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from signal import SIGTERM
from typing import Any

import numpy as np
import pytest

import dptrain
from dptrain import Trainer
from dptrain.comm.signals import StopRequest
from dptrain.errors import UserError
from dptrain.network import Dense, Flatten, Network
from dptrain.training.callbacks import AfterEpoch, AfterStep
from dptrain.training.selection import Selection
from dptrain.training.spec import JobSpec
from tests.tiers import tiered

NETWORK = Network((1, 4, 4), [Flatten(), Dense(3)], name="linear")


def noisy(count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Pictures that hardly show their class, so that a network overfits."""
    rng = np.random.default_rng(5)
    y = np.arange(count) % 3
    x = rng.normal(size=(count, 1, 4, 4)).astype(np.float32)
    x[np.arange(count), 0, y, y] += 1.0
    return x, y


def make(**settings: Any) -> Trainer:
    given: dict[str, Any] = {
        "validation": 0.25, "epochs": 12, "batch_size": 8, "learning_rate": 0.2, "seed": 2,
        "backend": "reference", "progress": False, "schedule": "constant", **settings,
    }  # fmt: skip
    return Trainer(NETWORK, noisy(), **given)


def test_training_ends_with_the_best_parameters() -> None:
    seen: list[tuple[float, np.ndarray]] = []

    def look(trainer: Trainer, record: dict[str, Any]) -> None:
        seen.append((record["validation_loss"], trainer.parameters["dense1.weight"]))

    trainer = make(best_by="loss", callbacks=[AfterEpoch(look)])
    trainer.fit()
    best = min(range(12), key=lambda epoch: seen[epoch][0])
    assert best < 11, "the last epoch is the best, so this test shows nothing"
    np.testing.assert_array_equal(trainer.parameters["dense1.weight"], seen[best][1])
    summary = trainer.summary
    assert summary is not None
    assert summary["selected_by"] == "loss"
    assert summary["selected_step"] == (best + 1) * trainer.job.spec.epoch_steps
    assert summary["validation_loss"] == seen[best][0]
    assert summary["test_accuracy"] == trainer.evaluate()["accuracy"]
    assert summary["test_loss"] == trainer.evaluate()["loss"]
    assert "test_loss" not in trainer.history.names


def test_the_last_parameters_stay_on_request() -> None:
    last: list[np.ndarray] = []

    def look(trainer: Trainer, record: dict[str, Any]) -> None:
        last.append(trainer.parameters["dense1.weight"])

    trainer = make(best_by="none", callbacks=[AfterEpoch(look)])
    trainer.fit()
    np.testing.assert_array_equal(trainer.parameters["dense1.weight"], last[-1])
    assert trainer.summary is not None
    assert trainer.summary["validation_loss"] == trainer.history[-1]["validation_loss"]


def test_training_ends_when_patience_ends(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(best_by="loss", patience=2, epochs=100, progress=True)
    trainer.fit()
    losses = trainer.history["validation_loss"]
    assert len(losses) < 100
    assert min(losses) == losses[-3]
    assert trainer.summary is not None
    assert trainer.summary["out_of_patience"]
    text = capsys.readouterr().out
    assert "2 evaluations without an improvement" in text
    assert f"; parameters of epoch {len(losses) - 2}, the best one" in text


def test_nothing_is_evaluated_before_the_end_without_validation_data() -> None:
    trainer = make(validation=None)
    trainer.fit()
    assert set(trainer.history["validation_loss"]) == {None}
    assert trainer.summary is not None
    assert trainer.summary["test_accuracy"] is not None
    assert trainer.summary["selected_by"] == "none"
    for setting in ({"patience": 2}, {"best_by": "loss"}, {"until_accuracy": 0.5}):
        (name,) = setting
        flag = f"--{name.replace('_', '-')} needs validation data"
        with pytest.raises(UserError, match=flag):
            make(validation=None, **setting)
    with pytest.raises(UserError, match="best_by is none"):
        make(best_by="none", patience=2)


def test_the_best_checkpoint_is_used_for_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(best_by="loss", run_dir=folder, keep_checkpoints=1) as trainer:
        trainer.fit()
    summary = json.loads((folder / "summary.json").read_text())
    step = summary["selected_step"]
    assert [path.name for path in (folder / "best").iterdir()] == [f"step-{step:08d}"]
    assert len(list((folder / "checkpoints").iterdir())) == 1
    model = dptrain.load(folder, backend="reference")
    assert model.step == step
    np.testing.assert_array_equal(
        model.parameters["dense1.weight"],
        trainer.parameters["dense1.weight"].astype(model.parameters["dense1.weight"].dtype),
    )
    last = dptrain.load(folder, checkpoint=trainer.step, backend="reference")
    assert last.step == trainer.step > step
    assert dptrain.load(folder, checkpoint=step, backend="reference").step == step
    assert dptrain.load(folder / "best", backend="reference").step == step
    trainer.save(tmp_path / "saved")
    assert dptrain.load(tmp_path / "saved", backend="reference").step == step
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["test_loss"] == summary["test_loss"]


@pytest.mark.parametrize("steps", tiered([9 * 2, 9 * 5, 9 * 5 + 7, 9 * 8], [9 * 5 + 7]))
def test_a_resumed_run_selects_as_the_whole_run(tmp_path: Path, steps: int) -> None:
    def outcome(trainer: Trainer) -> dict[str, Any]:
        assert trainer.summary is not None
        names = ("selected_step", "validation_loss", "test_loss", "steps", "out_of_patience")
        return {name: trainer.summary[name] for name in names}

    settings: dict[str, Any] = {
        "best_by": "loss", "patience": 4, "epochs": 40, "learning_rate": 0.03,
    }  # fmt: skip
    with make(run_dir=tmp_path / "whole", **settings) as whole:
        whole.fit()
    assert 9 * 8 < whole.step < 9 * 40, "the run does not end after it is resumed, early"
    stop = StopRequest()

    def receive(trainer: Trainer, result: object) -> None:
        if trainer.step == steps - 1:
            stop._receive(SIGTERM, None)

    at = AfterStep(receive)
    with make(run_dir=tmp_path / "part", callbacks=[at], **settings) as part:
        part.fit(stop=stop)
        assert part.step == steps
        assert part.summary is not None
        assert part.summary["test_loss"] is None
    with Trainer.resume(tmp_path / "part", noisy(), progress=False) as resumed:
        resumed.fit()
    assert outcome(resumed) == outcome(whole)
    np.testing.assert_array_equal(
        resumed.parameters["dense1.weight"], whole.parameters["dense1.weight"]
    )
    with Trainer.resume(tmp_path / "part", noisy(), progress=False) as again:
        with pytest.warns(UserWarning, match="the last 4 evaluations were no improvement"):
            again.fit()
        assert again.step == resumed.step
        np.testing.assert_array_equal(
            again.parameters["dense1.weight"], whole.parameters["dense1.weight"]
        )
    with pytest.raises(UserError, match=r"trained with --validation 0\.25, but this run uses 0\.5"):
        Trainer.resume(tmp_path / "part", noisy(), progress=False, validation=0.5)


@pytest.mark.parametrize("seed", tiered(range(6), range(2)))
def test_a_run_that_is_killed_loses_at_most_the_time_between_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Epochs take up to 30 s of a clock that the test sets, and the run is killed after one."""
    rng, clock, written, seconds = np.random.default_rng(seed), [0.0], [0.0], 30.0
    monkeypatch.setattr("dptrain.training.callbacks.monotonic", lambda: clock[0])
    killed_at = int(rng.integers(2, 12))
    folder = tmp_path / "run"

    def look(trainer: Trainer, record: dict[str, Any]) -> None:
        # It runs before the checkpoint of its epoch.
        newest = trainer.job.run.checkpoints.steps() if trainer.job.run is not None else []
        best = trainer.job.run.best.steps() if trainer.job.run is not None else []
        assert not best or max(best) <= max(newest)
        assert clock[0] - written[0] <= seconds + 30.0
        if newest and newest[-1] == trainer.step - trainer.job.spec.epoch_steps:
            written[0] = clock[0]
        if record["epoch"] == killed_at:
            raise KeyError("killed")
        clock[0] += float(rng.random()) * 30.0

    with make(best_by="loss") as whole:
        whole.fit()
    part = make(best_by="loss", run_dir=folder, callbacks=[AfterEpoch(look)])
    with part, pytest.raises(KeyError, match="killed"):
        part.fit()
    with Trainer.resume(folder, noisy(), progress=False) as resumed:
        resumed.fit()
    assert whole.summary is not None
    assert resumed.summary is not None
    for name in ("selected_step", "validation_loss", "test_loss"):
        assert resumed.summary[name] == whole.summary[name]
    assert (folder / "best" / f"step-{whole.summary['selected_step']:08d}").is_dir()
    assert (folder / "checkpoints" / f"step-{whole.step:08d}").is_dir()


def test_checkpoints_that_were_requested_are_all_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(run_dir=folder, checkpoint_every=5, keep_checkpoints=100, best_by="none") as trainer:
        trainer.fit()
    found = [int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir()]
    assert sorted({*found}) == sorted({*range(5, trainer.step + 1, 5), trainer.step})


def test_a_crash_before_the_best_checkpoint_was_added_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(run_dir=folder, best_by="loss", epochs=2) as trainer:
        trainer.fit()
        step = trainer.progress.selection.best_step
    shutil.rmtree(folder / "best")
    with Trainer.resume(folder, noisy(), progress=False, epochs=3) as resumed:
        assert resumed.job.selection.best_step == step
        assert [path.name for path in (folder / "best").iterdir()] == [f"step-{step:08d}"]
    # If it is in neither folder, the run selects among the evaluations to come.
    shutil.rmtree(folder / "best")
    shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    with Trainer.resume(folder, noisy(), progress=False, epochs=3) as resumed:
        assert resumed.job.selection.best_step == -1
        resumed.fit()
        assert resumed.progress.selection.best_step > resumed.job.first_step


def test_values_are_selected_by_their_loss(tmp_path: Path) -> None:
    given: dict[str, Any] = {"backend": "reference", "epochs": 3, "progress": False}
    trainer = Trainer("mlp-8", "irradiance?samples=300", validation=0.2, patience=3, **given)
    trainer.fit()
    assert trainer.job.spec.best_by == "loss"
    assert trainer.summary is not None
    assert trainer.summary["validation_loss"] == min(trainer.history["validation_loss"])
    assert trainer.summary["validation_accuracy"] is None
    with pytest.raises(UserError, match="--best-by accuracy needs classes"):
        Trainer("mlp-8", "irradiance?samples=300", validation=0.2, best_by="accuracy", **given)
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    labels = Trainer("multilabel-4", (x, (x > 0).astype(int)), validation=0.2, **given)
    assert labels.job.spec.best_by == "loss"


def test_the_recipe_of_the_digits_has_validation_data() -> None:
    found = Trainer("model-small", epochs=1, backend="reference", progress=False)
    assert found.job.spec.validation == 0.2
    assert found.job.spec.best_by == "accuracy"
    assert [len(split) for split in found.data.splits] == [1150, 360, 287]
    other = Trainer("model-small", "synthetic?samples=64", backend="reference", progress=False)
    assert other.data.validation is None


def spec(**values: Any) -> JobSpec:
    found = make().job.spec
    return JobSpec(**{**found.__dict__, **values})


@pytest.mark.parametrize("by", ["accuracy", "loss"])
def test_only_better_values_are_improvements(by: str) -> None:
    found = Selection.of(spec(best_by=by, patience=2))
    values = [(0.5, 0.5), (0.5, 0.5), (0.4, 0.6), (float("nan"), 0.7), (0.4, 0.6)]
    steps = []
    for step, (loss, accuracy) in enumerate(values):
        found.add(step, loss=loss, accuracy=accuracy, epochs=step)
        steps.append((found.best_step, found.since_best, found.ends_training))
    assert steps == [(0, 0, False), (0, 1, False), (2, 0, False), (2, 1, False), (2, 2, True)]
    assert str(found) == ("validation accuracy 60.00%" if by == "accuracy" else
                          "validation loss 0.4")  # fmt: skip
