"""`dptrain bench`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dptrain.cli import parsing
from dptrain.cli.common import BACKEND_LIST, DATA, JSON, STOPPED, examples, number, output_folder
from dptrain.cli.options import GroupedCommand
from dptrain.comm.launching.launcher import find_launch
from dptrain.errors import UserError


@click.command(
    cls=GroupedCommand,
    short_help="Time training and inference of networks, by batch size.",
    epilog=examples(
        "dptrain bench solar                      # training and inference, batch 2 to 1024",
        "dptrain bench perceptrons                # 30 networks, batch 100, 500 and 1000",
        "dptrain bench solar --largest --memory 2GB  # from the plan: nothing is timed",
        "dptrain bench cifar mine.toml --batch-sizes 32,256 --threads 1,2,4 --samples none",
        "dptrain bench model0 --backends numba,cuda --within 10ms",
    ),
)
@click.argument("networks", nargs=-1, metavar="[NETWORK]...")
@click.option(
    "--batch-sizes",
    "--batch-size",
    "batch_sizes",
    metavar="N,…|none",
    help="Batch sizes of training.  [default: from the network's recipe]",
)
@click.option(
    "--samples", metavar="N,…|none", help="Batch sizes of inference.  [default: 2,64,512,1024]"
)
@DATA
@BACKEND_LIST
@click.option(
    "--precisions",
    "--precision",
    "precisions",
    metavar="NAME,…",
    help="Precisions of the arithmetic: fp32, tf32, bf16, fp64.  [default: the first "
    "of each backend]",
)
@click.option("--threads", metavar="N,…", help="Numbers of compute threads.  [default: all cores]")
@click.option(
    "--largest",
    is_flag=True,
    help="Compute the largest batch sizes that fit, from the plan. Nothing is timed "
    "unless --batch-sizes or --samples is set too.",
)
@click.option(
    "--memory", metavar="SIZE", help="Memory limit, such as 2GB.  [default: the free memory]"
)
@click.option(
    "--within", default="1s", show_default=True, metavar="TIME", help="Time limit of a prediction."
)
@number(
    "--epoch-samples",
    default=10_000,
    at_least=1,
    help="Samples of the epoch whose time is computed.",
)
@number("--epochs", default=1, at_least=1, help="Number of such epochs.")
@click.option(
    "--seconds-per-case",
    type=parsing.Number(float, above=0, at_most=1e8),
    default=3.0,
    show_default=True,
    metavar="X",
    help="Time limit of one measurement, unless a single repeat takes longer.",
)
@output_folder("Folder of the results.  [default: runs/bench-NETWORK]", file_okay=False)
@JSON
def bench(
    networks: tuple[str, ...],
    batch_sizes: str | None,
    samples: str | None,
    data: str | None,
    backends: str,
    precisions: str | None,
    threads: str | None,
    largest: bool,
    memory: str | None,
    within: str,
    epoch_samples: int,
    epochs: int,
    seconds_per_case: float,
    output: Path | None,
    as_json: bool,
) -> int:
    """Time training steps and inference of networks, by batch size, backend and threads.

    NETWORK is a name, a .toml file, or perceptrons for all multilayer perceptrons of the built-in
    networks. [default: model0] A case that exceeds the memory is listed as such, and the
    others are measured. Each result is saved as soon as it is known.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop the benchmark after the current case, with exit code
    75; the same command continues.
    """
    launch = find_launch(os.environ)
    if launch.size > 1:
        raise UserError(
            f"bench measures one replica, but the launcher started {launch.size} ranks; start it "
            "without a launcher, or measure ranks with dptrain scale"
        )
    chosen = networks or ("model0",)
    numbers, sample_counts = list_sizes(batch_sizes, samples, largest=largest)
    limit = None if memory is None else parsing.parse_bytes(memory, "--memory")
    within_s = parsing.parse_seconds(within, "--within")
    counts = None if threads is None else parsing.parse_numbers(threads, "--threads")
    from dptrain.cli.printing import print_values
    from dptrain.experiments.bench import bench
    from dptrain.experiments.cases import BenchSettings
    from dptrain.experiments.findings import View
    from dptrain.machine import available_cores

    settings = BenchSettings(
        networks=chosen,
        batch_sizes=numbers,
        samples=sample_counts,
        backends=parsing.parse_names(backends),
        precisions=parsing.parse_names(precisions or ""),
        threads=counts or (available_cores(),),
        largest=largest,
        seconds_per_case=seconds_per_case,
        memory=limit,
        data=data,
    )
    view = View(within_s, epoch_samples, epochs)
    found = bench(settings, view, output or _folder(chosen), verbose=not as_json)
    if as_json:
        print_values(found, as_json=True)
    return STOPPED if found["stopped"] else 0


def list_sizes(
    batch_sizes: str | None, samples: str | None, *, largest: bool
) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the batch sizes of training, None for those of the networks, and of inference."""
    from dptrain.experiments.cases import SAMPLES

    if largest and batch_sizes is None and samples is None:
        return (), ()
    trained = counted = None
    if batch_sizes is not None:
        trained = parsing.parse_numbers(batch_sizes, "--batch-sizes", may_be_none=True)
    if samples is not None:
        counted = parsing.parse_numbers(samples, "--samples", may_be_none=True)
    return trained, SAMPLES if counted is None else counted


def _folder(networks: tuple[str, ...]) -> Path:
    more = f"-and-{len(networks) - 2}-more" if len(networks) > 2 else ""
    stems = [Path(name).name.removesuffix(".toml") for name in networks[:2]]
    return Path("runs") / f"bench-{'-'.join(stems)}{more}"
