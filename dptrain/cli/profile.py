"""`dptrain profile`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from dptrain.cli.common import CONFIG, EXISTING, JSON, examples, guarded
from dptrain.cli.options import GroupedCommand, set_flags, setting_flags

OMITTED = (
    "epochs",
    "steps",
    "run_dir",
    "resume",
    "checkpoint_every",
    "keep_checkpoints",
    "evaluate_every",
    "log_every",
    "baseline_steps",
)
"""Settings of training that have no effect on the time of a step."""


@click.command(
    cls=GroupedCommand,
    short_help="Time every layer of training, on every rank.",
    epilog=examples(
        "dptrain profile",
        "mpirun -n 4 dptrain profile --network cifar --batch-size 128 --output DIR",
        "mpirun -n 4 dptrain profile --network cifar --backend cuda --precision tf32",
        "mpirun -n 8 dptrain profile --steps 200 --output DIR --trace",
    ),
)
@CONFIG
@click.option("--steps", type=int, default=50, show_default=True, metavar="N",
              help="Steps that are timed.")  # fmt: skip
@click.option("--skip", type=int, default=5, show_default=True, metavar="N",
              help="Steps made before, untimed; at least 10 on a GPU.")  # fmt: skip
@click.option("--output", type=EXISTING, metavar="DIR",
              help="Folder for profile.json and CSV files.  [default: write no files]")  # fmt: skip
@click.option("--roofs/--no-roofs", default=True, show_default=True,
              help="Measure the rates of the processor, in about 1 s.")  # fmt: skip
@click.option("--trace", is_flag=True,
              help="Also write trace.json, with all steps of all ranks, for Perfetto or "
              "chrome://tracing.")  # fmt: skip
@click.option("--nvtx", is_flag=True,
              help="Mark stages by name for NVIDIA Nsight Systems and Nsight Compute.")  # fmt: skip
@JSON
@setting_flags(omit=OMITTED)
def profile(
    file: Path | None,
    steps: int,
    skip: int,
    output: Path | None,
    roofs: bool,
    trace: bool,
    nvtx: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Time every layer of training, forward and backward, on all ranks.

    The steps are those of `dptrain train` with the same settings. The trained parameters are
    discarded: there are no checkpoints and no evaluation.

    docs/measuring.md defines every value.
    """

    def action() -> int:
        from dptrain.comm.world import World
        from dptrain.training.profiling import ProfileOptions
        from dptrain.training.profiling import profile as measure
        from dptrain.training.settings import load_settings

        options = ProfileOptions(steps, skip, output, roofs, trace, nvtx)
        config = load_settings({**set_flags(flags), "steps": steps + skip}, os.environ, file)
        record = measure(
            config, World.connect(timeout=config.timeout, command="profile"), options, quiet=as_json
        )
        if record is not None:
            from dptrain.cli.printing import print_profile

            print_profile(record, output, as_json=as_json)
        return 0

    return guarded(action)
