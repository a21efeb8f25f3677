"""What the product of two tensors reads and writes, in every backend."""

from __future__ import annotations

from dptrain.plan.lowering import Access, Group, GroupNeeds, Phase

OTHER = {"dx": "x2", "dx2": "x"}
"""The input by which dy is multiplied for the gradient of each input."""


def product_needs(group: Group) -> GroupNeeds:
    """Return the needs of `Multiply`, whose gradients are products of dy and the other input."""
    phases = {Phase.FORWARD: Access(("x", "x2"), ("y",))}
    if group.gradients:
        reads = ("dy", *(OTHER[local] for local in group.gradients))
        phases[Phase.BACKWARD] = Access(reads, group.gradients)
    return GroupNeeds(phases)
