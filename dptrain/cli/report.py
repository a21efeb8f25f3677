"""`dptrain report`."""

from __future__ import annotations

from pathlib import Path

import click

from dptrain.cli.common import EXISTING, examples


@click.command(
    short_help="Write the report of a study or a profile.",
    epilog=examples(
        "dptrain report STUDY_DIR                 # what dptrain scale measured",
        "dptrain report PROFILE_DIR               # what dptrain profile --output measured",
        "dptrain report STUDY_DIR --output DIR",
    ),
)
@click.argument("folder", type=EXISTING, metavar="DIR")
@click.option("--output", type=EXISTING, metavar="DIR",
              help="Where to write; the same folder where left out.")  # fmt: skip
@click.option("--replace", is_flag=True,
              help="Overwrite files that are in the way and that no report wrote.")  # fmt: skip
def report(folder: Path, output: Path | None, replace: bool) -> None:
    """Write report.html and its plots from what was measured.

    DIR holds the study.json of a scaling study or the profile.json of one job. The page stands
    alone: it can be mailed, printed and read without a network. Plots come as SVG and PNG, too.
    """
    from dptrain.scaling.report.files import write_report

    click.echo(f"report: {write_report(folder, output, replace=replace)}")
