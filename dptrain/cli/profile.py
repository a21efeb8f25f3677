"""`dptrain profile`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dptrain.bounds import MAX_RUNS
from dptrain.cli.common import CONFIG, JSON, examples, guarded, number, output_folder
from dptrain.cli.options import GroupedCommand, set_flags, setting_flags
from dptrain.cli.parsing import parse_seconds
from dptrain.errors import UserError

OMITTED = (
    "epochs",
    "steps",
    "until_accuracy",
    "patience",
    "best_by",
    "run_dir",
    "tags",
    "note",
    "resume",
    "checkpoint_every",
    "checkpoint_seconds",
    "keep_checkpoints",
    "evaluate_every",
    "log_every",
    "logger",
    "baseline_steps",
)
"""Settings of training that have no effect on the time of a step."""

STEPS, STEPS_OF_LOSSES = 400, 100
"""Steps that are timed without --steps. Intervals of 400 steps also hold if steps are slow in
bursts; those of losses are over blocks."""

ONLY_PROFILES = {
    "skip": "--skip",
    "roofs": "--roofs or --no-roofs",
    "trace": "--trace",
    "nvtx": "--nvtx",
    "inference": "--inference",
    "tensorboard": "--tensorboard",
}
"""Options that --losses does not use, by the name of their parameter."""


@click.command(
    cls=GroupedCommand,
    short_help="Time every layer of training, on every rank.",
    epilog=examples(
        "dptrain profile",
        "mpirun -n 4 dptrain profile --network cifar --batch-size 128 --output DIR",
        "mpirun -n 4 dptrain profile --network cifar --backend cuda --precision tf32",
        "mpirun -n 8 dptrain profile --steps 200 --output DIR --trace",
        "dptrain profile --network cifar --batch-size 128 --inference --unfused",
        "mpirun -n 4 dptrain profile --losses --steps 200",
    ),
)
@CONFIG
@number(
    "--steps",
    at_most=MAX_RUNS,
    help=f"Steps that are timed.  [default: {STEPS}; with --losses {STEPS_OF_LOSSES}]",
)
@number(
    "--skip", default=5, at_most=MAX_RUNS, help="Steps made before, untimed; at least 10 on a GPU."
)
@output_folder("Folder for profile.json and CSV files.  [default: write no files]")
@click.option(
    "--roofs/--no-roofs",
    default=True,
    show_default=True,
    help="Measure the rates of the processor, in about 2 s.",
)
@click.option(
    "--trace",
    is_flag=True,
    help="Also write trace.json, with all steps of all ranks, for Perfetto or chrome://tracing.",
)
@click.option(
    "--nvtx", is_flag=True, help="Mark stages by name for NVIDIA Nsight Systems and Nsight Compute."
)
@click.option("--inference", is_flag=True, help="Profile forward passes instead of training steps.")
@click.option(
    "--unfused",
    is_flag=True,
    help="With --inference: compute each layer by kernels of its own, to compare kinds of layers.",
)
@click.option(
    "--losses",
    is_flag=True,
    help="Instead of the profile: measure by experiment what each loss of efficiency "
    "costs, with --steps timed steps of each experiment in ten blocks.",
)
@click.option(
    "--known-losses/--no-known-losses",
    default=None,
    help="Also inject losses of known size (a delay, a lost core, a message) and state how much of "
    "each is recovered.  [default: with --losses]",
)
@click.option(
    "--delay",
    metavar="TIME",
    help="With --losses: delay that is injected, such as 5ms.  [default: one step, at least 5 ms]",
)
@JSON
@setting_flags(omit=OMITTED)
def profile(
    file: Path | None,
    steps: int | None,
    skip: int,
    output: Path | None,
    roofs: bool,
    trace: bool,
    nvtx: bool,
    inference: bool,
    unfused: bool,
    losses: bool,
    known_losses: bool | None,
    delay: str | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Time every layer of training, forward and backward, on all ranks.

    The steps are those of `dptrain train` with the same settings. The trained parameters are
    discarded: there are no checkpoints and no evaluation.

    With --losses the ranks make steps without sums, with sums of one number, with sums after the
    backward pass, and with injected delays, in interleaved blocks. The differences are what load
    imbalance, serialisation and communication cost. If a loss of known size is injected and not
    recovered, the table of losses is withheld.

    The page "Fields of files" of the documentation defines every value.
    """
    if losses:
        _require_no_profile_options()
    if steps is None:
        steps = STEPS_OF_LOSSES if losses else STEPS
    num_steps = steps
    if unfused and not inference:
        raise UserError("--unfused requires --inference; add --inference, or remove --unfused")
    if delay is not None and not losses:
        raise UserError("--delay requires --losses; add --losses, or remove --delay")

    def action() -> int:
        from dptrain.comm.world import World
        from dptrain.training.profiling.inference import profile_inference
        from dptrain.training.profiling.profiling import ProfileOptions
        from dptrain.training.profiling.profiling import profile as measure
        from dptrain.training.settings import load_settings

        if losses:
            known = known_losses is not False
            return _losses(file, num_steps, delay, output, flags, known=known, as_json=as_json)
        options = ProfileOptions(num_steps, skip, output, roofs, bool(known_losses), trace, nvtx)
        config = load_settings({**set_flags(flags), "steps": num_steps + skip}, os.environ, file)
        world = World.connect(timeout=config.timeout, command="profile")
        if inference:
            record = profile_inference(config, world, options, fused=not unfused, quiet=as_json)
        else:
            record = measure(config, world, options, quiet=as_json)
        if record is not None:
            from dptrain.cli.printing import print_profile

            print_profile(record, output, as_json=as_json)
        return 0

    return guarded(action)


def _require_no_profile_options() -> None:
    """Raise an error if an option of profiles was given that --losses does not use."""
    context = click.get_current_context()
    given = [
        option
        for name, option in ONLY_PROFILES.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise UserError(f"--losses measures no profile; remove {' and '.join(given)}")


def _losses(
    file: Path | None,
    steps: int,
    delay: str | None,
    output: Path | None,
    flags: dict[str, Any],
    *,
    known: bool,
    as_json: bool,
) -> int:
    from dptrain.comm.world import World
    from dptrain.training.profiling.losses import LossOptions, measure_losses
    from dptrain.training.settings import load_settings

    delay_s = None if delay is None else parse_seconds(delay, "--delay")
    options = LossOptions(steps, delay_s, output, known)
    config = load_settings({**set_flags(flags), "steps": steps}, os.environ, file)
    world = World.connect(timeout=config.timeout, command="profile")
    record = measure_losses(config, world, options, quiet=as_json)
    if record is not None:
        from dptrain.cli.printing import print_losses

        print_losses(record, output, as_json=as_json)
    return 0
