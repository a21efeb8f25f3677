"""Results of an experiment in files, so that the same command continues where it stopped.

NAME.json     settings and machine; a command with other settings is refused
NAME.jsonl    one record for each case, appended when the case is done
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dptrain import __version__
from dptrain.errors import UserError, shown
from dptrain.files import csv_of_rows, dump_json, parse_json, write_whole, writing
from dptrain.measure.metrics import MetricsFile
from dptrain.records import from_values

T = TypeVar("T")

OUTPUT = "--output"
"""Flag of the directory with the results."""

KEY = "case"
"""Key of a record that identifies the case."""


class Ledger:
    """Records of an experiment, one for each case; `open` returns one.

    Attributes:
        folder: directory of the files.
        records: records by the key of their case, in the order in which they were appended.
    """

    def __init__(self, folder: Path, file: MetricsFile) -> None:
        self.folder, self._file = folder, file
        self.records: dict[str, dict[str, Any]] = {r[KEY]: r for r in file.read()}

    @classmethod
    def open(cls, folder: Path, name: str, settings: Mapping[str, Any]) -> Ledger:
        """Start an experiment in `folder`, or continue the experiment there.

        Args:
            folder: directory of the files; it is created if it does not exist.
            name: name of the files.
            settings: all settings that affect the measurement, and the machine.

        Raises:
            UserError: `folder` contains an experiment with other settings (the message names the
                difference), or other files.
        """
        path = folder / f"{name}.json"
        # A round trip through JSON turns tuples into lists, as in the file.
        current = parse_json(dump_json(settings))
        with writing(folder, OUTPUT):
            folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with writing(folder, OUTPUT):
                _refuse_foreign(folder, name)
            _create(path, dump_json(current, indent=1) + "\n")
        _refuse_other(path, current)
        return cls(folder, MetricsFile(folder / f"{name}.jsonl"))

    def append(self, key: str, record: Mapping[str, Any]) -> None:
        """Append the record of a case to the file."""
        whole = {KEY: key, **record}
        self._file.append(whole)
        self.records[key] = parse_json(dump_json(whole))

    def results(self, kind: type[T]) -> dict[str, T]:
        """Return the results by the key of their case; see `result_from`."""
        return {key: result_from(kind, record) for key, record in self.records.items()}


def read_ledger(
    folder: Path, name: str, kind: type[T], noun: str, command: str
) -> tuple[dict[str, Any], list[T]]:
    """Return the settings and the results of an experiment in the order of measurement.

    Args:
        folder, name: as for `Ledger.open`.
        kind: of the results.
        noun, command: what the experiment is called, and the command that makes it.

    Raises:
        UserError: nothing was measured, or a file cannot be read.
    """
    settings = read_settings(folder, name, f"repeat its `{command}` command with")
    try:
        records = MetricsFile(folder / f"{name}.jsonl").read()
        found = [result_from(kind, record) for record in records]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} is not a {noun} of this version of dptrain ({type(error).__name__}: "
            f"{shown(error)}); repeat its `{command}` command with another {OUTPUT}"
        ) from None
    if not found:
        raise UserError(
            f"{folder} contains a {noun} without results; repeat its `{command}` command"
        )
    return settings, found


def result_from(kind: type[T], record: Mapping[str, Any]) -> T:
    """Return the result of which `dataclasses.asdict` made the record of a case.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the record is none of `kind`.
    """
    return from_values(kind, {name: value for name, value in record.items() if name != KEY})


def machine(machine_facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about the machine that affect times, so that machines are not mixed."""
    return {
        "processor": machine_facts["cpu"],
        "cores": machine_facts["cores"],
        "dptrain": __version__,
    }


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write records that have the same keys to a CSV file; return `path`."""
    names = list(records[0])
    write_whole(
        path, csv_of_rows([names, *([record[n] for n in names] for record in records)]), OUTPUT
    )
    return path


def _refuse_foreign(folder: Path, name: str) -> None:
    """Raise a `UserError` if there are files other than hidden ones, which network disks create."""
    found = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if found and f"{name}.json" not in found:
        raise UserError(
            f"{folder} is not empty and contains no {name}.json; nothing was overwritten; choose "
            f"another {OUTPUT}"
        )


def _create(path: Path, text: str) -> None:
    """Write a file completely, unless another process has written it at the same time."""
    with (
        writing(path, OUTPUT),
        tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as file,
    ):
        file.write(text)
        file.flush()
        try:
            os.link(file.name, path)
        except FileExistsError:
            return
        except OSError:  # The disk has no hard links.
            write_whole(path, text, OUTPUT)


def read_settings(folder: Path, name: str, advice: str = "choose") -> dict[str, Any]:
    """Return the settings of the experiment in a folder.

    Args:
        folder, name: as for `Ledger.open`.
        advice: what to do with another output folder, for the message.

    Raises:
        UserError: they cannot be read.
    """
    path = folder / f"{name}.json"
    try:
        return dict(parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"cannot read {path} ({reason}); restore it, or {advice} another {OUTPUT}"
        ) from None


def _refuse_other(path: Path, current: Mapping[str, Any]) -> None:
    found = read_settings(path.parent, path.stem)
    for name in dict.fromkeys([*current, *found]):
        was, now = found.get(name), current.get(name)
        if was != now:
            raise UserError(
                f"{path} was measured with {name.replace('_', ' ')} {_text(was)}, but this command "
                f"has {_text(now)}; repeat the former command to continue, or choose another "
                f"{OUTPUT}"
            )


def _text(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
