"""Batch normalisation folded into the convolution before it, in inference.

The convolution runs with other weights and another bias, which are computed when the parameters
have changed. This saves reading and writing the activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.backends.numba.operations import Operation
from dptrain.backends.numba.programs import StageKernel, joined
from dptrain.backends.replica import UNKNOWN_VERSION, Arrays, Context, ReplacedArrays, Replica
from dptrain.native.jit import kernel
from dptrain.native.threads import ThreadPool
from dptrain.network import BatchNorm2d, Conv2d
from dptrain.plan.lowering import Group, Phase


@kernel
def fold(items, convolution, gamma, beta, mean, variance, epsilon, folded):
    """Multiply w (weights of a filter, K) with γ / deviation; the new bias is β + (b − mean) times
    this factor. Items are filters; `convolution` and `folded` are weights and biases.
    """
    (w, b), (folded_w, folded_b) = convolution, folded
    for k in range(items.start, items.stop):
        factor = gamma[k] / math.sqrt(variance[k] + epsilon)
        folded_b[k] = beta[k] + (b[k] - mean[k]) * factor
        for i in range(len(w)):
            folded_w[i, k] = w[i, k] * factor


def bind_folded(
    operation: type[Operation[Any]],
    group: Group,
    arrays: Arrays,
    pool: ThreadPool,
    replica: Replica,
) -> Mapping[Phase, StageKernel]:
    """Return the forward stage of a convolution with its batch normalisation.

    Args:
        operation: computes the convolution.
        group, arrays, pool, replica: see `Operation`.
    """
    convolution, norm = group.nodes[0].name, group.nodes[1].name
    convolution_layer = group.head.layer_of(Conv2d)
    layer = group.nodes[1].layer_of(BatchNorm2d)
    weight, beta = arrays[f"{convolution}.weight"], arrays[f"{norm}.bias"]
    filters = len(beta)
    bias = np.zeros(filters, np.float32)
    if convolution_layer.bias:
        bias = arrays[f"{convolution}.bias"]
    launch = pool.bind(
        fold,
        (weight.reshape(-1, filters), bias),
        arrays[f"{norm}.weight"],
        beta,
        arrays["running_mean"],
        arrays["running_var"],
        layer.epsilon,
        (arrays["folded_weight"].reshape(-1, filters), arrays["folded_bias"]),
    )
    folded_weight = arrays["folded_weight"].reshape(weight.shape)
    own = ReplacedArrays(arrays, {"weight": folded_weight, "bias": arrays["folded_bias"]})
    folded_version: int | None = None

    def prepare(context: Context) -> None:
        nonlocal folded_version
        version = context.parameters_version
        launch.set_items(filters)
        if version != UNKNOWN_VERSION:
            if version != folded_version:
                launch.run()
            launch.set_items(0)
        folded_version = version

    convolve = operation(group, own, pool, replica).kernels((Phase.FORWARD,))[Phase.FORWARD]
    return {Phase.FORWARD: joined(StageKernel((launch,), prepare), convolve)}
