"""Scaling efficiency: T(1), the step time of rank 0 alone, against T(p), the step time of the job.

Weak scaling keeps the work per rank: E = T(1) / T(p), where T(1) is the time in which rank 0 alone
processes its own shard of the minibatch. Strong scaling keeps the minibatch: E = T(1) / (p · T(p)),
where T(1) is the time in which rank 0 alone processes all of it. The other ranks idle meanwhile.
Both times are wall times divided by the steps, on the same clock: waiting for data, computation,
communication and update. They are measured in turns, in blocks of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.measure.statistics import FEWEST, Estimate, ratio_of_walls, unseen_share
from dptrain.measure.tail_index import tail_note
from dptrain.tables import Records, Table, computed, texts
from dptrain.vocabulary import find_term


@dataclass(frozen=True)
class Pair:
    """A block of steps of rank 0 alone, and the steps of the job before it.

    Attributes:
        weak, strong: wall time / steps in ns of rank 0 alone, with the shard of one rank and with
            the whole minibatch.
        together: the same of the steps of the job.
    """

    weak: float
    strong: float
    together: float


@dataclass(frozen=True)
class Baseline:
    """Steps of rank 0 alone, in blocks between the steps of the job.

    Attributes:
        pairs: the blocks in the order of time.
        steps_alone, steps_together: number of steps in all blocks of `Pair.weak`, which is that of
            `Pair.strong`, too, and of `Pair.together`.
        cost: share of the run that the blocks took.
        why: reason why there are none, as a sentence; empty if they were not requested.
    """

    pairs: tuple[Pair, ...] = ()
    steps_alone: int = 0
    steps_together: int = 0
    cost: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Efficiency:
    """Measured scaling efficiencies of a job.

    Attributes:
        weak, strong: with 95% intervals; None if fewer than three blocks were measured.
        baseline: what they were computed from.
        possible: upper bound of the weak efficiency if ranks share cores: cores / compute threads
            on the node with the most threads per core, at most 1.
        other_cores: mean number of cores that other programs used on the node of rank 0; None if
            the system does not report it.
        note: remark if a few slow steps determine the efficiency, else "".
    """

    weak: Estimate | None
    strong: Estimate | None
    baseline: Baseline
    possible: float
    other_cores: float | None = None
    note: str = ""


def efficiency(
    baseline: Baseline,
    size: int,
    *,
    possible: float,
    other_cores: float | None = None,
    steps: ArrayLike = (),
) -> Efficiency:
    """Return the efficiencies of a job with `size` ranks.

    Args:
        baseline: blocks of steps of rank 0 alone.
        size: number of ranks.
        possible, other_cores: see `Efficiency`.
        steps: durations of steps of the job, of which the tail is judged.
    """
    if len(baseline.pairs) < FEWEST:
        return Efficiency(None, None, baseline, possible, other_cores)
    weak, strong, together = np.array([(p.weak, p.strong, p.together) for p in baseline.pairs]).T

    def ratio(alone: NDArray[np.float64]) -> Estimate:
        unseen = (
            unseen_share(float(alone.mean()) / 1e6, baseline.steps_alone),
            unseen_share(float(together.mean()) / 1e6, baseline.steps_together),
        )
        return ratio_of_walls(alone, together, unseen=unseen)

    note = tail_note(steps, "this run")
    strong_ratio = ratio(strong).times(1 / size)
    return Efficiency(ratio(weak), strong_ratio, baseline, possible, other_cores, note)


def efficiency_table(efficiency: Efficiency, *, size: int) -> Table:
    """Return a table of weak and strong efficiency with their intervals."""
    baseline = efficiency.baseline
    title = f"Scaling efficiency at {size} ranks (measured)"
    definitions = {
        "weak": "T(1) / T(p), same work per rank",
        "strong": "T(1) / (p T(p)), same global minibatch",
    }
    names = [name for name in definitions if getattr(efficiency, name) is not None]
    found = Records([getattr(efficiency, name) for name in names], names)
    blocks = computed("blocks", "", [value.n for value in found.items], decimals=0)
    columns = (
        texts("scaling", names),
        found.estimates("", "efficiency", "%"),
        texts("definition", [definitions[name] for name in names], kind="prose"),
        replace(blocks, term=find_term("blocks")),
    )
    lines = [
        "The steps of rank 0 alone alternate with those of the job and take "
        f"{baseline.cost:.1%} of the run. One launch does not show how much the efficiency differs "
        "between launches, which may run on other cores; dptrain scale measures that."
    ]
    if efficiency.possible < 1:
        lines.append(
            f"The ranks share cores, so the efficiency is at most {efficiency.possible:.2f} on "
            "this machine."
        )
    if efficiency.note:
        lines.append(f"Note: {efficiency.note}.")
    return Table(title, columns, " ".join(lines))
