"""`dptrain paper`."""

from __future__ import annotations

from pathlib import Path

import click

from dptrain.cli.common import EXISTING, examples, output_folder
from dptrain.cli.options import GroupedCommand

FILES = r"""Files:
  values.tex      macros: \dpvalue{KEY} prints a number with its unit and interval
  values.md       the keys with their values
  sentences.tex   the conclusion and the restrictions, also as sentences.md
  methods.tex     machine, versions, launches and definitions, also as methods.md
  tables/         the tables of the report in LaTeX
  figures/        its plots as PDF and SVG
  references.bib  dptrain and the sources of the methods
"""


@click.command(
    cls=GroupedCommand,
    short_help="Write the numbers, methods, figures and references of a result for a paper.",
    epilog=examples(
        "dptrain paper STUDY_DIR --output paper/results  # results of dptrain scale",
        "dptrain paper SWEEP_DIR --prefix sweep          # one of several results of a text",
    )
    + "\n\n\b\n"
    + FILES,
)
@click.argument("folder", type=EXISTING, metavar="DIR")
@output_folder("Folder of the files.  [default: the folder paper in DIR]")
@click.option(
    "--prefix",
    default="",
    metavar="NAME",
    help="Beginning of all keys, as in NAME/KEY, for a text with several results.  [default: none]",
)
@click.option("--replace", is_flag=True, help="Overwrite existing files that were changed.")
def paper(folder: Path, output: Path | None, prefix: str, replace: bool) -> None:
    """Write what a paper needs of any result with a report.

    DIR is a folder of which `dptrain report` writes a page. The numbers, sentences and plots are
    those of the page; what it withholds is withheld. Files that you changed are not overwritten.
    """
    from dptrain.report.paper.files import write_paper

    click.echo(f"paper: {write_paper(folder, output, prefix=prefix, replace=replace)}")
