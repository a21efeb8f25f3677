"""dptrain against PyTorch, and against the limits of the machine, on NVIDIA GPUs.

python -m benchmarks.gpu [--quick] [--networks model0,cifar] [--output DIR]

docs/performance.md says how the figures are measured and what they mean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.gpu.machine import find_machine
from benchmarks.gpu.report import Results, headline, write
from benchmarks.gpu.suite import SECTIONS, Settings, run
from benchmarks.gpu.training import PRECISIONS
from benchmarks.progress import Progress
from benchmarks.tables import new_files
from dptrain.errors import UserError, suggest


@click.command()
@click.option(
    "--quick", is_flag=True, help="A minute or two: batch 32, no torch.compile, no ranks."
)
@click.option("--networks", help="Names with commas between them.  [default: the five]")
@click.option("--sections", help=f"Some of {','.join(SECTIONS)}.  [default: all]")
@click.option("--batches", help="Of training steps.  [default: 32,256,2048]")
@click.option("--precisions", help=f"Some of {','.join(PRECISIONS)}.  [default: tf32,bf16]")
@click.option("--backends", default="cuda,cudnn", show_default=True, help="Those of dptrain's.")
@click.option("--compile", "compiled", help="Batches with torch.compile, or none.  [default: 32]")
@click.option("--launches", type=click.IntRange(1), help="Of each job of ranks.  [default: 3]")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the files.  [default: benchmarks/results; --quick writes none]",
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
    """Compare dptrain with PyTorch on this machine's GPUs."""
    try:
        settings = settings_from(quick, networks, sections, batches, precisions, compiled, launches)
        folder = output or (None if quick else Path(__file__).parents[1] / "results")
        sys.exit(measure(settings, split(backends), folder))
    except UserError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        sys.exit(2)


def measure(settings: Settings, backends: Sequence[str], folder: Path | None) -> int:
    """Run, print and write; the exit status."""
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
            f"{wrong.precision}: {check.quantity} is off by {check.error:.1e} of its size; "
            f"rounding allows {check.allowed:.1e}",
            file=sys.stderr,
        )
    if not results.right:
        return 1
    # What matters most comes last, where one looks.
    progress.show(reversed(results.tables()))
    progress.say(headline(results))
    for missing in machine.missing:
        progress.say(f"missing: {missing}")
    progress.say(f"{time.perf_counter() - start:.0f} s")
    for path in paths or ():
        progress.say(f"written: {path}")
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
    """What the flags say; what they leave out is as `Settings` and `quick` have it.

    Raises:
        UserError: an unknown word, or no number.
    """
    chosen = Settings()
    if quick:
        chosen = Settings(
            sections=("check", "training", "stages"), batches=(32,), compiled=(),
            stage_batches=(32,), blocks=6,
        )  # fmt: skip
    sizes = numbers(batches)
    return Settings(
        networks=split(networks) or chosen.networks,
        sections=known("section", split(sections), SECTIONS) or chosen.sections,
        batches=sizes or chosen.batches,
        precisions=known("precision", split(precisions), PRECISIONS) or chosen.precisions,
        compiled=chosen.compiled if compiled is None else numbers(compiled.replace("none", "")),
        blocks=chosen.blocks,
        # Stages are timed where steps are checked.
        stage_batches=tuple(n for n in chosen.stage_batches if n in sizes)
        or sizes
        or chosen.stage_batches,
        launches=launches or chosen.launches,
    )


def split(text: str | None) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(filter(None, (text or "").split(",")))


def known(what: str, words: tuple[str, ...], choices: Sequence[str]) -> tuple[str, ...]:
    """`words`, all of which must be among `choices`."""
    for word in words:
        if word not in choices:
            raise UserError(
                f"no {what} '{word}'; there are {', '.join(choices)}{suggest(word, choices)}"
            )
    return words


def numbers(text: str | None) -> tuple[int, ...]:
    """Positive whole numbers between commas."""
    words = split(text)
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise UserError(f"batch size is '{word}'; expected a whole number of at least 1")
    return tuple(int(word) for word in words)


if __name__ == "__main__":
    main()
