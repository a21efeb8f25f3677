"""Shares of the roofline: the least work of a stage, and its least time by the measured limits.

A share is at most 1 only if nothing counts that a stage need not do. Therefore the least work
excludes what `StageProfile.flops` and `StageProfile.bytes_moved` include by convention: products
with zeros of the padding, those that Winograd's algorithm saves, operations that other units of a
processor compute next to the products, and pixels between the windows of a convolution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from dptrain.measure.machine.load import is_busy
from dptrain.measure.profile.profile import Profile, Roofs, StageProfile
from dptrain.network.layers import Conv2d, Dense
from dptrain.network.network import Node
from dptrain.plan.lowering import GRADIENT_PHASES, Phase
from dptrain.plan.plan import Plan, Stage

PRODUCTS = (
    Phase.FORWARD, Phase.BACKWARD_RECOMPUTE, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT,
)  # fmt: skip
"""Phases in which convolutions and dense layers compute products."""
READS_INPUT = (Phase.FORWARD, Phase.BACKWARD_RECOMPUTE, Phase.BACKWARD_WEIGHT)

LOW = 1 / 3
"""Share of the roofline below which a stage is marked."""

AGREEMENT = 0.05
"""Largest difference of the two highest measured peaks."""

_WINOGRAD = re.compile(r"F\((\d+)×(\d+), (\d+)×(\d+)\)")


def is_low(share: float | None) -> bool:
    """Return whether a share of the roofline is known and less than a third."""
    return share is not None and share < LOW


def least_products(algorithm: str) -> Fraction:
    """Return the products that an algorithm needs at least, over those of the direct one.

    F(m×m, r×r) needs (m + r − 1)² products for m² results, each of which is a sum of r². Source:
    Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016. Of another
    algorithm that saves products, the number is unknown, and 0 counts.

    Example:
        >>> least_products("Winograd F(4×4, 3×3)"), least_products("implicit GEMM")
        (Fraction(1, 4), Fraction(1, 1))
    """
    name = algorithm.lower()
    if "winograd" not in name and "fft" not in name:
        return Fraction(1)
    found = _WINOGRAD.search(algorithm)
    if found is None:
        return Fraction(0)
    m, n, r, s = map(int, found.groups())
    return Fraction((m + r - 1) * (n + s - 1), m * n * r * s)


def least_work(plan: Plan, stage: Stage, algorithm: str) -> tuple[float, float]:
    """Return the operations and the bytes of a stage that no implementation can omit.

    Args:
        plan: the plan.
        stage: one of its stages.
        algorithm: its algorithm, "" if the backend states none.

    Returns:
        (operations, bytes) for a full batch.
    """
    groups = [group for group in plan.groups if group.name == stage.group]
    nodes = [n for g in groups for n in g.nodes if isinstance(n.layer, Conv2d | Dense)]
    if not nodes or stage.phase not in PRODUCTS:
        return float(stage.flops), float(stage.bytes_moved)
    flops, moved = Fraction(0), Fraction(stage.bytes_moved)
    for node in nodes:
        inside, touched = _shares(node)
        # The number of products is the same in all phases, and that for the input has no bias.
        if stage.phase not in GRADIENT_PHASES or f"{node.name}.weight" in stage.parameters:
            flops += plan.batch_size * node.flops.backward_input * inside
        if stage.phase in READS_INPUT:
            names = {plan.resolve(name) for name in node.inputs} & {*stage.reads}
            moved -= sum(plan.buffers[name].nbytes for name in names) * (1 - touched)
    return float(flops * least_products(algorithm)), float(moved)


def _shares(node: Node) -> tuple[Fraction, Fraction]:
    """Return the share of products inside the map, and of the pixels that are in any window."""
    layer = node.layer
    if not isinstance(layer, Conv2d):
        return Fraction(1), Fraction(1)
    inside = touched = Fraction(1)
    axes = zip(
        node.input_shape[1:], node.output_shape[1:], layer.window, layer.strides,
        layer.dilations, layer.pads(node.input_shape), strict=True,
    )  # fmt: skip
    for size, count, window, stride, dilation, (before, _) in axes:
        taps = range(0, window * dilation, dilation)
        positions = [i * stride + tap - before for i in range(count) for tap in taps]
        valid = [position for position in positions if 0 <= position < size]
        inside *= Fraction(len(valid), len(positions))
        touched *= Fraction(len(set(valid)), size)
    return inside, touched


def disagreement(found: Sequence[Roofs]) -> str:
    """Return the reason if no second measurement confirms the highest peak, else ""."""
    second, first = sorted(roofs.gflops for roofs in found)[-2:]
    if second >= (1 - AGREEMENT) * first:
        return ""
    return (
        f"the two highest of {len(found)} measured peak rates differ by {1 - second / first:.0%}, "
        f"expected at most {AGREEMENT:.0%}; repeat the measurement on an idle machine"
    )


def highest_roofs(found: Sequence[Roofs]) -> Roofs:
    """Return limits that hold for every measurement: the highest of each.

    Args:
        found: of several measurements, ranks or launches. `Roofs.withheld` of the result is empty
            if one of those without a reason confirms the highest peak.
    """
    rates: dict[int, float] = {}
    for size, rate in (pair for roofs in found for pair in roofs.copies):
        rates[size] = max(rate, rates.get(size, 0.0))
    highest = max(found, key=lambda roofs: roofs.gflops)
    confirming = [
        roofs
        for roofs in found
        if not roofs.withheld and roofs.gflops >= (1 - AGREEMENT) * highest.gflops
    ]
    return replace(
        highest,
        gb_per_s=max(roofs.gb_per_s for roofs in found),
        copies=tuple(sorted(rates.items())),
        withheld="" if confirming else highest.withheld or disagreement(found),
    )


def with_roofs(profile: Profile, roofs: Roofs | None) -> Profile:
    """Return a profile with the shares of its stages and kinds by given limits.

    There are no shares, and `Profile.shares_withheld` has the reason, if other programs delayed the
    steps, if the limits are not certain, or if a stage took less time than the limits allow, which
    shows that they are too low.

    Args:
        profile: with `StageProfile.least_flops`; one of an older version is returned as it is.
        roofs: the limits; None removes the shares.
    """
    if any(stage.least_flops is None for stage in profile.stages):
        return profile
    reason = "" if roofs is None else _load(profile) or roofs.withheld or _excess(profile, roofs)
    used = None if reason else roofs
    return replace(
        profile,
        roofs=roofs,
        shares_withheld=reason,
        stages=tuple(_with_share(stage, [stage], used) for stage in profile.stages),
        kinds=tuple(
            _with_share(kind, [s for s in profile.stages if _is_of(s, kind)], used)
            for kind in profile.kinds
        ),
    )


def _is_of(stage: StageProfile, kind: StageProfile) -> bool:
    return (stage.kind, stage.phase) == (kind.kind, kind.phase)


def _with_share(
    record: StageProfile, stages: Sequence[StageProfile], roofs: Roofs | None
) -> StageProfile:
    if roofs is None or not record.typical_ms:
        return replace(record, roofline_share=None)
    least = sum(least_ms(stage, roofs) for stage in stages)
    return replace(record, roofline_share=least / record.typical_ms)


def least_ms(stage: StageProfile, roofs: Roofs) -> float:
    """Return the least time of a stage by the limits in ms."""
    return roofs.least_ms(stage.least_flops or 0.0, stage.least_bytes or 0.0)


def _load(profile: Profile) -> str:
    cores = profile.environment.get("cores")
    if not is_busy(profile.other_cores, of=cores):
        return ""
    return (
        f"other programs used {profile.other_cores:.1f} cores during the measurement; repeat it on "
        "an idle machine"
    )


def _excess(profile: Profile, roofs: Roofs) -> str:
    shares = {s.name: least_ms(s, roofs) / s.typical_ms for s in profile.stages if s.typical_ms}
    name = max(shares, key=lambda name: shares[name], default="")
    if not name or shares[name] <= 1 or math.isnan(shares[name]):
        return ""
    return (
        f"{name} took {1 - 1 / shares[name]:.1%} less time than the measured limits allow, so the "
        "processor was slower while they were measured; repeat the measurement"
    )
