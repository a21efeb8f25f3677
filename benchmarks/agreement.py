"""Check whether two studies of the same machine measure the same efficiencies.

python -m benchmarks.agreement [--output DIR] [options of `dptrain scale`]

Run `dptrain scale` twice in succession and compare the efficiency of every point but the base. Two
efficiencies agree if the 95% interval of their difference contains 0, which is expected at 19 of 20
points. The machine must be idle otherwise.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.machine import about
from dptrain.measure.console import make_console
from dptrain.measure.statistics import Estimate
from dptrain.scaling.pairing import difference
from dptrain.scaling.study import Study
from dptrain.tables import Table

AGREE = 0.85
"""Least share of the points that agree, 17 of 20."""


@dataclass(frozen=True)
class Compared:
    """A point of both studies, with its efficiencies."""

    name: str
    one: Estimate
    two: Estimate

    @property
    def agrees(self) -> bool:
        """Whether the interval of the difference contains 0."""
        found = difference(self.one, self.two)
        return found.low <= 0 <= found.high


def compare(one: Study, two: Study) -> list[Compared]:
    """Return every point with an efficiency in both studies; the base has none but 1."""
    others = {point.name: point.efficiency for point in two.points}
    base = one.base_ranks, one.base_threads
    return [
        Compared(point.name, point.efficiency, other)
        for point in one.points
        if (point.ranks, point.threads) != base
        and point.efficiency is not None
        and (other := others[point.name]) is not None
    ]


def agreement(found: Sequence[Compared]) -> float:
    """Return the share of the points that agree."""
    return sum(compared.agrees for compared in found) / len(found)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--output", type=click.Path(path_type=Path),
              help="Folder of both studies.  [default: a temporary folder]")  # fmt: skip
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(output: Path | None, arguments: tuple[str, ...]) -> None:
    """Run `dptrain scale` twice with the same ARGUMENTS and compare the studies."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = output or Path(temporary)
        facts = about()
        for name in ("one", "two"):
            _study(folder / name, arguments)
        studies = [Study.read(folder / name / "study.json") for name in ("one", "two")]
    found = compare(*studies)
    for name, value in facts.items():
        click.echo(f"- {name}: {value}")
    rows = [
        [c.name, _text(c.one), _text(c.two), f"{c.two.value - c.one.value:+.3f}",
         "agree" if c.agrees else "differ"]
        for c in found
    ]  # fmt: skip
    heads = ["point", "efficiency, one", "two", "two − one", ""]
    make_console().print(Table.of_rows("Two studies", heads, rows, text=("point",)))
    for study in studies:
        for note in study.notes:
            click.echo(f"note: {note}")
    share = agreement(found)
    number = sum(compared.agrees for compared in found)
    click.echo(f"{number} of {len(found)} points agree; expected are at least 17 of 20")
    sys.exit(share < AGREE)


def _study(folder: Path, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "dptrain", "scale", "--output", str(folder), *arguments]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def _text(value: Estimate) -> str:
    return f"{value.value:.3f} ({value.low:.3f}–{value.high:.3f})"


if __name__ == "__main__":
    main()
