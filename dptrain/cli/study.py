"""`dptrain study`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from dptrain.bounds import MAX_RUNS
from dptrain.cli import parsing
from dptrain.cli.common import CONFIG, JSON, STOPPED, examples, guarded, number, output_folder
from dptrain.cli.options import GroupedCommand, set_flags, setting_flags
from dptrain.errors import UserError

if TYPE_CHECKING:
    from dptrain.experiments.sweep_cases import Design, MakeSettings
    from dptrain.training.settings import Settings

OWN = ("run_dir", "resume", "tags", "note")
"""Settings of training that a study decides for each run."""

TIMED: Mapping[str, Any] = MappingProxyType({
    "baseline_steps": 0, "evaluate_every": 0, "until_accuracy": 0.0, "patience": 0,
    "best_by": "none",
})  # fmt: skip
"""Settings of a study of variants: all train equally many steps and are evaluated at the end."""

EXAMPLES = examples(
    "dptrain study sweep --set learning_rate=0.01,0.03,0.1 --set batch_size=32,128 --seeds 3",
    "dptrain study sweep --set kernel=5 --set filters=32 --set batch_size=64 --one-at-a-time",
    "dptrain study variants --kernel 5 --filters 32,64",
    "dptrain study variants --network cifar --data cifar10:DIR --stride 2,3,5 --first-pool 5/3",
    "mpirun -n 4 dptrain study variants --network model1 --kernel 5 --pool 4 --epochs 5",
    "dptrain study variants --network cifar --stride 1,2 --filters 64,32 --cross --steps 300",
)

SEEDS = number(
    "--seeds",
    default=1,
    at_least=1,
    at_most=MAX_RUNS,
    help="Runs of each point, with seeds from --seed on.",
)
PART = click.option(
    "--part",
    default="1/1",
    metavar="I/N",
    help="Train only part I of N, for example of a job array.",
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
@SEEDS
@PART
@output_folder("Folder of the results.  [default: runs/variants-NETWORK]", file_okay=False)
@JSON
@CONFIG
@setting_flags(omit=(*OWN, *TIMED))
def variants(
    file: Path | None,
    output: Path | None,
    cross: bool,
    seeds: int,
    part: str,
    as_json: bool,
    **flags: Any,
) -> int:
    """Train variants of a network, and compare their time by operation, memory and accuracy.

    This is a sweep (dptrain study sweep --one-at-a-time) whose axes are changes of the network. The
    unchanged network is trained first, then each change alone, with the settings of `dptrain
    train`; each is evaluated at the end. A variant that is not possible is listed with the reason.
    Finished runs are kept.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop the study after the current step, with a checkpoint and
    exit code 75; the same command continues.
    """

    def action() -> int:
        from dptrain.experiments.network_changes import AXES
        from dptrain.experiments.sweep_cases import Design

        texts = {name: flags.pop(name.replace("-", "_")) for name in AXES}
        axes = {name: parsing.parse_names(text) for name, text in texts.items() if text is not None}

        def design(seed: int) -> Design:
            return Design(axes, range(seed, seed + seeds), not cross, has_unchanged=True)

        def make(replaced: Mapping[str, str]) -> Settings:
            return replace(given(replaced), **TIMED)

        given = _make_settings(flags, file)
        own = parsing.parse_part(part)
        return _run(make, design, output, part=own, as_json=as_json, stem="variants")

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
    help="Values of a setting of dptrain train, or of a change of the network: stride, "
    "filters, width, kernel, pool or first-pool. May be repeated.",
)
@SEEDS
@PART
@click.option(
    "--one-at-a-time",
    is_flag=True,
    help="Train once without a change, then with each value alone, instead of all combinations.",
)
@output_folder("Folder of the results.  [default: runs/sweep-NETWORK]", file_okay=False)
@JSON
@CONFIG
@setting_flags(omit=OWN)
def sweep(
    file: Path | None,
    output: Path | None,
    sets: tuple[str, ...],
    seeds: int,
    part: str,
    one_at_a_time: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Train with all combinations of values of settings, each with several seeds.

    The table shows the mean accuracy (loss for networks that predict values) with its interval over
    the seeds, next to time and memory, and for changes of the network the time by operation. Each
    run has a directory in DIR/runs, on which `dptrain runs` works. Finished runs are kept; a run
    that diverges counts as failed, and a network that is not possible is listed with the reason.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop the sweep after the current step, with a checkpoint and
    exit code 75; the same command continues.
    """

    def action() -> int:
        from dptrain.experiments.sweep_cases import Design

        axes = dict(parsing.parse_axis(text) for text in sets)
        if len(axes) < len(sets):
            raise UserError("--set names a setting twice; expected each once")

        def design(seed: int) -> Design:
            return Design(axes, range(seed, seed + seeds), one_at_a_time, one_at_a_time)

        make, own = _make_settings(flags, file), parsing.parse_part(part)
        return _run(make, design, output, part=own, as_json=as_json, stem="sweep")

    return guarded(action)


def _make_settings(flags: dict[str, Any], file: Path | None) -> MakeSettings:
    """Return the function that returns the settings of the flags with others replaced."""
    from dptrain.training.settings import load_settings

    chosen = set_flags(flags)
    return lambda replaced: load_settings({**chosen, **replaced}, os.environ, file)


def _run(
    make: MakeSettings,
    design: Callable[[int], Design],
    output: Path | None,
    *,
    part: tuple[int, int],
    as_json: bool,
    stem: str,
) -> int:
    """Run a sweep; return the exit code.

    Args:
        make: returns the settings.
        design: returns the design, from the first seed.
        output: folder of the results; None for ``runs/STEM-NETWORK``.
        part: the part of the cases to train.
        as_json: True to print the results as JSON.
        stem: beginning of the name of the default folder.
    """
    from dptrain.cli.printing import print_values
    from dptrain.experiments.sweep import run_sweep

    config = make({})
    from dptrain.comm.world import World

    world = World.connect(timeout=config.timeout, command="study")
    folder = output or Path("runs") / f"{stem}-{Path(config.network).name.removesuffix('.toml')}"
    found = run_sweep(make, design(config.seed), folder, world, part=part, verbose=not as_json)
    if as_json and world.is_rank_zero:
        print_values(found, as_json=True)
    return STOPPED if found["stopped"] else 0
