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
from dptrain.measure.profile.pop import Pop
from dptrain.measure.profile.profile import Profile
from dptrain.measure.statistics import (
    Estimate,
    median_of_launches,
    ratio_of_launches,
    ratio_of_walls,
    unseen_share,
)
from dptrain.scaling.pairing import Walls
from dptrain.scaling.study import Efficiencies


def find_efficiencies(
    profiles: Sequence[Profile], base: Sequence[Profile], *, work: float, paired: bool = False
) -> Efficiencies | None:
    """Return the efficiencies of a point; None for one rank, and for profiles of older versions.

    Each is a ratio of times that are summed over the launches, so the factors multiply like those
    of one launch.

    Args:
        profiles: of the launches of the point.
        base: of the launches of the base point.
        work: work of a rank relative to that of a rank of the base point.
        paired: True if launch i of the point and of the base belong to one round.
    """
    found = [profile.pop for profile in profiles]
    known = [pop for pop in found if pop is not None]
    if len(known) < len(found):
        return None
    walls, busy, busy_base = walls_of(profiles), _busy_ms(profiles), _busy_ms(base)
    compare = ratio_of_walls if paired else ratio_of_launches
    unseen = walls_of(base).unseen, walls.unseen
    return Efficiencies(
        **pop_over_launches(walls, known),
        computation_scaling=compare(busy_base, busy, unseen=unseen).times(work),
        instructions_per_cycle=_of_processor(profiles, "instructions_per_cycle"),
        ghz=_of_processor(profiles, "ghz"),
    )


def walls_of(profiles: Sequence[Profile]) -> Walls:
    """Return the steps of launches, and how many steps they are the means of."""
    steps = [profile.step_ms for profile in profiles]
    return Walls(np.array([step.mean for step in steps]), sum(step.n for step in steps))


def pop_over_launches(walls: Walls, pops: Sequence[Pop]) -> dict[str, Estimate]:
    """Return parallel efficiency, load balance, serialisation and transfer over launches.

    Args:
        walls: wall times of the launches.
        pops: efficiencies of each launch.
    """
    wall = walls.steps_ms
    slowest = wall * [pop.transfer.value for pop in pops]
    slowest_rank = slowest * [pop.serialisation.value for pop in pops]
    busy = slowest_rank * [pop.load_balance.value for pop in pops]
    # A launch that is slower as a whole does not change them, but interruptions do.
    unseen = unseen_share(float(wall.mean()), walls.num_steps)

    def ratio(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> Estimate:
        found = ratio_of_walls(top, bottom, unseen=(unseen, unseen))
        # These are at most 1 by definition; the interval of a logarithm does not know that.
        is_bounded = math.isfinite(found.high)
        return replace(found, high=max(min(found.high, 1.0), found.value)) if is_bounded else found

    found = {
        "parallel": ratio(busy, wall),
        "load_balance": ratio(busy, slowest_rank),
        "serialisation": ratio(slowest_rank, slowest),
        "transfer": ratio(slowest, wall),
    }
    product = ratio(busy, slowest)
    if math.isfinite(product.high) and not all(map(_shows_imbalance, pops)):
        limits = Estimate(product.value, product.low, 1.0, product.n)
        for name in ("load_balance", "serialisation"):
            found[name] = found[name].extended_to(limits)
    return found


def _shows_imbalance(pop: Pop) -> bool:
    """Return True if the steps of a launch distinguish load balance from serialisation.

    Otherwise each is between their product and 1, see `dptrain.measure.profile.pop`.
    """
    return pop.load_balance.high < 1 or pop.serialisation.high < 1


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
    return np.array([profile.step_ms.mean * _busy_share(profile) for profile in profiles])


def _busy_share(profile: Profile) -> float:
    if profile.pop is not None:
        return profile.pop.parallel.value
    parts = profile.step_parts.all_steps
    return 1 - (parts.transfer + parts.imbalance) / parts.total
