"""Convolutions whose operands are gathered from global memory.

All products are implicit GEMMs on ``gemm.cuh``: the im2col matrix is never stored; threads gather
its elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dptrain.backends.cuda.convolution.bound_convolution import BoundConvolution, Case
from dptrain.backends.cuda.convolution.halo.halo_tiles import CHANNEL_MULTIPLE
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, ceil_div, rank_gemm_configs
from dptrain.backends.cuda.device.hardware import ELEMENT_BYTES
from dptrain.backends.cuda.weighted import computed_pixels
from dptrain.backends.replica import Kernel
from dptrain.plan.lowering import Phase

MIN_UNPOOL_ELEMENTS = 1 << 20
"""Elements of dz from which a separate pass unpools dy into dz, instead of every tap of the
convolution. On an H200, a backward-input kernel that unpools took 1.6 times as long as the forward
product of the same size. The bound itself is an estimate."""

GATHER_COST_US, GATHER_LAUNCH_US = 2.5e-6, 1.5
"""Microseconds of gathering kernels per unit of `gemm_tiles.rank_gemm_configs`, and of a launch.
The 16 forward products and input gradients of "Halo tiles, 32 samples" in
benchmarks/results/log/kernels-2026-11.md (H200, 2026-11-21) took 0.8 to 1.6 times as long, 1.17
times in the median; ``tests/unit/cuda/test_gather_cost.py`` computes that."""

WGRAD_GATHER = {"fp32": 1.0, "tf32": 1.4, "bf16": 2.0}
"""Factor of weight gradients, whose operands are both gathered. On an H100, four took 1.2 to 1.6
times as long in tf32, and six 1.5 to 9 times in bf16."""

WIDE_GATHER = {"fp32": 1.0, "tf32": 1.0, "bf16": 1.4}
"""Factor of forward products and input gradients of layers with strides whose channels and filters
are multiples of `halo_tiles.CHANNEL_MULTIPLE`. On an H100, seven forward products of ResNet-18
(32×32) and ResNet-50 took 0.9 to 1.3 times as long as estimated in tf32, six 1.2 to 1.7 times in
bf16."""

STRIDED = {Phase.FORWARD: 1.2, Phase.BACKWARD_WEIGHT: 0.8, Phase.BACKWARD_INPUT: 1.8}
"""Factor of layers with strides. In ResNet-18 (224×224 and 32×32) and ResNet-20, 32 samples in
tf32, 15 forward products took 1.17 times as long as estimated in the median, 25 weight gradients
0.78 times and 31 input gradients 1.8 times (H200, 2026-11-29, ``benchmarks/step/choices.py``). 23
forward products of 1×1 layers took 2.0 times as long, but those of other algorithms 1.4 to 1.7
times. Blocks of an input gradient that no tap reaches write zeros, for example three quarters of a
1×1 layer's."""

UNPOOL_IN_KERNEL, UNPOOL_BYTES_PER_US = 1.6, 2.5e6
"""Factor of a gathering input-gradient kernel that undoes pooling for each tap (64 channels, 2048
samples, H200, 2026-11), and the rate of a separate pass that does it before. The rate is assumed,
half of the memory bandwidth of an H200; it was not measured."""


def gather_us(precision: str, cost: float, *, split: bool = False) -> float:
    """Return the estimated µs of a gathering product.

    Args:
        precision: of the product.
        cost: estimate of `gemm_tiles.rank_gemm_configs`.
        split: whether it is a weight gradient, which can be split along K.
    """
    return GATHER_LAUNCH_US + GATHER_COST_US * cost * (WGRAD_GATHER[precision] if split else 1.0)


def supports(case: Case) -> bool:
    """Return whether the kernels compute a case: every one."""
    return True


def unpools_separately(case: Case) -> bool:
    """Return whether a stage of its own writes the gradient before fused pooling to `dmaps`, if
    these kernels compute the input gradient.
    """
    size = case.samples * math.prod(case.group.head.output_shape)
    return case.pools and "dx" in case.group.gradients and size >= MIN_UNPOOL_ELEMENTS


def product_of(case: Case) -> tuple[int, int, int]:
    """Return rows, columns and terms of a product.

    One more row of a weight gradient is the bias gradient. With strides, an input pixel is reached
    by a part of the taps only, or by none; the terms of an input gradient are then their mean.
    """
    head, n = case.group.head, case.samples
    channels, filters = head.input_maps[0], head.output_maps[0]
    taps = head.parameters[0].size // filters
    if case.phase is Phase.FORWARD:
        return n * computed_pixels(case.group), filters, taps
    if case.phase is Phase.BACKWARD_WEIGHT:
        return taps + 1, filters, n * case.gradient_pixels
    window = case.layer.window
    steps = list(zip(window, case.strides, head.input_maps[1:], strict=True))
    classes = math.prod(min(size, stride) for size, stride, _ in steps)
    pixels = math.prod(ceil_div(size, stride) for _, stride, size in steps)
    return n * pixels * classes, channels, ceil_div(math.prod(window), classes) * filters


def estimate(case: Case) -> Sequence[tuple[float, GemmConfig]]:
    """Return the estimated µs of the configurations."""
    split = case.phase is Phase.BACKWARD_WEIGHT
    ranked = rank_gemm_configs(case.precision, *product_of(case), case.limits, split=split)
    factor, further = _slowdown(case), _unpooling_us(case)
    return [
        (factor * gather_us(case.precision, cost, split=split) + further, config)
        for cost, config in ranked
    ]


def _slowdown(case: Case) -> float:
    """Return the factor of the time of a product, compared with the estimate of its size."""
    strided = STRIDED[case.phase] if case.strides != (1, 1) else 1.0
    if case.phase is Phase.BACKWARD_WEIGHT:
        return strided
    head = case.group.head
    channels, filters = head.input_maps[0], head.output_maps[0]
    wide = channels % CHANNEL_MULTIPLE == filters % CHANNEL_MULTIPLE == 0
    unpools = case.phase is Phase.BACKWARD_INPUT and case.pools and not unpools_separately(case)
    wide_factor = WIDE_GATHER[case.precision] if wide else 1.0
    return strided * wide_factor * (UNPOOL_IN_KERNEL if unpools else 1.0)


def _unpooling_us(case: Case) -> float:
    """Return the µs of a separate stage that unpools the gradient."""
    if case.phase is not Phase.BACKWARD_INPUT or not unpools_separately(case):
        return 0.0
    elements = case.samples * math.prod(case.group.head.output_shape)
    size = 1.25 * ELEMENT_BYTES.get(case.precision, 4) + 0.25
    return GATHER_LAUNCH_US + elements * size / UNPOOL_BYTES_PER_US


def bind(operation: BoundConvolution, phase: Phase, config: GemmConfig) -> Kernel:
    """Return the stage of a product."""
    group, a = operation.group, operation.arrays
    if phase is Phase.FORWARD:
        return operation.forward_product("conv2d_forward", config, computed_pixels(group))
    if phase is Phase.BACKWARD_WEIGHT:
        pixels = operation.gradient_pixels
        return operation.gradient_product(
            "conv2d_backward_weight", config, lambda samples: samples * pixels
        )
    c, h, w = group.head.input_shape
    vertical, horizontal = operation.layer.strides
    rows, classes = ceil_div(h, vertical) * ceil_div(w, horizontal), vertical * horizontal
    return operation.product(
        "conv2d_backward_input.cu", "conv2d_backward_input", config, rows, c,
        (*operation.dz, a["weight"], a["dx"]), operation.geometry,
        epilogue=operation.undone_epilogue, adds="dx" in group.adds, classes=classes,
    )  # fmt: skip
