"""The directory of a run.

config.toml       the settings with which the run began, with the recipe filled in; its first lines
                  are the commands that repeat the run
env.json          machine, versions and command
metrics.jsonl     one record a line, written while training
spec.json         the resolved specification: see `dptrain.training.spec.RunSpec`
spans.json        which settings made which steps: see `dptrain.runs.spans`
labels.toml       tags and a note: see `dptrain.runs.labels`
network.toml      the network, unless dptrain builds it by its name
summary.json      results, written when the run ends
predicted.csv     expected and predicted values of up to 4,000 test samples, of a regression
confusion.csv     confusion matrix of the test data, of up to 200 classes
labels.csv        samples and predictions of each label of the test data, of several labels
mistakes.png      images of the most confident mistakes on the test data
checkpoints/      see `dptrain.training.persistence.checkpoints`
incidents.json    faults after which the ranks were started again: see `dptrain.runs.incidents`
best/             the checkpoint of the best epoch by the validation data
.last_checkpoint  step of the newest checkpoint
.lock             locked by the process that trains here
.progress         the last complete step: see `dptrain.runs.incidents`
.snapshots        names the snapshots of the run: see `dptrain.training.persistence.snapshots`
.supervisor       locked by the process of `dptrain train --survive`
"""

from __future__ import annotations

import difflib
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from dptrain.data.base import Dataset
from dptrain.data.spec import PYTHON_DATA
from dptrain.errors import UserError, shown
from dptrain.files import (
    dump_json,
    read_regular,
    replacing,
    sync,
    write_whole,
    writing,
)
from dptrain.foreign import refuse_foreign
from dptrain.forms import read_object
from dptrain.measure.metrics import MetricsFile
from dptrain.network.files import write_network
from dptrain.network.network import Network
from dptrain.runs.files import read_file
from dptrain.runs.locks import lock
from dptrain.runs.names import (
    CONFIG,
    ENVIRONMENT,
    FAILURE,
    LOCK,
    NETWORK,
    SPANS,
    SPECIFICATION,
    SUMMARY,
)
from dptrain.runs.spans import Spans
from dptrain.texts import command_line
from dptrain.training.evaluation.class_files import (
    CONFUSION,
    LABELS,
    MISTAKES,
    MOST_CLASSES,
    confusion_text,
    labels_text,
    mistakes_image,
)
from dptrain.training.evaluation.predicted_values import FILE as PREDICTED
from dptrain.training.evaluation.predicted_values import MOST_ROWS, values_text
from dptrain.training.evaluation.quality import ClassQuality, LabelQuality, Quality, ValueQuality
from dptrain.training.persistence.checkpoints import Arrays, CheckpointStore
from dptrain.training.settings import read_settings

BEST = "best"
CHECKPOINTS, LAST_CHECKPOINT, SNAPSHOTS = "checkpoints", ".last_checkpoint", ".snapshots"


class RunDirectoryLostError(UserError):
    """The run directory was moved or deleted while the run was writing to it."""

    __module__ = "dptrain"

    exit_code = 1


