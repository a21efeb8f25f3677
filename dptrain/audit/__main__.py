"""How often the 95% intervals of dptrain contain the truth, by kind of interval and noise.

``python -m dptrain.audit`` prints the tables of docs/explanation/intervals.md as Markdown. 1,000
measurements of each kind take about five minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dptrain.audit.coverage import coverage_of
from dptrain.audit.tables import coverage_cell, coverage_table

RANKS = (2, 16, 64, 512)
EFFICIENCIES = ("efficiency of train", "efficiency of scale", "step of scale")
LATE = (
    "rare interruptions", "exponential lateness", "Pareto(3) lateness", "Pareto(1.5) lateness",
)  # fmt: skip


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replications", type=int, default=1000, metavar="N")
    replications: int = parser.parse_args().replications
    if replications < 1:
        parser.error(f"--replications is {replications}; expected 1 or more")
    table = coverage_table(replications)
    _print_row(table.heads)
    _print_row(["---"] * len(table.columns))
    for row in table.texts:
        _print_row(row)
    print()
    _print_row(("noise", "interval", *(f"{ranks} ranks" for ranks in RANKS)))
    _print_row(["---"] * (2 + len(RANKS)))
    for noise in LATE:
        for kind in EFFICIENCIES:
            found = (
                coverage_of(kind, noise, replications=replications, ranks=ranks) for ranks in RANKS
            )
            _print_row((noise, kind, *map(coverage_cell, found)))


def _print_row(cells: Sequence[object]) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
