"""What bounds a stage follows from what it computes."""

from __future__ import annotations

from dptrain.network import Conv2d, Dense
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan, Stage

PRODUCTS = (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT)
FEW_CHANNELS = 3
"""Convolutions of so few input channels have a target of their own: they reuse little."""


def kind_of(plan: Plan, stage: Stage) -> str:
    """Which limit applies: that of the layer with parameters, or memory's."""
    heads = {group.name: group.head for group in plan.groups}
    if stage.phase not in PRODUCTS or stage.group not in heads:
        return "memory"
    head = heads[stage.group]
    if isinstance(head.layer, Conv2d):
        few = head.input_shape[0] <= FEW_CHANNELS
        return "first convolution" if few else "convolution"
    return "dense" if isinstance(head.layer, Dense) else "memory"
