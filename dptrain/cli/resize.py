"""`dptrain resize`."""

from __future__ import annotations

from pathlib import Path

import click

from dptrain.cli.common import EXISTING, examples, number
from dptrain.cli.options import GroupedCommand
from dptrain.errors import UserError


@click.command(
    cls=GroupedCommand,
    short_help="Change the number of ranks of a run that trains.",
    epilog=examples("dptrain resize RUN_DIR --ranks 8"),
)
@click.argument("run_dir", type=EXISTING)
@number("-n", "--ranks", "ranks", at_least=1, help="Number of ranks that continue.")
def resize(run_dir: Path, ranks: int | None) -> None:
    """Continue a run of `dptrain train --survive` with another number of ranks.

    The ranks stop after the current step with a checkpoint and start again. With --shards the final
    parameters are the same.
    """
    from dptrain.runs.resizing import request_ranks
    from dptrain.runs.spans import Spans
    from dptrain.training.persistence.rundir import RunDirectory

    if ranks is None:
        raise UserError("resize has no number of ranks; expected --ranks N")
    items = Spans.read(RunDirectory.open(run_dir).path).items
    shards = items[-1].settings.get("shards", 0) if items else 0
    if 0 < shards < ranks:
        raise UserError(
            f"--ranks is {ranks}, but the run in {run_dir} has {shards} micro-shards, and each "
            f"rank needs one; use at most {shards}"
        )
    request_ranks(run_dir, ranks)
    click.echo(f"{run_dir} continues with {ranks} rank{'s' * (ranks > 1)} after its current step")
