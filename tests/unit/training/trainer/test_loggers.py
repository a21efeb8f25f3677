"""Records for MLflow and Weights & Biases, with modules that keep what they are called with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dptrain import AfterEpoch, Trainer, UserError


class Calls(list[tuple[str, Any]]):
    """Calls of the functions of a module, with a name and the argument of interest."""

    def __call__(self, name: str, take: Callable[..., Any], result: Any = None) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            self.append((name, take(*args, **named)))
            return result

        return call


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    run = SimpleNamespace(info=SimpleNamespace(run_id="7"))
    client = SimpleNamespace(
        create_run=calls("begin", lambda experiment, run_name: run_name, run),
        log_batch=calls("log", lambda run, params=(), metrics=(): [*params, *metrics]),
        set_terminated=calls("end", lambda run, status: status),
    )
    entities = SimpleNamespace(
        Param=lambda name, text: (name, text), Metric=lambda tag, x, time_ms, step: (tag, x, step)
    )
    module = SimpleNamespace(MlflowClient=calls("open", lambda uri: uri, client), entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", "WARNING")
    return calls


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    run = SimpleNamespace(
        log=calls("log", lambda values, step: [(*item, step) for item in values.items()]),
        finish=calls("end", lambda exit_code: exit_code),
    )
    module = SimpleNamespace(
        init=calls("begin", lambda **named: named, run), Settings=lambda **named: named
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return calls


def train(folder: Path, logger: str, **options: Any) -> Trainer:
    """Train for two epochs of two steps."""
    given = {"epochs": 2, "batch_size": 800, "seed": 3, "baseline_steps": 0, **options}
    trainer = Trainer("mlp-5", "irradiance?samples=1600", backend="reference", progress=False,
                      run_dir=folder, logger=logger, **given)  # fmt: skip
    with trainer:
        trainer.fit()
    return trainer


def check_metrics(trainer: Trainer, epochs: list[Any], results: list[Any]) -> None:
    """Compare what was recorded with the history and the summary."""
    for record, found in zip(trainer.history, epochs, strict=True):
        assert ("train/loss", record["train_loss"], record["step"]) in found
        assert not [value for _, value, _ in found if not isinstance(value, int | float)]
    assert trainer.summary is not None
    assert ("test/loss", trainer.summary["test_loss"], trainer.step) in results
    assert "train/loss" not in [tag for tag, _, _ in results]


def test_mlflow_has_settings_epochs_and_results(tmp_path: Path, mlflow: Calls) -> None:
    trainer = train(tmp_path / "run", "mlflow")
    (_, uri), (_, name), (_, params), *epochs, (_, results), (_, status) = mlflow
    assert uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert name == "run"
    assert ("seed", "3") in params
    assert status == "FINISHED"
    check_metrics(trainer, [found for _, found in epochs], results)


def test_wandb_is_offline_and_has_settings_epochs_and_results(tmp_path: Path, wandb: Calls) -> None:
    trainer = train(tmp_path / "run", "wandb")
    (_, started), *epochs, (_, results), (_, code) = wandb
    assert started["mode"] == "offline"
    assert started["dir"] == str(tmp_path / "run")
    assert started["config"]["seed"] == 3
    assert code == 0
    check_metrics(trainer, [found for _, found in epochs], results)


def test_a_run_that_fails_is_recorded_as_such(tmp_path: Path, mlflow: Calls, wandb: Calls) -> None:
    def fail(trainer: Trainer, record: object) -> None:
        raise RuntimeError("out of order")

    for name, calls, end in (("mlflow", mlflow, "FAILED"), ("wandb", wandb, 1)):
        with pytest.raises(RuntimeError, match="out of order"):
            train(tmp_path / name, name, callbacks=[AfterEpoch(fail)])
        assert calls[-1] == ("end", end)


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_the_extra_and_the_run_directory_are_named(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    with pytest.raises(UserError, match=rf"--logger {name} needs the package.*\.\[{name}\]"):
        train(tmp_path / "run", name)
    with pytest.raises(UserError, match="logger writes files to the run directory; set run_dir"):
        Trainer("mlp-5", "irradiance", logger=name)
