"""`dptrain report`."""

from __future__ import annotations

from pathlib import Path

import click

from dptrain.cli.common import EXISTING, examples
from dptrain.cli.options import GroupedCommand


@click.command(
    cls=GroupedCommand,
    short_help="Write the report of a study or a profile.",
    epilog=examples(
        "dptrain report STUDY_DIR                 # results of dptrain scale",
        "dptrain report PROFILE_DIR               # results of dptrain profile --output",
        "dptrain report STUDY_DIR --output DIR",
    ),
)
@click.argument("folder", type=EXISTING, metavar="DIR")
@click.option("--output", type=EXISTING, metavar="DIR",
              help="Folder of the report.  [default: DIR]")  # fmt: skip
@click.option("--replace", is_flag=True,
              help="Overwrite existing files that no report wrote.")  # fmt: skip
def report(folder: Path, output: Path | None, replace: bool) -> None:
    """Write report.html and its plots from the results of a study or a profile.

    DIR contains the study.json of a scaling study or the profile.json of one job. The page is one
    file that needs no network connection. Its plots are also written as SVG and PNG files.
    """
    from dptrain.scaling.report.files import write_report

    click.echo(f"report: {write_report(folder, output, replace=replace)}")
