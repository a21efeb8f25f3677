"""What an experiment has measured so far, in files that let the same command go on.

NAME.json     what was asked for, on which machine; another question is refused
NAME.jsonl    one record a case, appended as soon as it is known
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dptrain import __version__
from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json, write_whole, writing
from dptrain.measure.metrics import MetricsFile

OUTPUT = "--output"
"""The flag that names the folder."""

KEY = "case"
"""Of a record: which case it is of."""


class Ledger:
    """Records of an experiment, one a case. Made by `open`.

    Attributes:
        folder: where the files lie.
        records: by the key of their case, in the order in which they were made.
    """

    def __init__(self, folder: Path, file: MetricsFile) -> None:
        self.folder, self._file = folder, file
        self.records: dict[str, dict[str, Any]] = {r[KEY]: r for r in file.read()}

    @classmethod
    def open(cls, folder: Path, name: str, question: Mapping[str, Any]) -> Ledger:
        """Begin an experiment in `folder`, or go on with the one that is there.

        Args:
            folder: made where it is not there.
            name: of the files.
            question: all that decides what is measured; what only decides how it is shown is left
                out.

        Raises:
            UserError: another question is being answered there, and the message says what differs;
                or `folder` holds something else.
        """
        path = folder / f"{name}.json"
        # As JSON has it: lists, no tuples.
        asked = parse_json(dump_json(question))
        with writing(folder, OUTPUT):
            folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _refuse_other(path, asked)
        else:
            with writing(folder, OUTPUT):
                _refuse_foreign(folder, name)
            write_whole(path, dump_json(asked, indent=1) + "\n", OUTPUT)
        return cls(folder, MetricsFile(folder / f"{name}.jsonl"))

    def append(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep what is now known of a case."""
        whole = {KEY: key, **record}
        self._file.append(whole)
        self.records[key] = parse_json(dump_json(whole))


def machine(surroundings: Mapping[str, Any]) -> dict[str, Any]:
    """What else decides how long something takes; results of two machines are not mixed."""
    return {"processor": surroundings["cpu"], "cores": surroundings["cores"],
            "dptrain": __version__}  # fmt: skip


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write records that all have the same keys, and give `path` back."""
    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_whole(path, lines.getvalue(), OUTPUT)
    return path


def _refuse_foreign(folder: Path, name: str) -> None:
    """Hidden files do not count: network disks leave some."""
    if any(not path.name.startswith(".") for path in folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and has no {name}.json; nothing is overwritten: choose another "
            f"{OUTPUT}"
        )


def _refuse_other(path: Path, asked: Mapping[str, Any]) -> None:
    try:
        found = dict(parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {path} ({error}); choose another --output") from None
    for name in dict.fromkeys([*asked, *found]):
        was, now = found.get(name), asked.get(name)
        if was != now:
            raise UserError(
                f"{path} is of {name.replace('_', ' ')} {_words(was)}, this command asks for "
                f"{_words(now)}; repeat that command to go on, or choose another --output"
            )


def _words(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
