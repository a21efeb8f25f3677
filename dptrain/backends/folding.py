"""Batch normalisation folded into the convolution before it, in inference.

The convolution runs with other weights and another bias. This saves reading and writing the
activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dptrain.network.activations import ReLU
from dptrain.network.layers import Conv2d, Layer
from dptrain.network.normalization import BatchNorm2d
from dptrain.plan.lowering import BufferSpec, Group, GroupNeeds, Phase

FOLDED: Sequence[tuple[type[Layer], ...]] = (Conv2d, BatchNorm2d, ReLU), (Conv2d, BatchNorm2d)
"""Groups of a convolution into which a batch normalisation is folded."""


def folds_batch_norm(group: Group) -> bool:
    """Return whether a group is a convolution with a batch normalisation."""
    return BatchNorm2d in group.kinds[1:]


def folded_needs(needs: GroupNeeds, group: Group, *, keeps: bool) -> GroupNeeds:
    """Return the needs of a convolution and of the kernel that computes its parameters.

    Args:
        needs: of the convolution alone.
        group: the layers.
        keeps: whether the parameters are computed only if they have changed.
    """
    size, filters = group.head.parameters[0].size, group.head.output_maps[0]
    buffers = {
        "folded_weight": BufferSpec((size,), "float32"),
        "folded_bias": BufferSpec((filters,), "float32"),
    }
    forward = needs.phases[Phase.FORWARD]
    phases = {Phase.FORWARD: replace(forward, writes=(*forward.writes, *buffers))}
    kept = (*needs.kept, *buffers) if keeps else needs.kept
    return replace(needs, phases=phases, buffers={**needs.buffers, **buffers}, kept=kept)