class RunDirectory:
    """The files of one run. `create` makes a new directory; `open` opens an existing one.

    Attributes:
        path: the directory.
        metrics: its `metrics.jsonl`.
        checkpoints: its checkpoints.
        best: its best checkpoint.
    """

    def __init__(self, path: Path, *, keep: int = 3) -> None:
        self.path = path
        self.metrics = MetricsFile(path / "metrics.jsonl", self.check_present)
        self.checkpoints = CheckpointStore(path / CHECKPOINTS, keep, self.check_present)
        self.best = CheckpointStore(path / BEST, 1, self.check_present)
        self._release: weakref.finalize[Any, Any] | None = None
        self._directory: int | None = None

    @classmethod
    def create(
        cls, path: Path | None, *, network: str, data: str, now: datetime, keep: int = 3
    ) -> RunDirectory:
        """Create and lock the directory of a new run; nothing is overwritten.

        Args:
            path: the directory; None for ``runs/<network>-<data>-<date>-<time>``, followed by
                ``-2``, ``-3``, … while the name is taken.
            network: name or file of the network.
            data: data specification; only the part before a colon is used.
            now: the time for the name.
            keep: number of checkpoints to keep.

        Raises:
            UserError: `path` is a file, is not empty, or cannot be created. Hidden files do not
                count: a run that was killed at its start leaves some, and so do network disks.
        """
        if path is None:
            run = cls(new_folder(network, data, now), keep=keep)
            run.hold()
            return run
        with writing(path):
            _refuse_taken(path)
            path.mkdir(parents=True, exist_ok=True)
            sync(path.parent)
            run = cls(path, keep=keep)
            run.hold()
            _refuse_taken(path)  # Another process may have trained here in the meantime.
        return run

    @classmethod
    def open(cls, path: Path, *, keep: int = 3) -> RunDirectory:
        """Open the directory of an existing run.

        Raises:
            UserError: there is no run; the message names what is missing and similar paths.
        """
        refuse_foreign(path)
        try:
            if (path / CONFIG).is_file():
                return cls(path, keep=keep)
            problem = f"it has no {CONFIG}" if path.is_dir() else "no such directory"
            near = _near(path)
        except OSError as error:
            raise UserError(f"cannot read run directory {path}: {error.strerror}") from error
        raise UserError(f"{path} is not a run directory: {problem}{near}")

    def hold(self) -> None:
        """Prevent other processes from training here, until `release` or the end of the process.

        Raises:
            UserError: another process trains here; the message names it.
        """
        with writing(self.path / LOCK):
            descriptor = lock(self.path / LOCK)
            directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            self._release = weakref.finalize(self, _close_all, descriptor, directory)
            self._directory = directory

    def release(self) -> None:
        """Allow other processes to train here."""
        self._directory = None
        if self._release is not None:
            self._release()

    def check_present(self) -> None:
        """Check that the directory which `hold` locked is still at `path`.

        Every write calls this first. Otherwise a run whose directory was moved would continue
        without leaving results, or would write a part of them to a new directory.

        Raises:
            RunDirectoryLostError: the directory was moved or deleted.
        """
        if self._directory is None:
            return
        # The open descriptor keeps the number of the inode from being used again.
        held = os.fstat(self._directory)
        with suppress(OSError):
            if os.path.samestat(self.path.stat(), held):
                return
        moved_to = ""
        if held.st_nlink:
            with suppress(OSError):
                moved_to = str(Path(f"/proc/self/fd/{self._directory}").readlink())
        if moved_to and Path(moved_to).is_dir():
            raise RunDirectoryLostError(
                f"run directory {self.path} was moved to {moved_to} during training, so training "
                f"ends; resume it with: {command_line('train', '--resume', moved_to)}"
            )
        raise RunDirectoryLostError(
            f"run directory {self.path} was deleted or moved during training, so training ends; "
            "start a new run, or resume the run from its new location"
        )

    def has_checkpoint(self) -> bool:
        """Return True if the run has a checkpoint to resume from, False if it never saved one.

        Raises:
            UserError: the run saved checkpoints or ended, but its checkpoints are missing or
                cannot be read.
        """
        folder = self.checkpoints.folder
        if self.checkpoints.steps():
            return True
        last, is_ended = self._last_checkpoint(), (self.path / SUMMARY).exists()
        if last is None and not is_ended:
            return False
        saved = "ended" if last is None else f"saved a checkpoint of step {last}"
        missing = "is empty" if folder.exists() else "is missing"
        raise UserError(
            f"the run in {self.path} {saved}, but {folder} {missing}; restore that folder, or "
            f"start a new run with: {command_line('train', '--config', self.path / CONFIG)}"
        )

    def save_checkpoint(self, step: int, arrays: Arrays, facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint and record its step, so that `has_checkpoint` notices a loss.

        Arguments, result and errors are those of `CheckpointStore.save`.
        """
        path = self.checkpoints.save(step, arrays, facts)
        marker = self.path / LAST_CHECKPOINT
        # Written after the checkpoint: a run that is killed in between is still resumed.
        with writing(marker, check=self.check_present):
            partial = marker.with_name(f"{marker.name}.partial")
            partial.write_text(f"{step}\n")
            partial.replace(marker)
        return path

    def _last_checkpoint(self) -> str | None:
        """Return the step in `.last_checkpoint` as text; None if there is no such file."""
        path = self.path / LAST_CHECKPOINT
        try:
            return shown(read_regular(path, 100).decode(errors="replace").strip())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error

    def write_config(
        self,
        values: Mapping[str, Any],
        origins: Mapping[str, str] | None = None,
        commands: Sequence[str] = (),
    ) -> None:
        """Write `config.toml`; None is omitted, and paths become strings.

        Args:
            values: settings by name.
            origins: where values come from, by name; they become comments.
            commands: what repeats the run, if it is more than one command.
        """
        only_in_python = values.get("data") in PYTHON_DATA
        lines = [f"# Starts the same run again: dptrain train --config {CONFIG}"]
        if only_in_python:
            lines = ["# The data are Python objects, so only a Python program can repeat the run."]
        if commands:
            how = " in Python, with its data and the settings of" if only_in_python else ""
            lines = [
                "# The run began with these settings, and was resumed with others. "
                f"To repeat it{how}:",
                *(f"#   {shown(command, 4000)}" for command in commands),
            ]
        plain = _for_toml(values)
        tables = {name: value for name, value in plain.items() if isinstance(value, dict)}
        for name, value in plain.items():
            if name not in tables:
                line = tomli_w.dumps({name: value}).rstrip("\n")
                origin = (origins or {}).get(name)
                lines.append(f"{line}  # {shown(origin)}" if origin else line)
        self._write(CONFIG, "\n".join(lines) + "\n" + tomli_w.dumps(tables))

    def write_spans(self, spans: Spans) -> None:
        """Write `spans.json`."""
        self._write(SPANS, spans.text() + "\n")

    def write_specification(self, specification: Mapping[str, Any]) -> None:
        """Write `spec.json`; see `dptrain.training.spec.RunSpec`."""
        self._write(SPECIFICATION, dump_json(specification, indent=2) + "\n")

    def keep_network(self, network: Network) -> str:
        """Write `network.toml`, so that the run does not need the original file of the network.

        Returns:
            The value of `network` in `config.toml`.
        """
        with replacing(self.path / NETWORK, check=self.check_present) as partial:
            write_network(network, partial)
        return NETWORK

    def read_config(self) -> dict[str, Any]:
        """Return the values of `config.toml`.

        Raises:
            UserError: it is missing or is not TOML.
        """
        return read_settings(self.path / CONFIG)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write `env.json`; see `dptrain.measure.machine.environment`."""
        self._write(ENVIRONMENT, dump_json(environment, indent=2) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        self._write(SUMMARY, dump_json(summary, indent=2) + "\n")

    def write_failure(self, message: str) -> None:
        """Write `failure.json`: why the run has no results."""
        self._write(FAILURE, dump_json({"message": message}) + "\n")

    def write_quality(self, quality: Quality | None, dataset: Dataset) -> None:
        """Write the predictions of the test data: `predicted.csv`, or those of `class_files`."""
        if isinstance(quality, ValueQuality):
            self._write(PREDICTED, values_text(quality, MOST_ROWS))
        elif isinstance(quality, LabelQuality):
            self._write(LABELS, labels_text(quality))
        elif isinstance(quality, ClassQuality):
            if len(quality.names) <= MOST_CLASSES:
                self._write(CONFUSION, confusion_text(quality))
            with suppress(UserError):  # An image has been deleted since it was evaluated.
                image = mistakes_image(quality, dataset)
                if image is not None:
                    with replacing(self.path / MISTAKES, check=self.check_present) as partial:
                        image.save(partial, format="PNG")

    def remove_summary(self) -> None:
        """Delete `summary.json`, because the run continues and the results will be others."""
        for name in (SUMMARY, FAILURE, PREDICTED, CONFUSION, MISTAKES, LABELS):
            with writing(self.path / name, check=self.check_present):
                (self.path / name).unlink(missing_ok=True)

    def read_summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`.

        Raises:
            UserError: the run has not ended, or the file is damaged.
        """
        if not (self.path / SUMMARY).exists():
            raise UserError(f"there is no {self.path / SUMMARY}; a run writes it when it ends")
        return read_object(self.path / SUMMARY)

    def summary_of(self, step: int) -> dict[str, Any] | None:
        """Return `summary.json` if it describes the run after `step` steps, else None."""
        try:
            summary = read_file(self.path, SUMMARY)
        except UserError:
            return None
        return summary if summary.get("steps") == step else None

    def _write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text, check=self.check_present)


def new_folder(network: str, data: str, now: datetime) -> Path:
    """Make an empty folder in ``runs`` for a run whose user names none; see `RunDirectory.create`.

    Raises:
        UserError: the folder cannot be made.
    """
    parent = Path("runs")
    with writing(parent):
        path = _make_new(parent, _run_name(network, data, now))
        sync(parent)
    return path


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _refuse_taken(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir() or any(not child.name.startswith(".") for child in path.iterdir()):
        advice = "resume that run with --resume, or " if (path / CONFIG).exists() else ""
        found = "is not empty" if advice else "is not empty and does not contain a run"
        raise UserError(f"run directory {path} {found}; {advice}choose another --run-dir")


def _run_name(network: str, data: str, now: datetime) -> str:
    parts = (Path(network).name.removesuffix(".toml"), data.partition(":")[0])
    plain = [re.sub(r"[^A-Za-z0-9._+]+", "-", part).strip("-.") for part in parts]
    return "-".join([part for part in plain if part] + [now.strftime("%Y%m%d-%H%M%S")])


def _make_new(parent: Path, name: str) -> Path:
    """Create ``parent/name``, or the first of ``name-2``, ``name-3``, … that does not exist."""
    parent.mkdir(parents=True, exist_ok=True)
    path, number = parent / name, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = parent / f"{name}-{number}"


def _near(path: Path) -> str:
    """Suggest runs: the one that contains `path`, those inside it, or those with similar names."""
    # The run is two levels above checkpoints/step-00000450.
    above = [folder for folder in path.parents[:2] if (folder / CONFIG).is_file()]
    if above:
        return f"; did you mean {above[0]}?"
    inside = _runs_in(path)
    siblings = _runs_in(path.parent)
    close = inside[-3:] or difflib.get_close_matches(path.name, siblings, n=3) or siblings[-3:]
    parent = path if inside else path.parent
    return f"; runs nearby: {', '.join(str(parent / name) for name in close)}" if close else ""


def _runs_in(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(child.name for child in folder.iterdir() if (child / CONFIG).is_file())


def _for_toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _for_toml(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_for_toml(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
