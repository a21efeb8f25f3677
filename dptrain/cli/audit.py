"""`dptrain audit`."""

from __future__ import annotations

from pathlib import Path

import click

from dptrain.cli.common import EXISTING, JSON, examples, number
from dptrain.cli.options import GroupedCommand


@click.command(
    cls=GroupedCommand,
    short_help="Check by simulation how often the intervals of a study contain the truth.",
    epilog=examples(
        "dptrain audit STUDY_DIR                      # results of dptrain scale",
        "dptrain audit STUDY_DIR --replications 1000  # a standard error of 1%",
        "dptrain audit STUDY_DIR --json               # for a program",
    ),
)
@click.argument("folder", type=EXISTING, metavar="DIR")
@number(
    "--replications",
    default=300,
    at_least=100,
    at_most=100_000,
    help="Simulated studies; the standard error of a coverage of 90% is 0.3 / √N.",
)
@number("--seed", default=0, at_least=0, help="Seed of the random numbers.")
@JSON
def audit(folder: Path, replications: int, seed: int, as_json: bool) -> None:
    """Check how often the 95% intervals of a scaling study contain the truth.

    The noise of the study is fitted to the steps of its launches: autocorrelation, bursts of slow
    steps, the tail, and differences between launches. Studies with this noise are simulated, and
    the intervals are computed from them as for the study. Nothing is launched.

    The result is written to audit.json in DIR, and the report of the study is written again: it
    marks intervals that contain the truth in less than 90% of the simulations.
    """
    from dptrain.audit.study import AUDIT, audit_study, read_study
    from dptrain.audit.tables import audit_tables
    from dptrain.cli.printing import print_tables
    from dptrain.report.files import write_report

    read_study(folder)
    click.echo(f"audit: simulating {replications:,} studies like {folder}", err=True)
    found = audit_study(folder, replications=replications, seed=seed)
    found.write(folder / AUDIT)
    page = write_report(folder)
    if as_json:
        click.echo(found.text())
        return
    print_tables([found.sentence(), "", *audit_tables(found)])
    click.echo(f"audit: {folder / AUDIT}, report: {page}")
