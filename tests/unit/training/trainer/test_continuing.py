"""Training that goes on: further epochs, data from `fit`, and rates that callbacks set."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dptrain import AfterEpoch, Dense, Flatten, Network, Trainer, UserError
from dptrain.training.schedules import Schedule
from dptrain.training.selection import Selection

GIVEN: dict[str, Any] = {
    "backend": "reference", "progress": False, "batch_size": 10, "crop": 0, "learning_rate": 0.05,
    "validation": 0.2,
}  # fmt: skip


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 90)
    x = rng.integers(0, 60, (90, 8, 8)).astype(np.uint8)
    x[np.arange(90), :, y * 3] += 60
    return x, y


def linear(**settings: Any) -> Trainer:
    network = Network((1, 8, 8), [Flatten(), Dense(3)], name="linear")
    return Trainer(network, arrays(), **{**GIVEN, **settings})


def same_parameters(one: Trainer, other: Trainer) -> bool:
    return all(np.array_equal(one.parameters[k], other.parameters[k]) for k in one.parameters)


def test_further_epochs_with_a_constant_rate_equal_a_longer_run() -> None:
    parts, whole = (linear(schedule="constant", best_by="none", epochs=n) for n in (1, 3))
    parts.fit()
    parts.fit(epochs=2)
    whole.fit()
    assert parts.job.spec.epochs == 3
    assert parts.history["learning_rate"] == whole.history["learning_rate"]
    assert same_parameters(parts, whole)
    assert parts.summary["test_loss"] == whole.summary["test_loss"]


def test_further_epochs_have_a_cosine_of_their_own_which_a_resume_continues(tmp_path: Path) -> None:
    given: dict[str, Any] = {"schedule": "cosine", "epochs": 2, "best_by": "none"}
    whole = linear(**given)
    whole.fit()
    whole.fit(epochs=2)
    rates = whole.history["learning_rate"]
    assert rates[:2] == rates[2:]

    linear(**given, run_dir=tmp_path / "run").fit()
    with Trainer.resume(
        tmp_path / "run", arrays(), epochs=4, stop_after=15, progress=False
    ) as part:
        part.fit()
    assert part.job.spec.schedule_start == 12
    with Trainer.resume(tmp_path / "run", arrays(), progress=False) as rest:
        rest.fit()
    assert same_parameters(whole, rest)
    assert [span.value("epochs") for span in rest.job.spans.items] == [2, 4, 4]


def test_patience_counts_from_the_further_epochs(tmp_path: Path) -> None:
    trainer = linear(epochs=30, patience=2, run_dir=tmp_path / "run", schedule="constant")
    trainer.fit()
    ended = trainer.step
    assert trainer.progress.selection.is_out_of_patience
    trainer.fit(epochs=1)
    assert trainer.step == ended + trainer.job.spec.epoch_steps
    trainer.close()
    resumed = Trainer.resume(tmp_path / "run", arrays(), progress=False)
    assert resumed.job.selection == trainer.progress.selection


def test_a_trainer_without_data_gets_it_from_fit() -> None:
    network = Network((1, 8, 8), [Flatten(), Dense(3)], name="linear")
    trainer, expected = Trainer(network, epochs=2, **GIVEN), linear(epochs=2)
    with pytest.raises(UserError, match=r"no data yet; call fit\(x, y\)"):
        trainer.evaluate()
    trainer.fit(*arrays())
    expected.fit()
    assert same_parameters(trainer, expected)
    assert trainer.evaluate(*arrays())["accuracy"] == trainer.evaluate(arrays())["accuracy"]
    with pytest.raises(UserError, match="would replace the data"):
        trainer.fit(*arrays())
    with pytest.raises(UserError, match="epochs is 0; expected a whole number"):
        trainer.fit(epochs=0)


def test_a_rate_that_a_callback_sets_is_resumed(tmp_path: Path) -> None:
    def lower(trainer: Trainer, record: Any) -> None:
        if record["epoch"] == 1:
            trainer.set_learning_rate(trainer.learning_rate / 5)

    def run(name: str, **settings: Any) -> Trainer:
        where = tmp_path / name
        return linear(epochs=3, callbacks=[AfterEpoch(lower)], run_dir=where, **settings)

    whole = run("whole", schedule=lambda progress: 1 - progress)
    whole.fit()
    assert whole.history["learning_rate"][1:] == pytest.approx([0.05 * (1 - 6 / 18) / 5] * 2)
    with run("part", schedule=lambda progress: 1 - progress, stop_after=9) as part:
        part.fit()
    with pytest.raises(UserError, match=r"needs a function in Python: .*Trainer\.resume"):
        Trainer.resume(tmp_path / "part", arrays(), progress=False)
    rest = Trainer.resume(
        tmp_path / "part", arrays(), progress=False, schedule=lambda progress: 1 - progress
    )
    rest.fit()
    assert same_parameters(whole, rest)
    with pytest.raises(UserError, match=r"learning rate is -1\.0; expected a number above 0"):
        rest.set_learning_rate(-1.0)
    with pytest.raises(UserError, match="returned nan for progress 0; expected a factor"):
        linear(epochs=1, schedule=lambda progress: float("nan"))


def test_plateau_reduces_the_rate_as_pytorch_does() -> None:
    losses = np.random.default_rng(3).uniform(0.4, 1, 60) + np.linspace(1, 0, 60)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=2, threshold=0.0
    )
    selection, rates = Selection(by="loss", plateau=3), []
    for step, loss in enumerate(losses):
        theirs.step(loss)
        selection.add(step, loss=loss, accuracy=None, epochs=step)
        schedule = Schedule(0.1, "plateau", step_factor=0.5, reductions=selection.reductions)
        rates.append((schedule.rate(step), optimizer.param_groups[0]["lr"]))
    assert selection.reductions > 3
    np.testing.assert_allclose(*zip(*rates, strict=True), rtol=1e-12)


def test_further_epochs_keep_what_a_plateau_has_counted() -> None:
    selection = Selection(by="loss", patience=3, plateau=2)
    for step in range(1, 6):
        selection.add(step, loss=1.0, accuracy=None, epochs=step)
        selection.begin_again()
    assert (selection.reductions, selection.since_best) == (2, 0)


def test_a_resumed_plateau_repeats_its_reductions(tmp_path: Path) -> None:
    given: dict[str, Any] = {"schedule": "plateau", "plateau_patience": 1, "step_factor": 0.5}
    given |= {"epochs": 12, "best_by": "loss", "learning_rate": 0.5}
    whole = linear(**given)
    whole.fit()
    assert len({*whole.history["learning_rate"]}) > 2
    with linear(**given, run_dir=tmp_path / "run", stop_after=45) as part:
        part.fit()
    rest = Trainer.resume(tmp_path / "run", arrays(), progress=False)
    rest.fit()
    assert rest.history["learning_rate"] == whole.history["learning_rate"][-len(rest.history) :]
    assert same_parameters(whole, rest)
    # The checkpoint of the best epoch is lost.
    with linear(**given, run_dir=tmp_path / "lost", stop_after=45) as part:
        part.fit()
        reductions, best = part.job.schedule.reductions, part.progress.selection.best_step
    assert reductions
    for folder in ("best", "checkpoints"):
        shutil.rmtree(tmp_path / "lost" / folder / f"step-{best:08d}", ignore_errors=True)
    rest = Trainer.resume(tmp_path / "lost", arrays(), progress=False)
    assert rest.job.selection.best_step == -1
    assert rest.job.schedule.reductions == reductions
    with pytest.raises(UserError, match="--schedule plateau needs validation data"):
        linear(schedule="plateau", validation=0)
    with pytest.raises(UserError, match="--schedule plateau follows improvements by"):
        linear(schedule="plateau", best_by="none")


# Metrics of the user.


@pytest.mark.parametrize("shards", [0, 2])
def test_metrics_receive_all_predictions_and_targets(shards: int) -> None:
    def error(outputs: Any, targets: Any) -> float:
        np.testing.assert_allclose(outputs.sum(axis=1), 1, rtol=1e-6)
        return float(np.mean(outputs.argmax(axis=1) != targets))

    trainer = linear(epochs=2, metrics={"error": error}, shards=shards)
    trainer.fit()
    accuracies = np.array(trainer.history["validation_accuracy"])
    np.testing.assert_allclose(trainer.history["validation_error"], 1 - accuracies)
    assert trainer.summary is not None
    assert trainer.summary["test_error"] == pytest.approx(1 - trainer.summary["test_accuracy"])
    assert trainer.evaluate()["error"] == trainer.summary["test_error"]
    assert "<td align=" in trainer.history._repr_html_()


def test_metrics_of_values_are_in_the_unit_of_the_data() -> None:
    x = np.random.default_rng(0).uniform(1, 9, (40, 3))
    given = {"backend": "reference", "progress": False, "epochs": 1, "batch_size": 8}
    trainer = Trainer(
        "mlp-4", (x, x.sum(axis=1)), **given,
        metrics={"offset": lambda outputs, targets: (outputs - targets).mean() + np.inf * 0,
                 "mae2": lambda outputs, targets: np.abs(outputs - targets).mean()},
    )  # fmt: skip
    found = trainer.evaluate()
    assert found["mae2"] == pytest.approx(found["mae"])
    assert found["offset"] is None


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([len], "expected functions by name"),
        ({"auc": len}, "the name of a metric is 'auc'"),
        ({"a b": len}, "expected letters, digits and _"),
    ],
)
def test_wrong_metrics_are_refused(metrics: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        linear(metrics=metrics)


def test_a_metric_returns_a_number() -> None:
    with pytest.raises(UserError, match="metric words returned 'x'; expected a number"):
        linear(epochs=1, metrics={"words": lambda outputs, targets: "x"}).fit()
