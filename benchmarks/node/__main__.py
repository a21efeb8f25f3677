"""Measure dptrain on the cores of this machine, next to its peers.

    python -m benchmarks cpu [--quick] [--sections threads,inference] [--networks model0,vgg]

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
from benchmarks.machine import about
from benchmarks.node.mpi import find_mpis
from benchmarks.node.ranks import measure_ranks
from benchmarks.node.shards import measure_shards
from benchmarks.node.steps import SECTIONS as STEPS
from benchmarks.node.steps import measure_steps
from benchmarks.node.sums import measure_sums
from benchmarks.session import Session, Settings
from dptrain.machine import own_cores

SECTIONS: Mapping[str, Callable[[Session], None]] = {
    **{name: partial(measure_steps, name) for name in STEPS},
    "ranks": measure_ranks,
    "sums": measure_sums,
    "shards": measure_shards,
}
QUICK_SECTIONS = ("threads", "outside", "inference")
BLOCK_S, QUICK_BLOCK_S = 0.25, 0.1
ROUNDS, QUICK_ROUNDS = 9, 3


def make_settings(quick: bool = False, **given: Any) -> Settings:
    """Return the settings of a run from the options of the command line.

    Raises:
        UserError: an unknown section or network, or a number that is not one.
    """
    chosen = checked("section", split(given["sections"]), tuple(SECTIONS))
    return Settings(
        sections=chosen or (QUICK_SECTIONS if quick else tuple(SECTIONS)),
        networks=split(given["networks"], are_networks=True),
        batches=numbers("batch size", given["batches"]),
        compiled=numbers("batch size", given["compiled"]),
        rounds=given["rounds"] or (QUICK_ROUNDS if quick else ROUNDS),
        quick=quick,
        cores=tuple(sorted(own_cores()))[: given["cores"]],
        counts=numbers("number of threads", given["counts"]),
        mpis=tuple(find_mpis(given["mpirun"])),
        block_s=QUICK_BLOCK_S if quick else BLOCK_S,
        section_s=60.0 * given["section_minutes"],
    )


def conditions(settings: Settings) -> dict[str, Any]:
    """Return the machine, and the settings of the run."""
    return about(
        kind="cpu",
        rounds=settings.rounds,
        **{"time of a program in a round": f"{settings.block_s:g} s, at least one step"},
        sections=list(settings.sections),
        MPI=[mpi.name for mpi in settings.mpis] or "none",
    )


@click.command()
@options(SECTIONS)
@click.option("--counts", help="Numbers of threads and ranks.  [default: those of each section]")
@click.option("--cores", type=click.IntRange(1), help="Use only the first cores.  [default: all]")
@click.option("--mpirun", multiple=True, help="An MPI launcher to use; may be repeated.")
@click.option("--section-minutes", type=float, default=9.0, show_default=True,
              help="Time after which a section starts no further rounds.")  # fmt: skip
def main(output: Path | None, **given: Any) -> None:
    """Measure dptrain on the cores of this machine, next to other libraries.

    Ctrl-C and SIGTERM end the measurements; the report then has the results up to then.

    Exit status: 0 if all results are right, 1 if one is wrong or missing, 2 for bad options.
    """

    def plan() -> Plan:
        settings = make_settings(**given)
        return settings, conditions(settings), SECTIONS

    run(plan, output, quick=given["quick"])


if __name__ == "__main__":
    main()
