"""`dptrain doctor`."""

from __future__ import annotations

import click

from dptrain.cli.common import JSON, MISTAKE, examples, guarded
from dptrain.cli.options import GroupedCommand


@click.command(
    cls=GroupedCommand,
    short_help="Find problems of this installation, and what to do.",
    epilog=examples(
        "dptrain doctor",
        "mpirun -n 4 dptrain doctor",
    ),
)
@JSON
def doctor(as_json: bool) -> int:
    """Check MPI, threads, kernels, caches and GPUs, and advise what to do.

    The exit code is 2 if there is a problem that prevents training, and 0 otherwise.
    """

    def action() -> int:
        from dptrain.cli.printing import print_findings
        from dptrain.doctor import examine
        from dptrain.doctor.finding import PROBLEM

        findings = examine()
        if findings:
            print_findings(findings, as_json=as_json)
        return MISTAKE if any(finding.status == PROBLEM for finding in findings) else 0

    return guarded(action)
