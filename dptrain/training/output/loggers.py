"""Records of a run for MLflow and for Weights & Biases, in files: nothing is sent to a server.

Names of metrics are those of `dptrain.measure.tensorboard.tag_of`.
"""

from __future__ import annotations

import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptrain.errors import UserError
from dptrain.files import writing
from dptrain.measure.tensorboard import tag_of


class RunLogger(ABC):
    """A record of one run, which begins when it is made.

    Args:
        folder: the run directory.
        settings: of the run, by name.

    Raises:
        UserError: the package is missing, or a file cannot be written.
    """

    @abstractmethod
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics by tag after a step."""

    @abstractmethod
    def end(self, *, complete: bool) -> None:
        """End the record; `complete` is False if an error ended the run."""


class MLflowLogger(RunLogger):
    """A run in the database ``mlflow.db`` next to the run directory, with those of other runs."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        self._library = _import("mlflow")
        with writing(folder.parent, "--run-dir"):
            (folder.parent / "mlflow.db").touch()
        self._client = self._library.MlflowClient(f"sqlite:///{folder.parent.absolute()}/mlflow.db")
        self._run = self._client.create_run("0", run_name=folder.name).info.run_id
        param = self._library.entities.Param
        texts = [param(name, str(value)) for name, value in settings.items()]
        self._client.log_batch(self._run, params=texts)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        now, metric = time.time_ns() // 10**6, self._library.entities.Metric
        found = [metric(tag, value, now, step) for tag, value in values.items()]
        self._client.log_batch(self._run, metrics=found)

    def end(self, *, complete: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if complete else "FAILED")


class WandbLogger(RunLogger):
    """An offline run of Weights & Biases in the folder ``wandb`` of the run directory."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        library = _import("wandb")
        quiet = library.Settings(
            console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
        )
        self._run = library.init(
            project="dptrain",
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            mode="offline",
            settings=quiet,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self, *, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


LOGGERS: dict[str, type[RunLogger]] = {"mlflow": MLflowLogger, "wandb": WandbLogger}
"""Every kind of record by its name in the setting `logger`."""


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics or results, by tag.

    Example:
        >>> numbers({"step": 3, "train_loss": 0.5, "test_loss": None, "network": "model0"})
        {'train/loss': 0.5}
    """
    return {
        tag_of(name): value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--logger {name} needs the package {name} ({error}); pip install '.[{name}]', or "
            "leave --logger out"
        ) from None
