"""The command line of `benchmarks.node`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

SECTIONS = (
    "threads", "ranks", "sums", "two-cores", "shards", "inference", "outside", "residual"
)  # fmt: skip
FOLDER = Path(__file__).resolve().parents[1] / "results"


@click.command()
@click.option("--quick", is_flag=True, help="Run for about 2 minutes: fewer cases and repeats.")
@click.option("--sections", help=f"Parts, separated by commas.  [default: {','.join(SECTIONS)}]")
@click.option("--networks", help="Networks, separated by commas.  [default: those of each section]")
@click.option("--counts", help="Numbers of threads and ranks.  [default: 1,2,4, … all cores]")
@click.option("--cores", type=int, help="Use only the first cores.  [default: all]")
@click.option("--mpirun", multiple=True, help="An MPI launcher to use; may be repeated.")
@click.option("--rounds", type=int, help="Alternating rounds.  [default: 9; 3 with --quick]")
@click.option("--section-minutes", type=float, default=9.0, show_default=True,
              help="Time after which a section starts no further rounds.")  # fmt: skip
@click.option("--combine", help="Result files (.json), separated by commas; measure nothing.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path),
              help="Folder of the results.  [default: benchmarks/results]")  # fmt: skip
def main(
    quick: bool,
    sections: str | None,
    networks: str | None,
    counts: str | None,
    cores: int | None,
    mpirun: tuple[str, ...],
    rounds: int | None,
    section_minutes: float,
    combine: str | None,
    output: Path | None,
) -> None:
    """Measure the scaling of dptrain within this node.

    Ctrl-C and SIGTERM end the measurements; the report then has the results up to then.

    Exit status: 0 if all results are right, 1 if one is wrong, 2 for bad options.
    """
    from benchmarks.node.report import Report
    from benchmarks.node.suite import make_settings, run
    from benchmarks.progress import Progress
    from dptrain.errors import UserError

    begin, progress = time.monotonic(), Progress()
    try:
        if combine is not None:
            report = Report.combine([Path(name) for name in combine.split(",")])
        else:
            settings = make_settings(
                sections or ",".join(SECTIONS), networks=networks, counts=counts, cores=cores,
                mpirun=mpirun, rounds=rounds, section_minutes=section_minutes, quick=quick,
            )  # fmt: skip
            report = run(settings, progress)
    except UserError as error:
        progress.close()
        print(f"benchmarks.node: {error}", file=sys.stderr)
        sys.exit(2)
    progress.close()
    progress.show(report.tables())
    progress.print(report.headline())
    progress.print(f"{time.monotonic() - begin:.0f} s")
    for path in report.write(output or FOLDER):
        progress.print(f"written: {path}")
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
