"""Kinds of stages, which have different limits."""

from __future__ import annotations

from dptrain.network import Conv2d, Dense
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan, Stage

PRODUCTS = (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT)
FEW_CHANNELS = 3
"""Convolutions with at most this many input channels have their own target; they reuse less."""


def kind_of(plan: Plan, stage: Stage) -> str:
    """Return the kind of a stage: that of its layer with parameters, or memory-bound."""
    heads = {group.name: group.head for group in plan.groups}
    if stage.phase not in PRODUCTS or stage.group not in heads:
        return "memory"
    head = heads[stage.group]
    if isinstance(head.layer, Conv2d):
        first = head.input_shape[0] <= FEW_CHANNELS
        return "first convolution" if first else "convolution"
    return "dense" if isinstance(head.layer, Dense) else "memory"
