"""`dptrain study`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dptrain.bounds import MAX_RUNS
from dptrain.cli import parsing
from dptrain.cli.common import CONFIG, JSON, STOPPED, examples, guarded, number, output_folder
from dptrain.cli.options import GroupedCommand, set_flags, setting_flags
from dptrain.errors import UserError

OMITTED = (
    "run_dir",
    "resume",
    "tags",
    "note",
    "baseline_steps",
    "evaluate_every",
    "until_accuracy",
    "patience",
    "best_by",
)
"""Settings of training that a study decides itself."""

EXAMPLES = examples(
    "dptrain study sweep --set learning_rate=0.01,0.03,0.1 --set batch_size=32,128 --seeds 3",
    "dptrain study variants --stride 1,2,3,5 --filters 32",
    "dptrain study variants --network cifar --data cifar10:DIR --stride 2,3,5 --first-pool 5/3",
    "mpirun -n 4 dptrain study variants --network model1 --kernel 5 --pool 4 --epochs 5",
    "dptrain study variants --stride 1,2 --filters 64,32 --cross --steps 300",
)


@click.group(invoke_without_command=True, epilog=EXAMPLES)
@click.pass_context
def study(context: click.Context) -> None:
    """Train several networks and compare them."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@study.command(
    cls=GroupedCommand,
    short_help="Compare strides, filters, kernels and poolings.",
    epilog=EXAMPLES,
)
@click.option("--stride", metavar="N,…", help="Strides of all convolutions.")
@click.option("--filters", metavar="N,…", help="Filters of all convolutions.")
@click.option(
    "--width", metavar="X,…", help="Multiples of the filters and units of all layers but the last."
)
@click.option("--kernel", metavar="N,…", help="Kernel sizes of all convolutions.")
@click.option("--pool", metavar="N[/N],…", help="Windows of all poolings, or windows and strides.")
@click.option("--first-pool", metavar="N[/N],…", help="The same for the first pooling only.")
@click.option(
    "--cross", is_flag=True, help="Train all combinations of the changes, not one change at a time."
)
@output_folder("Folder of the results.  [default: runs/variants-NETWORK]", file_okay=False)
@JSON
@CONFIG
@setting_flags(omit=OMITTED)
def variants(
    file: Path | None, output: Path | None, cross: bool, as_json: bool, **flags: Any
) -> int:
    """Train variants of a network, and compare their time by operation, memory and accuracy.

    The unchanged network is trained first, then each change alone, with the settings of `dptrain
    train`; each is evaluated at the end. A variant that is not possible is listed with the reason.
    Finished results are kept.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop the study after the current step, with a checkpoint and
    exit code 75; the same command continues.
    """

    def action() -> int:
        from dptrain.cli.printing import print_values
        from dptrain.experiments.study import study_variants
        from dptrain.experiments.variants import AXES
        from dptrain.training.settings import load_settings

        texts = {name: flags.pop(name.replace("-", "_")) for name in AXES}
        axes = {name: parsing.parse_names(text) for name, text in texts.items() if text is not None}
        config = load_settings(set_flags(flags), os.environ, file)
        from dptrain.comm.world import World

        world = World.connect(timeout=config.timeout, command="study")
        stem = Path(config.network).name.removesuffix(".toml")
        folder = output or Path("runs") / f"variants-{stem}"
        found = study_variants(config, axes, folder, world, cross=cross, verbose=not as_json)
        if as_json and world.is_rank_zero:
            print_values(found, as_json=True)
        return STOPPED if found["stopped"] else 0

    return guarded(action)


@study.command(
    cls=GroupedCommand, short_help="Compare values of any settings over seeds.", epilog=EXAMPLES
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    required=True,
    metavar="NAME=VALUE,…",
    help="Values of a setting of dptrain train, or of stride, filters, width, kernel, "
    "pool or first-pool as in study variants. May be repeated: all combinations are "
    "trained.",
)
@number(
    "--seeds",
    default=1,
    at_least=1,
    at_most=MAX_RUNS,
    help="Runs of each combination, with seeds from --seed on.",
)
@click.option(
    "--part",
    default="1/1",
    metavar="I/N",
    help="Train only part I of N, for example of a job array.",
)
@output_folder("Folder of the results.  [default: runs/sweep-NETWORK]", file_okay=False)
@JSON
@CONFIG
@setting_flags(omit=("run_dir", "resume", "tags", "note"))
def sweep(
    file: Path | None,
    output: Path | None,
    sets: tuple[str, ...],
    seeds: int,
    part: str,
    as_json: bool,
    **flags: Any,
) -> int:
    """Train with all combinations of values of settings, each with several seeds.

    The table shows the mean accuracy (loss for networks that predict values) with its interval over
    the seeds, next to time and memory. Each run has a directory in DIR/runs, on which `dptrain
    runs` works. Finished runs are kept; a run that diverges counts as failed.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop the sweep after the current step, with a checkpoint and
    exit code 75; the same command continues.
    """

    def action() -> int:
        from dptrain.cli.printing import print_values
        from dptrain.experiments.sweep import run_sweep
        from dptrain.training.settings import Settings, load_settings

        axes = dict(parsing.parse_axis(text) for text in sets)
        if len(axes) < len(sets):
            raise UserError("--set names a setting twice; expected each once")
        chosen = set_flags(flags)

        def make(replaced: Mapping[str, str]) -> Settings:
            return load_settings({**chosen, **replaced}, os.environ, file)

        config = make({})
        from dptrain.comm.world import World

        world = World.connect(timeout=config.timeout, command="study")
        stem = Path(config.network).name.removesuffix(".toml")
        found = run_sweep(
            make,
            axes,
            range(config.seed, config.seed + seeds),
            output or Path("runs") / f"sweep-{stem}",
            world,
            part=parsing.parse_part(part),
            verbose=not as_json,
        )
        if as_json and world.is_rank_zero:
            print_values(found, as_json=True)
        return STOPPED if found["stopped"] else 0

    return guarded(action)
