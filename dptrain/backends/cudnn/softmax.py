"""The loss of classes, with softmax and its gradient by cuDNN.

CuDNN computes log softmax, a kernel of ``losses.cu`` sums the loss and writes the gradient with
respect to the logarithms, and cuDNN computes the gradient with respect to the logits.
"""

from __future__ import annotations

import numpy as np

from dptrain.backends.cuda.backend import (
    LOSS_THREADS,
    loss_blocks,
    loss_options,
    sample_lanes,
)
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cudnn.primitives import EACH_SAMPLE, LOG_SOFTMAX
from dptrain.backends.cudnn.replica import CudnnReplica, primitive_calls
from dptrain.backends.replica import Context, Kernel


def bind_softmax_loss(
    replica: CudnnReplica, z: Array, labels: Array, dz: Array | None, sums: Array
) -> Kernel:
    """Return the stage of the loss; see `Backend.bind_loss`.

    Args:
        replica: of the loss.
        z, dz: float32 (N, F), logits and their gradient; dz is None without training.
        labels: int32 (N,).
        sums: receives the loss sums.
    """
    (n, outputs), device = z.shape, replica.device
    rows = n, 1, 1, outputs
    logs, dlogs = device.zeros(rows, "float32"), device.zeros(rows, "float32")
    calls, described = primitive_calls(replica, "Softmax"), (LOG_SOFTMAX, EACH_SAMPLE)
    forward = calls.forward(described, z.reshape(rows), logs)
    backward = None
    if dz is not None:
        backward = calls.backward(described, logs, dlogs, None, dz.reshape(rows))
    lanes = sample_lanes(outputs)
    defines, options = loss_options(replica)
    function = device.function(
        "losses.cu", "negative_log_likelihood", SAMPLE_LANES=lanes, PRECISION=0, **defines
    )
    block_sums = device.zeros((1 + loss_blocks(n * lanes),), "uint64")
    arrays = z, logs, labels, dlogs, sums, replica.numbers, block_sums

    def run(context: Context) -> None:
        forward(context)
        gradient = backward if context.training else None
        function(
            (loss_blocks(context.n * lanes), 1, 1),
            (LOSS_THREADS, 1, 1),
            [
                *arrays,
                np.int32(context.n),
                np.int32(outputs),
                np.float32(context.scale),
                np.int32(gradient is not None),
                *options,
            ],
        )
        if gradient is not None:
            gradient(context)

    return run
