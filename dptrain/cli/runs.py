"""`dptrain runs`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dptrain.cli.common import EXISTING, JSON, examples, number
from dptrain.cli.options import GroupedCommand
from dptrain.errors import UserError

EXAMPLES = examples(
    "dptrain runs list                                       # all runs in runs/",
    "dptrain runs list --where network=resnet20 --where 'test_accuracy>0.9'",
    "dptrain runs list --sort learning_rate --columns learning_rate,momentum --csv",
    "dptrain runs compare RUN_A RUN_B                        # settings that differ, and results",
    "dptrain runs label RUN --add final --note 'Figure 3'",
    "dptrain runs cite RUN                                   # what a paper should state",
    "dptrain runs forecasts                                  # registered forecasts in studies/",
)

RUN = click.argument("folder", type=EXISTING, metavar="RUN")


@click.group(invoke_without_command=True, epilog=EXAMPLES)
@click.pass_context
def runs(context: click.Context) -> None:
    """List, compare, label and cite training runs."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@runs.command("list", cls=GroupedCommand, epilog=EXAMPLES)
@click.argument("folders", type=EXISTING, metavar="[DIR]...", nargs=-1)
@click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="Only runs with NAME=VALUE; also !=, <, <=, >, >= and ~ (contains). May be repeated.",
)
@click.option(
    "--tag", "tags", multiple=True, metavar="TAG", help="Only runs with this tag. May be repeated."
)
@click.option("--sort", metavar="NAME", help="Order by this value.  [default: started]")
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@number("--last", at_least=1, help="Only the last N runs.")
@click.option(
    "--columns",
    metavar="NAME,…",
    default="",
    help="Further values, such as learning_rate; 'all' for all.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with all values.")
@JSON
def list_(
    folders: tuple[Path, ...],
    where: tuple[str, ...],
    tags: tuple[str, ...],
    sort: str | None,
    reverse: bool,
    last: int | None,
    columns: str,
    as_csv: bool,
    as_json: bool,
) -> None:
    """List training runs, the newest last.

    DIR is a run directory or a folder that contains some, by default the folder 'runs'. A run is
    'ended', 'stopped' (a signal stopped it), 'running', 'diverged' (its loss was not finite) or
    'unfinished' (its process is gone).
    """
    from dptrain.cli.printing import print_tables
    from dptrain.runs.records import list_runs
    from dptrain.runs.tables import resume_lines, runs_table

    if as_csv and as_json:
        raise UserError("--csv and --json are both given; use one of them")
    records = _ordered(list_runs(*folders, where=where, tags=tags), sort, reverse=reverse)
    records = records[-last:] if last else records
    if as_json:
        click.echo(json.dumps(records, indent=2, ensure_ascii=False))
    elif as_csv:
        _print_csv(records)
    elif not records:
        click.echo(_no_runs(folders, filtered=bool(where or tags)))
    else:
        print_tables([runs_table(records, _columns(columns, records))])
        for line in resume_lines(records):
            click.echo(line)


def _no_runs(folders: Sequence[Path], *, filtered: bool) -> str:
    """Return the line for a list without a run."""
    names = ", ".join(map(str, folders)) or "runs"
    if filtered:
        return f"no run in {names} fulfils all conditions"
    return f"{names} has no runs; dptrain train makes one, in the folder runs by default"


@runs.command(cls=GroupedCommand, epilog=EXAMPLES)
@click.argument("folders", type=EXISTING, metavar="RUN...", nargs=-1, required=True)
@JSON
def compare(folders: tuple[Path, ...], as_json: bool) -> None:
    """Show the settings in which runs differ, and their results.

    `dptrain report RUN_A RUN_B` compares learning curves and times, with intervals.
    """
    from dptrain.cli.printing import print_tables
    from dptrain.runs.comparison import Comparison
    from dptrain.runs.records import list_runs
    from dptrain.runs.tables import comparison_tables, resume_lines

    records = [record for folder in folders for record in list_runs(folder)]
    if len(records) < 2:
        raise UserError(f"expected at least 2 runs to compare, found {len(records)}")
    found = Comparison.of(records)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return
    print_tables(comparison_tables(found))
    for line in resume_lines(records):
        click.echo(line)


@runs.command(cls=GroupedCommand, epilog=EXAMPLES)
@RUN
@click.option("--add", multiple=True, metavar="TAG,…", help="Tags to add.")
@click.option("--remove", multiple=True, metavar="TAG,…", help="Tags to remove.")
@click.option("--note", metavar="TEXT", help="The note; it replaces the previous one.")
def label(folder: Path, add: tuple[str, ...], remove: tuple[str, ...], note: str | None) -> None:
    """Set the tags and the note of a run, or show them."""
    from dptrain.runs.labels import Labels, parse_tags
    from dptrain.training.persistence.rundir import RunDirectory

    RunDirectory.open(folder)
    labels = Labels.read(folder).changed(parse_tags(add), parse_tags(remove), note)
    if add or remove or note is not None:
        labels.write(folder)
    click.echo(f"tags  {', '.join(labels.tags)}\nnote  {labels.note}")


@runs.command(cls=GroupedCommand, epilog=EXAMPLES)
@RUN
@JSON
def cite(folder: Path, as_json: bool) -> None:
    """Print what a text should state about a run, so that others can repeat it."""
    from dptrain.cli.printing import print_values
    from dptrain.runs.citation import citation
    from dptrain.runs.records import read_record
    from dptrain.training.persistence.rundir import RunDirectory

    RunDirectory.open(folder)
    print_values(citation(read_record(folder)), as_json=as_json)


@runs.command(cls=GroupedCommand, epilog=EXAMPLES)
@click.argument("folders", type=EXISTING, metavar="[DIR]...", nargs=-1)
@JSON
def forecasts(folders: tuple[Path, ...], as_json: bool) -> None:
    """List registered forecasts, and how often they contained what was measured later.

    DIR is a folder that contains studies, by default the folder 'studies'. `dptrain scale
    --register` registers a forecast, and `dptrain scale --collect` scores it.
    """
    from dptrain.cli.printing import print_tables
    from dptrain.scaling.registered import calibration
    from dptrain.scaling.tables import calibration_table

    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; expected a folder that contains studies")
    entries, remarks = calibration(folders or (Path("studies"),))
    for remark in remarks:
        click.echo(f"dptrain: {remark}", err=True)
    if as_json:
        click.echo(json.dumps([entry.facts() for entry in entries], indent=2, ensure_ascii=False))
    elif not entries:
        names = ", ".join(map(str, folders)) or "studies"
        click.echo(f"{names} has no registered forecast; dptrain scale --register makes one")
    else:
        print_tables([calibration_table(entries)])


def _ordered(records: list[dict[str, Any]], sort: str | None, *, reverse: bool) -> list[Any]:
    """Return records in the order of a value; those without it come first."""
    from dptrain.runs.selection import check_name

    if sort is not None:
        name = sort.replace("-", "_")
        check_name(name, _names(records))
        absent = [record for record in records if record.get(name) is None]
        present = [record for record in records if record.get(name) is not None]
        is_text = any(isinstance(record[name], str) for record in present)
        present.sort(key=lambda record: str(record[name]) if is_text else record[name])
        records = absent + present
    return records[::-1] if reverse else records


def _columns(text: str, records: Sequence[dict[str, Any]]) -> list[str]:
    from dptrain.runs.selection import check_name

    names = _names(records)
    if text == "all":
        return names
    found = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    for name in found:
        check_name(name, names)
    return found


def _names(records: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record))


def _print_csv(records: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, _names(records), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
