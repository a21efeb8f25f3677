"""`dptrain find-rate`."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dptrain.bounds import MAX_RUNS
from dptrain.cli.common import CONFIG, JSON, examples, guarded, number, output_folder
from dptrain.cli.options import GroupedCommand, set_flags, setting_flags
from dptrain.cli.profile import OMITTED
from dptrain.training.schedules import ScheduleSettings

if TYPE_CHECKING:
    from dptrain.training.rate_range import RangeTest

SCHEDULE = (*(field.name for field in fields(ScheduleSettings)), "tensorboard")
"""Settings of training that have no effect on the test."""


@click.command(
    name="find-rate",
    cls=GroupedCommand,
    short_help="Find a learning rate by training with a rising one.",
    epilog=examples(
        "dptrain find-rate",
        "mpirun -n 4 dptrain find-rate --network cifar --batch-size 128 --output DIR",
        "dptrain find-rate --optimizer adamw --from 1e-5 --to 1",
    ),
)
@CONFIG
@number("--from", "low", default=1e-6, help="Learning rate of the first step.")
@number("--to", "high", default=10.0, help="Learning rate of the last step.")
@number("--steps", default=200, at_most=MAX_RUNS, help="Training steps.")
@output_folder(
    "Folder for the plot (rates.svg, rates.png), rates.csv and rates.json.  "
    "[default: write no files]"
)
@JSON
@setting_flags(omit=(*OMITTED, *SCHEDULE))
def find_rate(
    file: Path | None,
    low: float,
    high: float,
    steps: int,
    output: Path | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Train with a learning rate that grows from step to step, and find where the loss falls.

    The rate is multiplied by the same factor in every step. The test ends when the averaged loss
    exceeds its smallest value four times. A good rate for a constant schedule is the one at which
    the loss falls fastest; schedules that fall start with up to ten times as much, below the rate
    with the lowest loss. The trained parameters are discarded.
    """

    def action() -> int:
        from dptrain.cli.printing import print_range_test
        from dptrain.comm.world import World
        from dptrain.training.rate_range import RangeOptions
        from dptrain.training.rate_range import find_rate as test_rates
        from dptrain.training.settings import load_settings

        options = RangeOptions(low, high, steps)
        config = load_settings({**set_flags(flags), "steps": steps}, os.environ, file)
        world = World.connect(timeout=config.timeout, command="find-rate")

        def write(result: RangeTest) -> None:
            from dptrain.report.runs.rate_plot import write_rates

            if output is not None:
                write_rates(result, output)

        result = test_rates(config, world, options, write=write, quiet=as_json)
        if result is not None:
            print_range_test(result, output, as_json=as_json)
        return 0

    return guarded(action)
