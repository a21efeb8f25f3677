"""Compare dptrain with PyTorch, JAX, ONNX Runtime, OpenVINO and the limits of a CPU.

python -m benchmarks.cpu [--quick] [--networks model0,cifar] [--output DIR]

docs/developers/performance.md describes how the numbers are measured and what they mean.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from benchmarks.suite import Settings

CNNS = ("model0", "model1", "model2", "cifar", "solar")
OUTSIDE = ("lenet5", "vgg", "strided", "odd", "input113")
"""Networks of `benchmarks.outside`."""
NETWORKS = (*CNNS, "mlp-800-400-208", "mlp-6400-3200-1664", *OUTSIDE)
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Makes PyTorch allocate huge pages, as NumPy does for dptrain's arena."""
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
SECTIONS = ("training", "inference", "stages", "ranks", "processes")


@click.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Run for about a minute: batch size 32, few repeats, no torch.compile.",
)
@click.option("--networks", help=f"Networks, separated by commas.  [default: {','.join(NETWORKS)}]")
@click.option(
    "--sections", help=f"Parts to run, separated by commas.  [default: {','.join(SECTIONS)}]"
)
@click.option(
    "--as-installed",
    is_flag=True,
    help="Keep the defaults of the C library's allocator, which slow down PyTorch's steps.",
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
    as_installed: bool,
    output: Path | None,
) -> None:
    """Compare dptrain with other libraries on the CPU of this machine.

    Exit status: 0 if all results are right, 1 if one is wrong, 2 for bad options.
    """
    # Libraries read these variables when they are loaded, which is below.
    os.environ.update({**dict.fromkeys(ONE_THREAD, "1"), "JAX_PLATFORMS": "cpu"})
    if not as_installed:
        os.environ.update(HUGE_PAGES)
    from benchmarks.coarse_check import WrongResultError
    from benchmarks.progress import Progress
    from benchmarks.report import headline, write
    from benchmarks.suite import run
    from dptrain.errors import UserError

    start = time.perf_counter()
    progress = Progress()
    try:
        settings = _settings(quick, networks, sections, keep_memory=not as_installed)
        results = run(settings, progress)
    except (UserError, WrongResultError) as error:
        progress.close()
        print(f"benchmarks.cpu: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, WrongResultError) else 2)
    progress.close()
    progress.show(results.tables())
    progress.print(headline(results))
    progress.print(f"{time.perf_counter() - start:.0f} s")
    folder = output or (None if quick else Path(__file__).parent / "results")
    if folder is not None:
        for path in write(results, folder):
            progress.print(f"written: {path}")


def _settings(
    quick: bool, networks: str | None, sections: str | None, *, keep_memory: bool
) -> Settings:
    from benchmarks.suite import Settings
    from dptrain.errors import UserError, suggest

    chosen = tuple(sections.split(",")) if sections else SECTIONS
    for section in chosen:
        if section not in SECTIONS:
            raise UserError(
                f"section is '{section}'; expected one of {', '.join(SECTIONS)}"
                f"{suggest(section, SECTIONS)}"
            )
    names = tuple(networks.split(",")) if networks else NETWORKS
    if quick:
        return Settings(
            tuple(n for n in names if n not in OUTSIDE) if networks is None else names, chosen,
            batches=(32,), inference_batches=(32,), steps=8, compiled=False,
            launches=1, rank_networks=("model0",), rank_steps=10, keep_memory=keep_memory,
        )  # fmt: skip
    # torch.compile generates C++.
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return Settings(names, chosen, compiled=compiler is not None, keep_memory=keep_memory)


if __name__ == "__main__":
    main()
