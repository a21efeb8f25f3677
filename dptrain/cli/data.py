"""`dptrain data`."""

from __future__ import annotations

import dataclasses
import io
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dptrain.bounds import MAX_SEED
from dptrain.cli.common import EXISTING, JSON, MISTAKE, examples, number
from dptrain.cli.options import GroupedCommand, setting_flags
from dptrain.setting_groups import first, settings_of
from dptrain.texts import command_line
from dptrain.training.data_settings import AugmentationSettings

if TYPE_CHECKING:
    from dptrain.data import Dataset

NETWORKS = {"maps": "solar", "irradiance": "solar", "cifar10": "cifar", "shapes": "resnet20"}
"""Networks for which data is shown if none is chosen and `network_for` returns none; that of other
data is `NETWORK`."""
NETWORK = "model0"

EXAMPLES = examples(
    "dptrain data list                                        # what --data can be",
    "dptrain data describe digits                             # samples, classes, range, digest",
    "dptrain data check folder:flowers                        # read everything, find problems",
    "dptrain data show digits --output digits.png             # a grid of samples",
    "dptrain data show shapes --crop 4 --flip --output a.png  # with augmentation",
    "dptrain data convert folder:flowers --output flowers     # then: --data npy:flowers",
)

CHANGES = [
    dataclasses.replace(each, default=first(each.default, each.type()), optional=False)
    for each in settings_of(AugmentationSettings)
    if each.name not in ("mixup", "cutmix")
]
"""Settings of changes of single samples."""

SPEC = click.argument("spec", metavar="DATA")
FOR = click.option(
    "--network",
    metavar="NAME",
    help="The network for which the data is preprocessed.  [default: one that "
    "fits the kind of data]",
)


def _output(description: str) -> Callable[[Any], Any]:
    return click.option("--output", type=EXISTING, metavar="PATH", required=True, help=description)


