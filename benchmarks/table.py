"""Print networks, devices and precisions of stored results, with the speedup over the best peer.

python -m benchmarks table cpu-2026-11-30.json gpu-2026-11-30.json
python -m benchmarks table --combine --output FOLDER cpu-2026-11-30.json cpu-2026-11-30-2.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.command import show
from benchmarks.progress import Progress
from benchmarks.report import Report
from benchmarks.tables import comparison_table, new_files, write
from dptrain.errors import UserError


@click.command()
@click.option("--combine", is_flag=True, help="Write all files as one; later ones replace cases.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=Path(),
              help="Folder of the combined results.  [default: this folder]")  # fmt: skip
@click.argument("paths", nargs=-1, required=True, metavar="RESULT.json...",
                type=click.Path(exists=True, dir_okay=False, path_type=Path))  # fmt: skip
def main(combine: bool, output: Path, paths: tuple[Path, ...]) -> None:
    """Print a Markdown table of result files, or combine them."""
    try:
        if combine:
            report = Report.combine(paths)
            written = new_files(output, report.kind, report.about["date"])
            write(report, written)
            show(report, Progress())
            print("\n".join(f"written: {path}" for path in written))
        else:
            print(comparison_table(map(Report.read, paths)).markdown())
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
