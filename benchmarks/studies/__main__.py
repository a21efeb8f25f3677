"""The command line of `benchmarks.studies`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.studies.store import FOLDER


@click.command()
@click.argument("results", nargs=-1, metavar="[RESULT]...")
@click.option("--only", help="Parts, separated by commas: exact, cpu, cores, gpu.  [default: all "
              "that this machine can measure]")  # fmt: skip
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=FOLDER,
              help="Folder of the results.  [default: benchmarks/results/studies]")  # fmt: skip
@click.option("--cifar10", type=click.Path(exists=True, file_okay=False, path_type=Path),
              metavar="DIR", help="Folder of CIFAR-10's binary files.  [default: generated images "
              "of the same shape]")  # fmt: skip
@click.option("--again", is_flag=True, help="Measure also what is stored.")
@click.option("--quick", is_flag=True, help="Few repeats and small cases, to try the program.")
@click.option("--compiled", is_flag=True, help="Kernels of the GPU are compiled already.")
@click.option("--list", "lists", is_flag=True, help="List the measurements and end.")
@click.option("--page/--no-page", default=None,
              help="Write docs/studies.md from all results.  [default: unless --output is given]",
              )  # fmt: skip
def main(
    results: tuple[str, ...],
    only: str | None,
    output: Path,
    cifar10: Path | None,
    again: bool,
    quick: bool,
    compiled: bool,
    lists: bool,
    page: bool | None,
) -> None:
    """Measure the published results of four studies, and write docs/studies.md.

    RESULT is an identifier of the page, such as A1, B5, D2 or Q7, or a name that --list prints.
    Every result is stored as soon as it is known. The same command continues after an
    interruption. Results of other machines are kept: the page combines all.

    Exit status: 0 if everything was measured that can be here, 1 if a measurement failed, 2 for bad
    options.
    """
    from benchmarks.studies.claims.reader import all_rows
    from benchmarks.studies.measuring import find_context, load_measurements
    from benchmarks.studies.running import choose, run
    from benchmarks.studies.store import Store
    from dptrain.errors import UserError

    measurements = load_measurements()
    parts = tuple(part.strip() for part in only.split(",")) if only else ()
    try:
        chosen = choose(results, parts)
        if lists:
            for name, each in measurements.items():
                rows = " ".join(row.id for row in all_rows() if name in row.measurements)
                print(f"{name:22} {each.needs:6} {rows}")
            return
        store, context = Store(output), find_context(cifar10=cifar10, quick=quick)
        failed = run(chosen, context, store, parts, again=again, compiled=compiled)
        if page if page is not None else output == FOLDER:
            from benchmarks.studies.page.page import write_page

            for path in write_page(store):
                print(f"written: {path}")
    except UserError as problem:
        print(f"benchmarks.studies: {problem}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