@click.group(invoke_without_command=True, epilog=EXAMPLES)
@click.pass_context
def data(context: click.Context) -> None:
    """List, describe, check, show and convert data sets."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@data.command("list", cls=GroupedCommand, epilog=EXAMPLES)
@JSON
def list_(as_json: bool) -> None:
    """List every kind of data that --data can name, with its format and an example."""
    from dptrain.cli.printing import print_values
    from dptrain.data import DATA_HELP, SOURCES

    if as_json:
        forms = {
            name: {"form": source.form(name), "summary": source.summary, "example": source.example}
            for name, source in SOURCES.items()
        }
        print_values(forms, as_json=True)
        return
    click.echo(DATA_HELP)
    click.echo(f"\nUse one as: dptrain train --data {shlex.quote(SOURCES['csv'].example)}")


@data.command(cls=GroupedCommand, epilog=EXAMPLES)
@SPEC
@FOR
@JSON
def describe(spec: str, network: str | None, as_json: bool) -> None:
    """Describe a data set: samples, shapes, classes, range of values, preprocessing, digest.

    Statistics are those of at most 4,096 samples of each split, evenly spaced.
    """
    from dptrain.cli.printing import print_data, print_values
    from dptrain.data.inspection import describe_data

    dataset = _open(spec, network)
    found = describe_data(dataset)
    if as_json:
        print_values(found, as_json=True)
        return
    print_data(found)
    chosen = network or _trainable(dataset)
    if chosen is not None:
        command = command_line("train", "--network", chosen, "--data", spec)
        click.echo(f"train with: {command}")


def _trainable(dataset: Dataset) -> str | None:
    """Return a network of the zoo that training adapts to the data; None if there is none."""
    is_image = len(dataset.input_shape) == 3
    if dataset.targets == "classes":
        return NETWORK if is_image else None
    return None if dataset.targets == "binary" else "solar" if is_image else "mlp-64-32"


@data.command(cls=GroupedCommand, epilog=EXAMPLES)
@SPEC
@FOR
def check(spec: str, network: str | None) -> int:
    """Read every sample of a data set and report problems.

    Problems are files that cannot be read, numbers that are not finite, classes without training
    samples, inputs that are all equal, and test samples that are also training samples. The exit
    code is 2 if there is one.
    """
    from dptrain.data.inspection import counting_rules, find_problems

    dataset, counts = counting_rules(_open(spec, network))
    count = sum(map(len, dataset.splits))
    with _progress(count, "samples read") as step:
        problems = find_problems(dataset, step)
    for line in counts.lines():
        click.echo(f"data: {line}")
    for problem in problems:
        click.echo(f"dptrain: {dataset.name}: {problem}", err=True)
    if not problems:
        click.echo(f"{dataset.description}: all {count:,} samples can be read; no problem found")
    return MISTAKE if problems else 0


@data.command(cls=GroupedCommand, epilog=EXAMPLES)
@SPEC
@FOR
@_output("PNG file to write.")
@number(
    "--samples",
    at_least=1,
    at_most=1000,
    help="Number of samples.  [default: 50; 8 with augmentation]",
)
@click.option(
    "--split",
    type=click.Choice(["training", "test", "validation"]),
    default="training",
    show_default=True,
    help="Split that is shown.",
)
@setting_flags(of=CHANGES)
@number("--seed", default=0, at_least=0, at_most=MAX_SEED, help="As in train.")
@click.option("--replace", is_flag=True, help="Overwrite an existing file.")
def show(
    spec: str,
    network: str | None,
    output: Path,
    samples: int | None,
    split: str,
    seed: int,
    replace: bool,
    **flags: Any,
) -> None:
    """Write a grid of samples as the network sees them, with their classes or values.

    With augmentation, each row shows a sample and the five images that five epochs read.
    """
    from dptrain.data import Augmentation
    from dptrain.data.grid import sample_grid
    from dptrain.data.inspection import splits
    from dptrain.errors import UserError
    from dptrain.files import write_whole

    if output.exists() and not replace:
        raise UserError(
            f"{output} exists already; choose another --output, or overwrite it with --replace"
        )
    dataset = _open(spec, network)
    given = [each for each in CHANGES if flags[each.name] is not None]
    found = Augmentation(
        **{each.name: each.parse(str(flags[each.name]), each.flag) for each in given}
    )
    augmentation = found if found.used else None
    count = samples or (50 if augmentation is None else 8)
    chosen = splits(dataset).get(split)
    if chosen is None:
        raise UserError(f"{dataset.description} has no validation split; choose another --split")
    grid = sample_grid(dataset, chosen, count, augmentation=augmentation, seed=seed)
    image = io.BytesIO()
    grid.save(image, format="PNG")
    write_whole(output, image.getvalue(), "--output")
    click.echo(f"written: {output}")


@data.command(cls=GroupedCommand, epilog=EXAMPLES)
@SPEC
@FOR
@_output("Folder to write.")
def convert(spec: str, network: str | None, output: Path) -> None:
    """Write a data set as memory-mapped arrays, which need no decoding and may exceed the memory.

    The folder has the files x_train.npy, y_train.npy, x_test.npy, y_test.npy and classes.txt;
    `--data npy:FOLDER` reads it. 8-bit images keep their pixels and size; images of different sizes
    become the network's inputs.
    """
    from dptrain.data.conversion import convert_data
    from dptrain.data.decoding import keep_decoded
    from dptrain.data.spec import escape

    # Images of one size are then known to have 8-bit pixels.
    dataset = keep_decoded(_open(spec, network), 1)
    with _progress(len(dataset.train) + len(dataset.test), "samples written") as step:
        written = convert_data(dataset, output, step)
    for path in written:
        click.echo(f"written: {path}")
    click.echo(f"train with: --data {shlex.quote(f'npy:{escape(str(output))}')}")


def _open(spec: str, network: str | None) -> Dataset:
    from dptrain.data import network_for, open_data
    from dptrain.network.files import get_network

    kind = spec.partition(":")[0].partition("?")[0]
    fitting = network_for(spec) if network is None else None
    return open_data(spec, fitting or get_network(network or NETWORKS.get(kind, NETWORK)))


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Show how many samples are done, on a terminal."""
    from dptrain.measure.console import make_console

    console = make_console(errors=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
