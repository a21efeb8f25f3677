"""Add results that another machine has written to those of the repository, and write the page.

    python -m benchmarks.studies.merge DIR

DIR is the folder that ``python -m benchmarks.studies --output DIR`` wrote there.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.studies.store import FOLDER, Store

FOLDERS = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("results", type=FOLDERS, metavar="DIR")
@click.option("--output", type=FOLDERS, default=FOLDER,
              help="Folder of the results to which those in DIR are added.  [default: "
              "benchmarks/results/studies]")  # fmt: skip
def main(results: Path, output: Path) -> None:
    """Add the complete results in DIR, and write docs/studies.md unless --output is used.

    A result replaces one of the same measurement and kind of machine.
    """
    from benchmarks.studies.page.page import write_page

    store = Store(output)
    added = store.merge(Store(results))
    if not added:
        raise click.UsageError(f"{results} has no complete results; expected files such as "
                               "cpu-16.json that benchmarks.studies --output wrote")  # fmt: skip
    print("\n".join(f"added: {name}" for name in added))
    if output == FOLDER:
        for path in write_page(store):
            print(f"written: {path}")


if __name__ == "__main__":
    main()
