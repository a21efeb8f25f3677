"""Batch normalisation folded into the convolution before it, in inference.

The convolution runs with other weights and another bias, which a kernel computes before each pass:
that takes the time of reading the weights, and saves reading and writing the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.operation import Operation
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.replica import Arrays, Context, Kernel, ReplacedArrays
from dptrain.network import BatchNorm2d, Conv2d
from dptrain.plan.lowering import Group, Phase


def bind_folded(
    operation: type[Operation[Any]], group: Group, arrays: Arrays, replica: CudaReplica
) -> Mapping[Phase, Kernel]:
    """Return the forward stage of a convolution with its batch normalisation.

    Args:
        operation: computes the convolution.
        group, arrays, replica: see `Operation`.
    """
    convolution, norm = group.nodes[0].name, group.nodes[1].name
    layer = group.nodes[1].layer_of(BatchNorm2d)
    weight = arrays[f"{convolution}.weight"]
    beta = arrays[f"{norm}.bias"]
    convolution_layer = group.head.layer_of(Conv2d)
    bias = arrays[f"{convolution}.bias"] if convolution_layer.bias else beta
    folded = arrays["folded_weight"], arrays["folded_bias"]
    function = replica.device.function("fold_batch_norm.cu", "fold_batch_norm")
    has_bias = np.int32(convolution_layer.bias)
    arguments = (
        weight,
        bias,
        arrays[f"{norm}.weight"],
        beta,
        arrays["running_mean"],
        arrays["running_var"],
        *folded,
        np.float32(layer.epsilon),
        has_bias,
        np.int32(group.head.output_maps[0]),
        np.int32(weight.size),
    )
    replaced = {"weight": folded[0].reshape(weight.shape), "bias": folded[1]}
    own = ReplacedArrays(arrays, replaced)
    convolve = operation(group, own, replica).kernels((Phase.FORWARD,))[Phase.FORWARD]

    def run(context: Context) -> None:
        if context.n:
            launch(function, weight.size, *arguments)
            convolve(context)

    return {Phase.FORWARD: run}
