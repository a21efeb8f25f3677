"""Verdicts on known losses as text, and why a table of losses is withheld."""

from __future__ import annotations

from collections.abc import Sequence

from dptrain.measure.machine.load import is_busy
from dptrain.measure.profile.known import Recovery

VERDICTS = {True: "yes", False: "no", None: "not known"}
NOT_VERIFIED = "the losses are not verified, because no known loss was injected"


def recovery_line(recovery: Recovery) -> str:
    """Return the verdict on a known loss.

    Example:
        >>> from dptrain.measure.statistics import Estimate
        >>> recovery_line(Recovery("delay", 5.0, Estimate(5.0, 4.8, 5.3, 10), True))
        'delay: recovered 5.00 of 5.00 ms (4.80–5.30)'
    """
    found = recovery.recovered_ms
    if found is None:
        return f"{recovery.name}: not verified, because {recovery.reason}"
    low, high, value = (f"{x:.2f}".replace("-", "−") for x in (found.low, found.high, found.value))
    line = f"recovered {value} of {recovery.injected_ms:.2f} ms ({low}–{high})"
    if recovery.is_recovered:
        return f"{recovery.name}: {line}"
    return f"{recovery.name}: not recovered, because {recovery.reason}; {line}"


def known_lines(found: Sequence[Recovery], where: str = "") -> list[str]:
    """Return the verdicts on known losses, one per line.

    Args:
        found: the verdicts; empty if no known loss was injected.
        where: at which point.
    """
    if not found:
        return [NOT_VERIFIED]
    return [f"known loss{where}, {recovery_line(each)}" for each in found]


def why_withheld(found: Sequence[Recovery], other_cores: float | None, cores: int | None) -> str:
    """Return why a table of losses is withheld; "" if no injected loss was missed.

    Args:
        found: the verdicts.
        other_cores: mean number of cores that other programs used meanwhile; None if unknown.
        cores: number of cores of the machine; None for this one.

    Example:
        >>> why_withheld([Recovery("delay", 5.0, None, False)], 1.2, 2)
        'a known loss was not recovered (delay); other programs used 1.2 cores meanwhile'
    """
    missed = [recovery.name for recovery in found if recovery.is_recovered is False]
    if not missed:
        return ""
    reason = f"a known loss was not recovered ({', '.join(missed)})"
    if is_busy(other_cores, of=cores):
        reason += f"; other programs used {other_cores:.1f} cores meanwhile"
    return reason
