"""Tables of coverage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dptrain.audit.coverage import ENOUGH, Coverage, cases, coverage_of
from dptrain.audit.kinds import KINDS
from dptrain.audit.noise import NOISES, Noise
from dptrain.audit.study import Audit
from dptrain.tables import Table

NOISE_COLUMNS = ("point", "spread", "correlation", "bursts", "steps", "factor", "tail", "launches")


def coverage_table(replications: int) -> Table:
    """Return the coverage of all kinds of intervals, one row for each noise.

    Args:
        replications: number of simulated measurements of each cell.
    """
    found = {case: coverage_of(*case, replications=replications) for case in cases()}
    rows: list[Sequence[str]] = []
    for noise in NOISES:
        cells = [found.get((kind, noise)) for kind in KINDS]
        rows.append((noise, *("" if cell is None else coverage_cell(cell) for cell in cells)))
    title = f"Intervals that contain the truth, of {replications:,} simulated measurements"
    return Table(title, ("noise", *KINDS), ("noise",), rows=rows)


def audit_tables(audit: Audit) -> list[Table]:
    """Return the noise of each point, and the coverage of each interval."""
    noises = Table("Noise of this study", NOISE_COLUMNS, ("point",))
    for name, noise in audit.noises.items():
        noises.add_row(name, *_noise_cells(noise))
    noises.caption = (
        "spread, correlation: of steps that are not slow; bursts: share of the steps of a rank, "
        "mean length, and how many times as long its steps are; tail: index if a few slow steps "
        "determine the mean; launches: spread, share of slow ones"
    )
    if not audit.intervals:
        return [noises]
    number = audit.intervals[0].coverage.replications
    columns = ("point", "interval", "contains the truth", "relative width", "")
    found = Table(f"95% intervals of {number:,} simulated studies", columns, (*columns[:2], ""))
    for interval in audit.intervals:
        coverage = interval.coverage
        weak = f"below {ENOUGH:.0%}" if coverage.is_weak else ""
        width = f"{coverage.width:.1%}" if coverage.given else ""
        found.add_row(interval.point, interval.label, coverage_cell(coverage), width, weak)
    return [noises, found]


def _noise_cells(noise: Noise) -> tuple[str, ...]:
    bursts = ("", "", "")
    if noise.burst_share:
        bursts = (
            f"{noise.burst_share:.1%}", f"{noise.burst_steps:.1f}", f"{noise.burst_factor:.2f}"
        )  # fmt: skip
    slow = f", {noise.slow_share:.0%} slow" if noise.slow_share else ""
    return (
        f"{noise.spread:.1%}",
        f"{noise.correlation:.2f}",
        *bursts,
        f"{noise.tail:.1f}" if math.isfinite(noise.tail) else "",
        f"{noise.launch_spread:.1%}{slow}",
    )


def coverage_cell(found: Coverage) -> str:
    """Return the coverage in per cent, and how many intervals were given if not all were."""
    if not found.given:
        return "withheld"
    given = found.given / found.replications
    text = f"{100 * found.share:.1f}%"
    return text if given == 1 else f"{text} of {100 * given:.0f}%"
