"""Differences between computations that must have the same bits, and whom they blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.digests import Tensor, tensors_text
from dptrain.training.spec import RankSpec

CORRUPTION = "silent corruption: "
"""Begin of the message of each error that a difference raises."""

Digests = NDArray[np.uint64]


class Difference(NamedTuple):
    """A difference between replicas.

    Attributes:
        ranks: of each tensor those of the replicas that differ; of all if no majority agrees.
        tensors: that differ, in the order of the state.
        is_minority: True if most replicas agree on each tensor, and `ranks` are the others.
    """

    ranks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    is_minority: bool


def find_difference(
    tensors: Sequence[Tensor], replicas: Mapping[tuple[int, ...], Digests]
) -> Difference | None:
    """Return how the digests of replicas differ; None if they are equal.

    Args:
        tensors: the names of the digests.
        replicas: digests, uint64 (tensors,), by the ranks of each replica.

    Example:
        >>> tensors = [Tensor("parameters", "fc.weight"), Tensor("parameters", "fc.bias")]
        >>> values = {(0,): [1, 2], (1,): [1, 3], (2,): [1, 2]}
        >>> find_difference(tensors, {ranks: np.array(d) for ranks, d in values.items()}).ranks
        (1,)
    """
    blamed: set[int] = set()
    different: list[Tensor] = []
    is_minority = True
    for number, tensor in enumerate(tensors):
        values = {ranks: int(digests[number]) for ranks, digests in replicas.items()}
        counts = Counter(values.values())
        if len(counts) <= 1:
            continue
        common, count = counts.most_common(1)[0]
        has_majority = 2 * count > len(values)
        is_minority = is_minority and has_majority
        different.append(tensor)
        for ranks, value in values.items():
            blamed |= set(ranks) if not has_majority or value != common else set()
    tensors = tuple(dict.fromkeys(different))
    return Difference(tuple(sorted(blamed)), tensors, is_minority) if different else None


def merged(differences: Sequence[Difference]) -> Difference | None:
    """Return differences as one; None if there are none."""
    if not differences:
        return None
    ranks = sorted({rank for each in differences for rank in each.ranks})
    tensors = dict.fromkeys(tensor for each in differences for tensor in each.tensors)
    return Difference(tuple(ranks), tuple(tensors), all(each.is_minority for each in differences))


def hardware(rank: RankSpec) -> str:
    """Return what decides how a rank rounds, in words."""
    return f"{rank.processor}, {rank.device}, {rank.backend} {rank.precision}"


def difference_text(
    found: Difference,
    ranks: Sequence[RankSpec],
    when: str,
    from_others: str = "from those of the other ranks",
) -> str:
    """Return the line that names a difference.

    Args:
        found: the difference.
        ranks: the hardware of all ranks.
        when: such as ``after step 300``.
        from_others: from what a minority differs.
    """
    named = [f"rank {each} on {place_text(ranks[each])}" for each in found.ranks]
    others = from_others if found.is_minority else "from each other"
    cause = (
        "its memory or arithmetic is wrong"
        if len(named) == 1
        else "the memory or arithmetic of at least one of them is wrong"
    )
    return (
        f"{CORRUPTION}{when}, {tensors_text(found.tensors)} of {' and '.join(named)} "
        f"differ{'s' if len(found.tensors) == 1 else ''} {others}; {cause}"
    )


def place_text(rank: RankSpec) -> str:
    """Return host and device of a rank."""
    return f"{rank.host} ({rank.processor if rank.device == 'cpu' else rank.device})"
