"""Shares of the ranks: how many parts of a minibatch each rank processes.

Parts are micro-shards if there are any, and otherwise samples of a whole minibatch. Each rank has
consecutive parts, in the order of the ranks. Counts are whole numbers on which all ranks agree, so
every rank knows which samples the others have.
"""

from __future__ import annotations

from collections.abc import Sequence

Counts = tuple[int, ...]
"""Number of parts of each rank; empty if all ranks have equal shares."""


def equal_counts(total: int, ranks: int) -> Counts:
    """Return counts that differ by at most one, the larger ones first.

    Example:
        >>> equal_counts(8, 3)
        (3, 3, 2)
    """
    small, larger = divmod(total, ranks)
    return tuple(small + (rank < larger) for rank in range(ranks))


def proportional_counts(rates: Sequence[float], total: int, least: int = 0) -> Counts:
    """Return the counts with which ranks of different speeds end at nearly the same time.

    Counts are proportional to the rates and rounded down. Of the parts that remain, each goes to
    the rank that would process it first.

    Args:
        rates: parts that each rank processes in a unit of time; at least one is above 0.
        total: number of parts.
        least: smallest count of a rank; `total` is at least so many for each rank.

    Example:
        >>> proportional_counts([4.0, 1.0], 8), proportional_counts([50.0, 1.0], 8)
        ((7, 1), (8, 0))
        >>> proportional_counts([50.0, 1.0], 8, least=1)
        (7, 1)
    """
    counts = [least] * len(rates)
    free = list(range(len(rates)))
    while True:
        left = total - least * (len(rates) - len(free))
        whole = sum(rates[rank] for rank in free)
        quotas = {rank: left * rates[rank] / whole for rank in free}
        kept = [rank for rank in free if quotas[rank] >= least]
        if len(kept) == len(free):
            break
        free = kept
    for rank in free:
        counts[rank] = int(quotas[rank])
    for _ in range(total - sum(counts)):
        first = min((r for r in free if rates[r]), key=lambda r: ((counts[r] + 1) / rates[r], r))
        counts[first] += 1
    return tuple(counts)


def alone(counts: Counts) -> int | None:
    """Return the rank that has all parts; None if there are several such ranks, or equal shares."""
    ranks = [rank for rank, count in enumerate(counts) if count]
    return ranks[0] if len(ranks) == 1 and len(counts) > 1 else None


def step_time(counts: Counts, rates: Sequence[float]) -> float:
    """Return the time of the slowest rank.

    Args:
        counts: parts of each rank.
        rates: parts that each rank processes in a unit of time.
    """
    return max(n / rate for n, rate in zip(counts, rates, strict=True) if n)


def better_counts(
    counts: Counts, rates: Sequence[float], *, least: int = 0, margin: float = 0.0
) -> Counts:
    """Return counts with which the slowest rank ends earlier; the present ones if it hardly does.

    Args:
        counts: the present ones.
        rates: parts that each rank processes in a unit of time.
        least: smallest count of a rank.
        margin: smallest relative reduction of the time of the slowest rank.

    Example:
        >>> better_counts((4, 4), [3.0, 1.0]), better_counts((4, 4), [1.1, 1.0], margin=0.1)
        ((6, 2), (4, 4))
    """
    best = proportional_counts(rates, sum(counts), least)
    limit = (1.0 - margin) * step_time(counts, rates)
    return best if step_time(best, rates) < limit else counts
