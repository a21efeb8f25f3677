"""Compare dptrain with PyTorch and ONNX Runtime on NVIDIA GPUs.

    python -m benchmarks gpu [--quick] [--sections inference] [--networks model0,vgg] [--output DIR]

Networks are those that dptrain knows by name, those of `benchmarks.outside`, and .toml files.
docs/developers/benchmarks.md describes how the numbers are measured and what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.command import Plan, checked, numbers, options, run, split
from benchmarks.gpu.cases import Exact, GpuRun
from benchmarks.gpu.clock import BLOCKS
from benchmarks.gpu.machine import Machine, about, find_machine
from benchmarks.gpu.sections import SECTIONS, prepare
from benchmarks.report import PRECISIONS
from benchmarks.session import Session, Settings

QUICK_SECTIONS, QUICK_BLOCKS = ("training", "inference"), 6


def make_settings(quick: bool = False, **given: Any) -> Settings:
    """Return the settings of a run from the options of the command line.

    Raises:
        UserError: an unknown section, network or precision, or a number that is not one.
    """
    chosen = checked("section", split(given["sections"]), tuple(SECTIONS))
    compiled = given["compiled"]
    return Settings(
        sections=chosen or (QUICK_SECTIONS if quick else tuple(SECTIONS)),
        networks=split(given["networks"], are_networks=True),
        batches=numbers("batch size", given["batches"]),
        precisions=checked("precision", split(given["precisions"]), PRECISIONS),
        compiled=None if compiled is None else numbers("batch size", compiled),
        rounds=given["rounds"] or (QUICK_BLOCKS if quick else BLOCKS),
        launches=given["launches"],
        quick=quick,
    )


def sections_of(
    machine: Machine, names: tuple[str, ...]
) -> Mapping[str, Callable[[Session], None]]:
    """Return the sections of a machine; the first of a run also prepares all of them."""
    runs: list[GpuRun] = []

    def section(name: str, session: Session) -> None:
        if not runs:
            exact = None if machine.torch is None else Exact(machine.torch, session.progress)
            runs.append(GpuRun(session, machine, exact))
            prepare(runs[0])
        SECTIONS[name](runs[0])

    return {name: partial(section, name) for name in names}


def conditions(machine: Machine, settings: Settings) -> dict[str, Any]:
    """Return the machine, and the settings of the run."""
    compiled = settings.compiled
    return about(
        machine,
        kind="gpu",
        sections=list(settings.sections),
        blocks=f"{settings.rounds} of each program, alternating, of 3 to 100 steps",
        launches=settings.launches,
        **{"torch.compile at batch": "that of each section" if compiled is None else compiled},
    )


@click.command()
@options(SECTIONS)
@click.option("--precisions", help=f"From {','.join(PRECISIONS)}.  [default: of each section]")
@click.option("--backends", default="cuda,cudnn", show_default=True, help="Backends of dptrain.")
@click.option("--launches", type=click.IntRange(1), default=3, show_default=True,
              help="Launches of each job with several ranks.")  # fmt: skip
def main(output: Path | None, backends: str, **given: Any) -> None:
    """Compare dptrain with PyTorch and ONNX Runtime on the GPUs of this machine.

    Exit status: 0 if everything was measured, 1 if a result is wrong or missing, 2 for bad options.
    """

    def plan() -> Plan:
        settings, machine = make_settings(**given), find_machine(split(backends))
        return settings, conditions(machine, settings), sections_of(machine, settings.sections)

    run(plan, output, quick=given["quick"])


if __name__ == "__main__":
    main()
