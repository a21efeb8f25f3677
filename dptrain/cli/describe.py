"""`dptrain describe` and `dptrain layers`."""

from __future__ import annotations

from typing import Any

import click

from dptrain.backends import BACKENDS
from dptrain.cli.common import (
    BACKEND_LIST,
    DATA,
    JSON,
    NETWORK,
    PRECISION,
    THREADS,
    examples,
    number,
)
from dptrain.cli.options import GroupedCommand, network_of
from dptrain.cli.parsing import parse_names
from dptrain.errors import UserError
from dptrain.plan.optimizers import RULES


@click.command(
    cls=GroupedCommand,
    short_help="Show layers, FLOPs and memory of a network.",
    epilog=examples(
        "dptrain describe",
        "dptrain describe model0",
        "dptrain describe model0 --data folder:flowers --toml > mine.toml",
        "dptrain describe mlp-25600-12800-6656 --batch-size 1000 --optimizer adam",
        "dptrain describe resnet18 --freeze all-but-head",
    ),
)
@click.argument("name", required=False, metavar="[NETWORK]")
@NETWORK
@number("--batch-size", default=32, help="Samples of one rank in a step.")
@click.option(
    "--backend",
    type=str,
    default=BACKENDS[0],
    show_default=True,
    metavar=f"[{'|'.join(BACKENDS)}]",
    help="Implementation of the layers.",
)
@PRECISION
@click.option(
    "--optimizer",
    type=click.Choice(tuple(RULES)),
    help="Update rule.  [default: from the network's recipe]",
)
@THREADS
@click.option("--inference", is_flag=True, help="Describe inference: no gradients, no updates.")
@click.option(
    "--recompute",
    is_flag=True,
    help="Compute activations again in the backward pass, if this needs less memory.",
)
@number(
    "--accumulate",
    default=1,
    help="Process the samples of a step in this many passes, whose gradients are added.",
)
@click.option(
    "--freeze",
    default="",
    metavar="PATTERN,…",
    help="Layers or parameters that are not trained, as in `dptrain train`.",
)
@DATA
@click.option(
    "--toml",
    "as_toml",
    is_flag=True,
    help="Print the network as a TOML file, from which one of your own can start.",
)
@JSON
def describe(
    name: str | None,
    network: str | None,
    threads: int | None,
    data: str | None,
    as_toml: bool,
    as_json: bool,
    inference: bool,
    **choices: Any,
) -> None:
    """Show the layers of a network, their FLOPs, and the memory of training on one rank.

    NETWORK is a name, or a .toml or .onnx file; without it, all networks and presets are listed.
    Nothing is allocated, so networks that exceed the memory are described too. A ! marks groups
    with a stage that is estimated to reach less than a third of the roofline.
    """
    from dptrain.cli.printing import print_description, print_networks

    chosen = network_of(name, network)
    if chosen is None:
        from dptrain.describe import list_networks, list_presets

        print_networks(list_networks(), list_presets(), as_json=as_json)
        return
    from dptrain.describe import describe_plan, network_for, plan_for
    from dptrain.machine import available_cores
    from dptrain.network.files import network_to_toml

    described = network_for(chosen, data)
    if as_toml:
        click.echo(network_to_toml(described), nl=False)
        return
    choices["threads"] = available_cores() if threads is None else threads
    plan = plan_for(described, training=not inference, **choices)
    print_description(describe_plan(plan), as_json=as_json)


@click.command(
    cls=GroupedCommand,
    short_help="Time every layer of a step, with one backend or several.",
    epilog=examples(
        "dptrain layers model2",
        "dptrain layers model2 --explain --threads 16 --batch-size 1",
        "dptrain layers cifar --backends cuda,cudnn --precision tf32 --batch-size 2048",
        "dptrain layers cifar --inference --unfused --batch-size 128",
    ),
)
@click.argument("name", required=False, metavar="NETWORK")
@NETWORK
@BACKEND_LIST
@number("--batch-size", default=32, help="Samples of the step.")
@PRECISION
@THREADS
@click.option("--inference", is_flag=True, help="Time inference: forward only, no gradients.")
@click.option(
    "--unfused",
    is_flag=True,
    help="Compute each layer by kernels of its own, to compare kinds of layers.",
)
@click.option(
    "--explain", is_flag=True, help="Show the algorithm of each stage and the reason; time nothing."
)
@DATA
@click.option(
    "--tune",
    is_flag=True,
    help="With --explain: the kernels of `dptrain train --tune`, which are measured "
    "unless they are cached.",
)
@JSON
def layers(
    name: str | None,
    network: str | None,
    backends: str,
    threads: int | None,
    inference: bool,
    unfused: bool,
    explain: bool,
    data: str | None,
    tune: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Time each layer of a training step or of inference alone, on random numbers.

    NETWORK is a name, or a .toml or .onnx file. Times are medians with their quartiles. With
    several backends, the last columns show the time of the first divided by that of each other one.
    A ! marks times of which the arithmetic and the memory of the machine, whose limits are measured
    as well, require less than a third.

    With --explain nothing is computed: the tables show the algorithm of each stage, its tile, how
    it is divided among threads, and why it was selected. --precision fp32-direct excludes the
    Winograd algorithms of the backend numba.
    """
    from dptrain.cli.printing import print_explanations, print_layers
    from dptrain.describe import network_for
    from dptrain.machine import available_cores
    from dptrain.measure.layers import time_layers
    from dptrain.network.adaptation import adaptation_lines

    chosen = network_of(name, network)
    if chosen is None:
        raise UserError("no network is named; expected dptrain layers NETWORK, such as model0")
    choices["threads"] = available_cores() if threads is None else threads
    described = network_for(chosen, data)
    for line in () if as_json else adaptation_lines(described):
        click.echo(line)
    compared = parse_names(backends)
    if not compared:
        raise UserError(f"--backends is '{backends}'; expected names such as numba,reference")
    if tune and not explain:
        raise UserError("--tune requires --explain; add --explain, or remove --tune")
    if explain and (inference or unfused):
        raise UserError("--explain shows training as it runs; remove --inference and --unfused")
    if explain:
        from dptrain.describe import plan_for

        plans = [plan_for(described, backend=each, tune=tune, **choices) for each in compared]
        return print_explanations(plans, as_json=as_json)
    timed = time_layers(
        described, list(compared), inference=inference, fused=not unfused, **choices
    )
    task = f"{'inference' if inference else 'training'}{', unfused' if unfused else ''}"
    print_layers(timed, described, task, as_json=as_json, **choices)
    return None
