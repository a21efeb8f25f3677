"""Compare dptrain with PyTorch and with the limits of the machine, on NVIDIA GPUs.

python -m benchmarks.gpu [--quick] [--sections inference] [--networks model0,vgg] [--output DIR]

Networks are those that dptrain knows by name, those of `benchmarks.outside`, and .toml files.

docs/developers/performance.md describes how the numbers are measured and what they mean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.gpu.machine import find_machine
from benchmarks.gpu.report import Results, headline, write
from benchmarks.gpu.suite import (
    QUICK_DATA,
    QUICK_FP32,
    QUICK_INFERENCE,
    QUICK_SHAPES,
    SECTIONS,
    Settings,
    run,
)
from benchmarks.gpu.training import PRECISIONS
from benchmarks.progress import Progress
from benchmarks.tables import new_files
from dptrain.errors import UserError, suggest


@click.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Run for one or two minutes: batch size 32, no torch.compile, no layers and ranks.",
)
@click.option(
    "--networks", help=f"Networks, separated by commas.  [default: {','.join(Settings().networks)}]"
)
@click.option(
    "--sections", help=f"Parts to run, separated by commas.  [default: {','.join(SECTIONS)}]"
)
@click.option("--batches", help="Batch sizes, separated by commas.  [default: 32,256,2048]")
@click.option(
    "--precisions", help=f"Precisions, from {','.join(PRECISIONS)}.  [default: tf32,bf16]"
)
@click.option(
    "--backends",
    default="cuda,cudnn",
    show_default=True,
    help="Backends of dptrain, separated by commas.",
)
@click.option(
    "--compile",
    "compiled",
    help="Batch sizes that also run with torch.compile, or 'none'.  [default: 32]",
)
@click.option(
    "--launches",
    type=click.IntRange(1),
    help="Launches of each job with several ranks.  [default: 3]",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the result files.  [default: benchmarks/results; none with --quick]",
)
def main(
    quick: bool,
    networks: str | None,
    sections: str | None,
    batches: str | None,
    precisions: str | None,
    backends: str,
    compiled: str | None,
    launches: int | None,
    output: Path | None,
) -> None:
    """Compare dptrain with PyTorch on the GPUs of this machine.

    Exit status: 0 if everything was measured, 1 if a result is wrong or missing, 2 for bad options.
    """
    try:
        settings = settings_from(quick, networks, sections, batches, precisions, compiled, launches)
        folder = output or (None if quick else Path(__file__).parents[1] / "results")
        sys.exit(measure(settings, split(backends), folder))
    except UserError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        sys.exit(2)


def measure(settings: Settings, backends: Sequence[str], folder: Path | None) -> int:
    """Run the benchmark, print and write its results, and return the exit status."""
    start, progress = time.perf_counter(), Progress()
    paths: tuple[Path, Path] | None = None

    def save(results: Results) -> None:
        nonlocal paths
        if folder is not None:
            paths = paths or new_files(folder, "gpu", str(results.about["date"]))
            write(results, *paths)

    machine = find_machine(backends)
    try:
        results = run(settings, machine, progress, save)
    finally:
        progress.close()
    for wrong in results.wrong:
        check = wrong.check
        print(
            f"benchmarks.gpu: {check.network}, batch {check.batch_size}, {wrong.backend} "
            f"{wrong.precision}: the relative error of {check.quantity} is {check.error:.1e}; "
            f"at most {check.allowed:.1e} is expected from rounding",
            file=sys.stderr,
        )
    if not results.right:
        return 1
    # The most important table is printed last, next to the prompt.
    progress.show(reversed(results.tables()))
    progress.print(headline(results))
    for missing in machine.missing:
        progress.print(f"missing: {missing}")
    progress.print(f"{time.perf_counter() - start:.0f} s")
    for path in paths or ():
        progress.print(f"written: {path}")
    return 0 if results.complete else 1


def settings_from(
    quick: bool,
    networks: str | None,
    sections: str | None,
    batches: str | None,
    precisions: str | None,
    compiled: str | None,
    launches: int | None,
) -> Settings:
    """Return the settings of the command line, with the defaults of `Settings` or of `quick`.

    Raises:
        UserError: a value is not one of the choices or not a number.
    """
    chosen = Settings()
    if quick:
        chosen = Settings(
            sections=("check", "training", "stages"), batches=(32,), compiled=(),
            stage_batches=(32,), blocks=6, shapes=QUICK_SHAPES, fp32=QUICK_FP32,
            inference=QUICK_INFERENCE, data=QUICK_DATA,
        )  # fmt: skip
    sizes = numbers(batches)
    compiled_sizes = None if compiled is None else numbers(compiled.replace("none", ""))
    listed = checked("precision", split(precisions), PRECISIONS)
    return Settings(
        networks=split(networks) or chosen.networks,
        sections=checked("section", split(sections), SECTIONS) or chosen.sections,
        batches=sizes or chosen.batches,
        precisions=listed or chosen.precisions,
        compiled=chosen.compiled if compiled_sizes is None else compiled_sizes,
        blocks=chosen.blocks,
        # By default, stages are timed at the batch sizes at which steps are checked.
        stage_batches=tuple(n for n in chosen.stage_batches if n in sizes)
        or sizes
        or chosen.stage_batches,
        launches=launches or chosen.launches,
        shapes=chosen.shapes.replaced(split(networks), sizes, listed, compiled_sizes),
        residual=chosen.residual.replaced(split(networks), sizes, listed, compiled_sizes),
        data=chosen.data.replaced(split(networks), sizes, listed, compiled_sizes),
        fp32=chosen.fp32.replaced(split(networks), sizes, (), compiled_sizes),
        inference=chosen.inference.replaced(split(networks), sizes, listed, compiled_sizes),
    )


def split(text: str | None) -> tuple[str, ...]:
    """Return the values of a comma-separated list."""
    return tuple(filter(None, (text or "").split(",")))


def checked(what: str, values: tuple[str, ...], choices: Sequence[str]) -> tuple[str, ...]:
    """Return `values`, which must be among `choices`."""
    for value in values:
        if value not in choices:
            raise UserError(
                f"{what} is '{value}'; expected one of {', '.join(choices)}"
                f"{suggest(value, choices)}"
            )
    return values


def numbers(text: str | None) -> tuple[int, ...]:
    """Return the positive integers of a comma-separated list."""
    values = split(text)
    for value in values:
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"batch size is '{value}'; expected a whole number of at least 1")
    return tuple(int(value) for value in values)


if __name__ == "__main__":
    main()
