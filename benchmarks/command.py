"""The command line that runs of sections share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.outside import find_network
from benchmarks.progress import Progress
from benchmarks.report import Report
from benchmarks.session import Session, Settings, run_sections
from benchmarks.tables import headline, new_files, tables_of, write
from dptrain.errors import UserError, suggest

FOLDER = Path(__file__).parent / "results"
Function = TypeVar("Function", bound=Callable[..., Any])


def options(sections: Iterable[str]) -> Callable[[Function], Function]:
    """Return a decorator that adds the common options to a command."""
    listed = (
        ("--quick", {"is_flag": True, "help": "Run for a few minutes: fewer cases and rounds."}),
        ("--sections", {"help": f"Parts, separated by commas.  [default: {','.join(sections)}]"}),
        ("--networks", {"help": "Networks, separated by commas.  [default: of each section]"}),
        ("--batches", {"help": "Batch sizes, separated by commas.  [default: of each section]"}),
        ("--compile", {"help": "Batch sizes that also run with torch.compile, or 'none'."}),
        ("--rounds", {"type": click.IntRange(1), "help": "Alternating rounds."}),
        ("--output", {"type": click.Path(file_okay=False, path_type=Path), "help":
         "Folder of the results.  [default: benchmarks/results; none with --quick]"}),
    )  # fmt: skip

    def decorate(function: Function) -> Function:
        for name, given in reversed(listed):
            names = ("--compile", "compiled") if name == "--compile" else (name,)
            function = click.option(*names, **given)(function)
        return function

    return decorate


Plan = tuple[Settings, dict[str, Any], Mapping[str, Callable[[Session], None]]]
"""Settings of a run, what the report states about the machine, and functions by section."""


def run(plan: Callable[[], Plan], folder: Path | None, *, quick: bool) -> None:
    """Run sections, print and write their results, and end the process.

    Args:
        plan: returns the plan of the run; it raises `UserError` if an option is wrong.
        folder: folder of the results; None for the default.
        quick: without a folder, write nothing.
    """
    start, progress = time.perf_counter(), Progress()
    try:
        settings, about, sections = plan()
    except UserError as error:
        progress.close()
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2)
    folder = folder or (None if quick else FOLDER)
    paths = None if folder is None else new_files(folder, about["kind"], about["date"])

    def save(report: Report) -> None:
        if paths is not None:
            write(report, paths)

    session = Session(settings, progress, Report(about), save)
    try:
        report = run_sections(session, sections)
    finally:
        progress.close()
    show(report, progress)
    progress.print(f"{time.perf_counter() - start:.0f} s")
    for path in paths or ():
        progress.print(f"written: {path}")
    sys.exit(1 if report.wrong or report.failed else 0)


def show(report: Report, progress: Progress) -> None:
    """Print the tables and the summary. The summary is last, next to the prompt."""
    progress.show(reversed(tables_of(report)))
    progress.print(headline(report))


def split(text: str | None, *, are_networks: bool = False) -> tuple[str, ...]:
    """Return the values of a comma-separated list.

    Raises:
        UserError: a network does not exist.
    """
    values = tuple(filter(None, (text or "").split(",")))
    for name in values if are_networks else ():
        find_network(name)
    return values


def checked(what: str, values: tuple[str, ...], choices: Sequence[str]) -> tuple[str, ...]:
    """Return `values`, which must be among `choices`."""
    for value in values:
        if value not in choices:
            raise UserError(
                f"{what} is '{value}'; expected one of {', '.join(choices)}"
                f"{suggest(value, choices)}"
            )
    return values


def numbers(what: str, text: str | None) -> tuple[int, ...]:
    """Return the positive integers of a comma-separated list; none of ``none``."""
    values = split(None if text == "none" else text)
    for value in values:
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"{what} is '{value}'; expected a whole number of at least 1")
    return tuple(int(value) for value in values)
