"""Efficiencies of the POP hierarchy over the launches of a point.

The efficiency of a point is the product of its parallel efficiency, load balance · serialisation ·
transfer, and of computation scaling, the busy time per sample and compute thread at the base point
divided by that at this point. Source: see `dptrain.measure.profile.pop`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.machine.counters import processor_line
from dptrain.measure.profile.profile import Profile
from dptrain.measure.statistics import Estimate, median_of_launches, ratio_of_launches
from dptrain.scaling.study import Efficiencies


def find_efficiencies(
    profiles: Sequence[Profile], base: Sequence[Profile], *, work: float
) -> Efficiencies | None:
    """Return the efficiencies of a point; None for one rank, and for profiles of older versions.

    Args:
        profiles: of the launches of the point.
        base: of the launches of the base point.
        work: work of a rank relative to that of a rank of the base point.
    """
    found = [profile.pop for profile in profiles]
    known = [pop for pop in found if pop is not None]
    if len(known) < len(found):
        return None

    def median(name: str) -> Estimate:
        found = median_of_launches([getattr(pop, name).value for pop in known])
        # These are at most 1 by definition; the interval of a logarithm does not know that.
        is_bounded = name != "transfer" and math.isfinite(found.high)
        return replace(found, high=max(min(found.high, 1.0), found.value)) if is_bounded else found

    return Efficiencies(
        parallel=median("parallel"),
        load_balance=median("load_balance"),
        serialisation=median("serialisation"),
        transfer=median("transfer"),
        computation_scaling=ratio_of_launches(_busy_ms(base), _busy_ms(profiles)).times(work),
        instructions_per_cycle=_of_processor(profiles, "instructions_per_cycle"),
        ghz=_of_processor(profiles, "ghz"),
    )


def joules_per_sample(profiles: Sequence[Profile]) -> Estimate | None:
    """Return the median energy per sample over launches; None if one has no counter."""
    energies = [profile.energy for profile in profiles]
    found = [e.joules_per_sample.value for e in energies if e and e.joules_per_sample is not None]
    return median_of_launches(found) if len(found) == len(profiles) else None


def missing_counters(profiles: Sequence[Profile]) -> list[str]:
    """Return why energy, and instructions and frequency, could not be read, each reason once."""
    reasons = []
    for profile in profiles:
        if profile.energy is not None:
            reasons += [f"energy not measured: {reason}" for reason in profile.energy.missing]
        if profile.processor is not None and profile.processor.missing:
            reasons.append(processor_line(profile.processor))
    return list(dict.fromkeys(reasons))


def _of_processor(profiles: Sequence[Profile], name: str) -> Estimate | None:
    found = [getattr(profile.processor, name, None) for profile in profiles]
    known = [value for value in found if value is not None]
    return median_of_launches(known) if len(known) == len(found) else None


def _busy_ms(profiles: Sequence[Profile]) -> NDArray[np.float64]:
    """Return the mean busy time over steps and ranks of each launch."""
    parts = [profile.parts for profile in profiles]
    return np.array([part.total - part.transfer - part.imbalance for part in parts])
