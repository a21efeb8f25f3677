"""`dptrain rehearse`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dptrain.cli.common import CONFIG, examples
from dptrain.cli.options import GroupedCommand, setting_flags
from dptrain.cli.survive import DEFAULTS, survival_flags, survive
from dptrain.errors import UserError


@click.command(
    cls=GroupedCommand,
    short_help="Train with planned faults, and show what they cost.",
    epilog=examples(
        "dptrain rehearse -n 4 --shards 4 --kill 2@100 --kill 0@300",
        "dptrain rehearse -n 4 --shards 4 --full-disk 200",
        "dptrain rehearse -n 4 --network mine.toml --data npz:FILE --stop 1@200 --timeout 20",
    ),
)
@CONFIG
@click.option("--kill", multiple=True, metavar="RANK@STEP", help="Kill a rank after a step.")
@click.option(
    "--stop",
    multiple=True,
    metavar="RANK@STEP",
    help="Stop a rank (SIGSTOP) after a step. It is noticed after --timeout.",
)
@click.option(
    "--full-disk",
    multiple=True,
    metavar="STEP",
    help="Let the disk of the run directory be full after a step, until the ranks have ended.",
)
@survival_flags(omit=("survive", "hosts"))
@setting_flags(omit=("resume",))
def rehearse(
    file: Path | None,
    kill: tuple[str, ...],
    stop: tuple[str, ...],
    full_disk: tuple[str, ...],
    **flags: Any,
) -> int:
    """Train as `dptrain train --survive` does, with planned faults, and show what they cost.

    The ranks must run on this machine. The run has a new directory.
    """
    from dptrain.survival.rehearsal import FULL_DISK, KILL, STOP

    named = {KILL: kill, STOP: stop, FULL_DISK: full_disk}
    planned = [(kind, text) for kind, texts in named.items() for text in texts]
    if not planned:
        raise UserError("rehearse has no fault; expected for example --kill 1@100")
    return survive({**DEFAULTS, **flags, "survive": True}, file, planned=planned)
