"""Tables of coverage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from dptrain.audit.coverage import ENOUGH, Coverage, cases, coverage_of
from dptrain.audit.kinds import KINDS
from dptrain.audit.noise import NOISES, Noise
from dptrain.audit.study import AUDIT, Audit
from dptrain.tables import Records, Table, computed, texts
from dptrain.vocabulary import find_term

NOISE_DECIMALS = {
    "spread": None, "correlation": 2, "burst_share": None, "burst_steps": 1, "burst_factor": 2,
    "tail": 1, "launch_spread": None, "slow_share": None,
}  # fmt: skip
"""Parameters of the noise in the table, with their decimals."""


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
    return Table.of_rows(title, ("noise", *KINDS), rows, text=("noise",))


def audit_tables(audit: Audit) -> list[Table]:
    """Return the noise of each point, and the coverage of each interval."""
    coverage = [intervals_table(audit)] if audit.intervals else []
    return [noises_table(audit), *coverage]


def noises_table(audit: Audit) -> Table:
    """Return the noise of each point of a study."""
    known = {name: _known(noise) for name, noise in audit.noises.items()}
    records = Records(list(known.values()), [f"noises.{name}" for name in known])
    columns = (
        texts("point", list(known)),
        *(
            records.values(name, decimals=decimals, missing="")
            for name, decimals in NOISE_DECIMALS.items()
            if any(name in noise for noise in known.values())
        ),
    )
    note = "Spread, correlation: of steps that are not slow; bursts, tail, slow: if there are any."
    return Table("Noise of this study", columns, note, "noise", AUDIT)


def _known(noise: Noise) -> dict[str, float]:
    """Return the parameters of a noise without those of bursts and other events that it lacks."""
    found: dict[str, float] = asdict(noise)
    absent = [
        *(name for name in found if name.startswith("burst") and not noise.burst_share),
        *(["slow_share"] * (not noise.slow_share)),
        *(["tail"] * math.isinf(noise.tail)),
    ]
    return {name: value for name, value in found.items() if name not in absent}


def intervals_table(audit: Audit) -> Table:
    """Return how often each interval of simulated studies contains the truth."""
    records = Records.of(audit.intervals, "intervals")
    found = [interval.coverage for interval in audit.intervals]
    shares = [coverage.share if coverage.given else None for coverage in found]
    widths = [{"width": each.width if each.given else None} for each in found]
    term = find_term("coverage", "covered")
    columns = (
        records.texts("point"),
        texts("interval", [interval.label for interval in audit.intervals]),
        computed("contains the truth", "%", shares, term=term, missing="withheld"),
        texts("", [f"below {ENOUGH:.0%}" if coverage.is_weak else "" for coverage in found]),
        Records(widths, [f"{at}.coverage" for at in records.at]).values("width"),
        records.counts("coverage.given"),
        records.counts("coverage.replications"),
    )
    note = "Simulated studies have the autocorrelation, bursts, tail and launches of this study."
    return Table("Coverage of the intervals", columns, note, "audit", AUDIT)


def coverage_cell(found: Coverage) -> str:
    """Return the coverage in per cent, and how many intervals were given if not all were."""
    if not found.given:
        return "withheld"
    given = found.given / found.replications
    text = f"{100 * found.share:.1f}%"
    return text if given == 1 else f"{text} of {100 * given:.0f}%"
