"""`dptrain train`, `dptrain evaluate` and `dptrain predict`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from dptrain.cli.common import (
    CHECKPOINT,
    CONFIG,
    EXISTING,
    JSON,
    STOPPED,
    WEIGHTS,
    examples,
    guarded,
)
from dptrain.cli.options import RUN_DIR, GroupedCommand, set_flags, setting_flags
from dptrain.cli.parsing import Number
from dptrain.cli.survive import split_flags, survival_flags, survive
from dptrain.errors import UserError

WORKERS = click.option(
    "--workers",
    type=Number(int, at_least=0, at_most=1024),
    default=0,
    metavar="N",
    help="Processes of each rank that decode image files.  [default: 0, the rank itself]",
)


@click.command(
    cls=GroupedCommand,
    short_help="Train a network on all ranks.",
    epilog=examples(
        "mpirun -n 4 dptrain train",
        "mpirun -n 2 dptrain train --network cifar --data cifar10:DIR --crop 4 --flip",
        "mpirun -n 4 dptrain train --network mine.toml --data npz:FILE --steps 500",
        "mpirun -n 4 dptrain train --network cifar --backend cuda --precision tf32",
        "mpirun -n 4 dptrain train --resume RUN_DIR",
        "dptrain train --survive -n 4 --shards 4 --run-dir DIR   # outlives lost ranks",
    ),
)
@CONFIG
@click.option(
    "--dry-run", "dry", is_flag=True, help="Check everything, print the resolved settings and stop."
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also print the times of parts and layers, energy, scaling efficiency, what limits "
    "training, and every epoch.  [default: only in the report]",
)
@survival_flags()
@setting_flags()
def train(file: Path | None, dry: bool, verbose: bool, **flags: Any) -> int:
    """Train a network on all ranks.

    Each setting is a flag (--batch-size 64), an environment variable (DPTRAIN_BATCH_SIZE=64) or a
    key of the --config FILE (batch_size = 64). A flag takes precedence over the variable, and the
    variable over the file.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop training after the current step, with a checkpoint and
    exit code 75; --resume continues. Signals other than Ctrl-C that arrive before training begins
    stop it after its first step; Ctrl-C ends it at once with exit code 130. Exit code 2 is a
    mistake in flags, files or data, 3 a loss that is not finite, 1 a bug or a lost rank.
    """
    if flags["survive"] and dry:
        raise UserError("--dry-run starts no training; remove it, or --survive")
    if flags["survive"]:
        return survive(flags, file, verbose=verbose)
    flags, _ = split_flags(flags)

    def action() -> int:
        from dptrain.training.persistence.rundir import RunDirectory
        from dptrain.training.settings import load_settings

        chosen = set_flags(flags)
        if "resume" in chosen:
            RunDirectory.open(Path(chosen["resume"]))
        # The directory of a run that this command started holds the values of the file.
        continues = "resume" in chosen and flags["resume"] == RUN_DIR
        config = load_settings(chosen, os.environ, None if continues else file)
        from dptrain.comm.world import World
        from dptrain.training.run import dry_run, train

        world = World.of_launch(timeout=config.timeout, command="train")
        if dry:
            dry_run(config, world)
            return 0
        return STOPPED if train(config, world, verbose=verbose) else 0

    return guarded(action)


@click.command(
    cls=GroupedCommand,
    epilog=examples(
        "dptrain evaluate RUN_DIR",
        "mpirun -n 4 dptrain evaluate RUN_DIR --checkpoint 450",
        "dptrain evaluate RUN_DIR --data folder:other --output results/",
    ),
)
@click.argument("run_dir", type=EXISTING)
@click.option("--data", metavar="NAME", help="Data set, as in train.  [default: that of the run]")
@click.option(
    "-o",
    "--output",
    type=EXISTING,
    metavar="DIR",
    help="Write metrics.json, and confusion.csv and .svg, or predicted.csv and .svg for "
    "values, to this directory.  [default: none]",
)
@CHECKPOINT
@WEIGHTS
@WORKERS
@JSON
def evaluate(
    run_dir: Path,
    data: str | None,
    output: Path | None,
    checkpoint: int | None,
    weights: Path | None,
    workers: int,
    as_json: bool,
) -> int:
    """Evaluate a trained network on test data.

    Prints loss and accuracy, precision, recall and F1 of each class and the confusion matrix; for
    values, mean absolute error (MAE), root mean square error (RMSE) and R².
    """

    def action() -> int:
        from dptrain.cli.printing import print_evaluation
        from dptrain.comm.collective import call_on_rank_zero
        from dptrain.comm.world import World
        from dptrain.report.runs.quality_files import claim, write_evaluation
        from dptrain.training.evaluation.evaluation import evaluate_model
        from dptrain.training.evaluation.model import load_on_all_ranks

        world = World.of_launch(command="evaluate")
        model = load_on_all_ranks(run_dir, world, checkpoint, weights=weights)
        if output is not None:
            call_on_rank_zero(world, lambda: claim(output))
        result, quality = evaluate_model(model, data, world, workers=workers)
        if world.is_rank_zero:
            print_warning(model.warning)
            print_evaluation(result, quality, as_json=as_json)
        if output is not None:
            call_on_rank_zero(world, lambda: write_evaluation(output, result, quality))
        return 0

    return guarded(action)


@click.command(
    cls=GroupedCommand,
    epilog=examples(
        "dptrain predict RUN_DIR photo.jpg",
        "dptrain predict RUN_DIR images/ -o predictions.csv",
    ),
)
@click.argument("run_dir", type=EXISTING)
@click.argument("inputs", type=EXISTING, metavar="[INPUT]...", nargs=-1)
@click.option(
    "-i",
    "--input",
    "source",
    type=EXISTING,
    metavar="INPUT",
    help="The same as an argument INPUT.",
)
@click.option(
    "-o",
    "--output",
    type=EXISTING,
    metavar="FILE",
    help="CSV file to write, with one line per sample.  [default: print the predictions]",
)
@click.option(
    "--classes",
    metavar="NAMES",
    help="Names of the labels in INPUT, such as cat,dog for 0 and 1, 1:cat,2:dog, or a "
    ".txt file with a name on each line.  [default: those of INPUT, or "
    "integers]",
)
@CHECKPOINT
@WEIGHTS
@WORKERS
def predict(
    run_dir: Path,
    inputs: tuple[Path, ...],
    source: Path | None,
    output: Path | None,
    classes: str | None,
    checkpoint: int | None,
    weights: Path | None,
    workers: int,
) -> int:
    """Print the predictions of a trained network for new samples, or write them to a file.

    INPUT is an image, a folder of images, or a .npy, .npz or .csv file. Each sample has a line: its
    name, and the most probable classes with their probabilities, or the predicted values.

    The file of --output has the name of the sample, the class and the probability of each class, or
    the predicted values, and the target, or several, if INPUT contains them: an array y next to x,
    the target column of a .csv file, or folders with the names of classes.
    """
    sources = [*inputs, *([] if source is None else [source])]
    if not sources:
        raise UserError("predict has no INPUT; expected for example: dptrain predict RUN photo.jpg")

    def action() -> int:
        from dptrain.comm.world import World
        from dptrain.training.evaluation.model import load_on_all_ranks
        from dptrain.training.evaluation.prediction import (
            predict_all,
            predict_to_file,
            prediction_lines,
        )

        world = World.of_launch(command="predict")
        model = load_on_all_ranks(run_dir, world, checkpoint, weights=weights)
        options: dict[str, Any] = {"workers": workers, "classes": classes}
        if output is None:
            lines = prediction_lines(predict_all(model, sources, world, **options), model)
            text = "\n".join(lines) if world.is_rank_zero else ""
        else:
            count = predict_to_file(model, sources, output, world, **options)
            noun = "prediction" if count == 1 else "predictions"
            text = f"{count} {noun} by the model of step {model.step} in {output}"
        if world.is_rank_zero:
            print_warning(model.warning)
            click.echo(text)
        return 0

    return guarded(action)


def print_warning(warning: str | None) -> None:
    """Print a warning on standard error."""
    if warning is not None:
        click.echo(f"dptrain: warning: {warning}", err=True)
