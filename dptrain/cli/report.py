"""`dptrain report`."""

from __future__ import annotations

from pathlib import Path

import click

from dptrain.cli.common import EXISTING, examples, output_folder
from dptrain.cli.options import GroupedCommand

COMPARISON = Path("comparison")
"""Default folder of the report that compares several results."""


@click.command(
    cls=GroupedCommand,
    short_help="Write the report of a run, a profile, a study or a sweep, or compare several.",
    epilog=examples(
        "dptrain report RUN_DIR                   # results of dptrain train",
        "dptrain report PROFILE_DIR               # results of dptrain profile --output",
        "dptrain report STUDY_DIR                 # results of dptrain scale or dptrain study",
        "dptrain report RUN_A RUN_B --output DIR  # the second compared with the first",
    ),
)
@click.argument("folders", type=EXISTING, metavar="DIR...", nargs=-1, required=True)
@output_folder(f"Folder of the report.  [default: DIR; of several, the folder '{COMPARISON}']")
@click.option("--replace", is_flag=True, help="Overwrite existing files that no report wrote.")
def report(folders: tuple[Path, ...], output: Path | None, replace: bool) -> None:
    """Write report.html and its plots from the results of a run, a profile or a study.

    DIR contains a training run that has ended, the profile.json of one job, the study.json of a
    scaling study, or the results of `dptrain study` or `dptrain bench`. Several runs, profiles or
    scaling studies are compared with the first one. The page is one file that needs no network
    connection. Its plots are also written as SVG and PNG files.
    """
    from dptrain.report.files import write_comparison, write_report

    if len(folders) > 1:
        page = write_comparison(folders, output or COMPARISON, replace=replace)
    else:
        page = write_report(folders[0], output, replace=replace)
    click.echo(f"report: {page}")
