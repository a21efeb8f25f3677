"""The directory of a run: what was asked for, where it ran, what it measured, what it learned.

config.toml      every setting, resolved; starts the same run again
env.json         machine, versions and command
metrics.jsonl    one record a line while training
summary.json     results, written at the end
checkpoints/     see `dptrain.training.checkpoints`
.lock            held by the process that trains here
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import os
import re
import socket
import weakref
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json, sync, write_whole, writing
from dptrain.measure.metrics import MetricsFile
from dptrain.network.files import write_network
from dptrain.network.network import Network
from dptrain.training.checkpoints import CheckpointStore
from dptrain.training.settings import CONFIG_FILE as CONFIG
from dptrain.training.settings import read_settings

ENVIRONMENT, SUMMARY, NETWORK, LOCK = "env.json", "summary.json", "network.toml", ".lock"


class RunDirectory:
    """One run's files. Made by `create` for a new run, by `open` for one that is there.

    Attributes:
        path: the directory.
        metrics: its `metrics.jsonl`.
        checkpoints: its checkpoints.
    """

    def __init__(self, path: Path, *, keep: int = 3) -> None:
        self.path = path
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.checkpoints = CheckpointStore(path / "checkpoints", keep)
        self._release: weakref.finalize[Any, Any] | None = None

    @classmethod
    def create(
        cls, path: Path | None, *, network: str, data: str, now: datetime, keep: int = 3
    ) -> RunDirectory:
        """Make the directory of a new run and hold it; nothing that is there is overwritten.

        Args:
            path: where; None for ``runs/<network>-<data>-<date>-<time>``, and ``-2``, ``-3``, …
                behind it while that is taken.
            network: name of the network, or its file.
            data: name of the data; what follows a colon is left out.
            now: the time, for the name.
            keep: how many checkpoints stay.

        Raises:
            UserError: `path` is a file or holds something, or cannot be made. Hidden files do not
                count: a start that was killed leaves some, and so do network disks.
        """
        if path is None:
            parent = Path("runs")
            with writing(parent):
                path = _make_new(parent, _run_name(network, data, now))
                sync(parent)
            run = cls(path, keep=keep)
            run.hold()
            return run
        with writing(path):
            _refuse_taken(path)
            path.mkdir(parents=True, exist_ok=True)
            sync(path.parent)
            run = cls(path, keep=keep)
            run.hold()
            _refuse_taken(path)  # Another process may have come and gone in the meantime.
        return run

    @classmethod
    def open(cls, path: Path, *, keep: int = 3) -> RunDirectory:
        """Open the directory of a run that was started before.

        Raises:
            UserError: there is no run; the message says what is missing and what is near.
        """
        try:
            if (path / CONFIG).is_file():
                return cls(path, keep=keep)
            problem = f"it has no {CONFIG}" if path.is_dir() else "no such directory"
            near = _near(path)
        except OSError as error:
            raise UserError(f"cannot read run directory {path}: {error.strerror}") from error
        raise UserError(f"{path} is not a run directory: {problem}{near}")

    def hold(self) -> None:
        """Keep other processes from training here, until `release` or the end of this process.

        Raises:
            UserError: another process does; the message says which.
        """
        path = self.path / LOCK
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                # Of all locks, this kind is the one that works on network disks.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    holder = os.read(descriptor, 200).decode(errors="replace").strip()
                    os.close(descriptor)
                    raise UserError(
                        f"{holder or 'another process'} is training in run directory {self.path}; "
                        "wait until it ends, or choose another --run-dir"
                    ) from None
                # A disk without locks: there is nobody to ask.
            self._release = weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _myself().encode())

    def release(self) -> None:
        """Let others train here."""
        if self._release is not None:
            self._release()

    def begun(self) -> bool:
        """Whether there is something to go on from: a run killed early leaves nothing of the kind.

        Raises:
            UserError: the checkpoints cannot be looked at.
        """
        return bool(self.checkpoints.steps()) or (self.path / SUMMARY).exists()

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Write `config.toml`; values that are None are left out, and paths become strings."""
        text = tomli_w.dumps(_for_toml(values))
        heading = f"# Starts the same run again: dptrain train --config {CONFIG}\n"
        write_whole(self.path / CONFIG, heading + text)

    def keep_network(self, network: Network) -> str:
        """Write `network.toml`, so that the run outlives the file that the network came from.

        Returns:
            What `config.toml` is to call the network.
        """
        write_network(network, self.path / NETWORK)
        return NETWORK

    def read_config(self) -> dict[str, Any]:
        """Values of `config.toml`.

        Raises:
            UserError: it is missing or no TOML.
        """
        return read_settings(self.path / CONFIG)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write `env.json`; see `dptrain.measure.environment`."""
        write_whole(self.path / ENVIRONMENT, dump_json(environment, indent=2) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_whole(self.path / SUMMARY, dump_json(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """What `write_summary` wrote.

        Raises:
            UserError: the run has not ended, or the file is damaged.
        """
        path = self.path / SUMMARY
        try:
            summary: dict[str, Any] = parse_json(path.read_bytes())
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}; a run writes it when it ends"
            ) from error
        except ValueError as error:
            raise UserError(f"{path} is no JSON: {error}") from error
        return summary

    def summary_of(self, step: int) -> dict[str, Any] | None:
        """What `write_summary` wrote when the run had made `step` steps; None if it has not."""
        try:
            summary = self.read_summary()
        except UserError:
            return None
        return summary if summary.get("steps") == step else None


def _refuse_taken(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir() or any(not child.name.startswith(".") for child in path.iterdir()):
        advice = "go on with that run by --resume, or " if (path / CONFIG).exists() else ""
        found = "is not empty" if advice else "is not empty and holds no run"
        raise UserError(f"run directory {path} {found}; {advice}choose another --run-dir")


def _myself() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}," if job else "")


def _run_name(network: str, data: str, now: datetime) -> str:
    words = (Path(network).name.removesuffix(".toml"), data.partition(":")[0])
    plain = [re.sub(r"[^A-Za-z0-9._+]+", "-", word).strip("-.") for word in words]
    return "-".join([word for word in plain if word] + [now.strftime("%Y%m%d-%H%M%S")])


def _make_new(parent: Path, name: str) -> Path:
    """Make ``parent/name``, or the first of ``name-2``, ``name-3``, … that is not there."""
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
    """Runs that may be meant: one that `path` lies in, one inside it, or names like its own."""
    # Two up from checkpoints/step-00000450 lies the run.
    above = [folder for folder in path.parents[:2] if (folder / CONFIG).is_file()]
    if above:
        return f"; did you mean {above[0]}?"
    inside = _runs_in(path)
    beside = _runs_in(path.parent)
    close = inside[-3:] or difflib.get_close_matches(path.name, beside, n=3) or beside[-3:]
    where = path if inside else path.parent
    return f"; near it: {', '.join(str(where / name) for name in close)}" if close else ""


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
