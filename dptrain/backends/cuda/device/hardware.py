"""Properties of all GPUs, and the limits of some models.

Without a GPU, plans are made for `DEFAULT_LIMITS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import Setting

WARP_SIZE = 32
"""Threads of a warp."""

WARP_GROUP_SIZE = 128
"""Threads of a warp group: the four warps that issue ``wgmma`` together."""

WGMMA_CAPABILITY = 90
"""The compute capability whose GPUs have ``wgmma``."""

DEFAULT_SHARED_BYTES = 48 << 10
"""Shared memory that a block can have on every GPU without an opt-in, in bytes."""

MAX_THREAD_REGISTERS = 255
"""32-bit registers that a thread can have."""

VECTOR_BYTES = 16
"""Bytes of the widest load or store of a thread."""

TF32X3_MARGIN = 1.15
"""fp32 products use tensor cores (3xTF32, ``headers/mma.cuh``) if their estimated time, multiplied
by this, is lower than that of fused multiply-adds. With 1e-9 all supported products do, with
`math.inf` none. Halo tiles have no estimate for fused multiply-adds to compare with, so they are
used with every finite margin. On an H100 (model0, cifar, solar and a VGG-like network of 64 to 256
channels, batch sizes 32, 256 and 2048), stages take 0.68 to 0.86 of their time with fused
multiply-adds in sum, and at worst 1.12 times as long."""

TF32X3_CAPABILITIES = frozenset({80, 90})
"""Compute capabilities of GPUs whose ``mma.sync`` multiplies tf32 more than four times as fast as
CUDA cores multiply float32, so that three products of parts are faster than one. On consumer GPUs
the ratio is 1 to 2; newer data-centre GPUs have other instructions. Source: NVIDIA's white papers
of the architectures."""

TF32X3_WGMMA = True
"""Whether 3xTF32 of convolutions uses ``wgmma``, and weight gradients halo tiles, on GPUs that have
them. On an H100 (a VGG-like network and cifar, batch size 256), each stage of a convolution takes
0.29 to 0.67 of its time with ``mma.sync`` and 0.26 to 0.60 of that with fused multiply-adds if all
three exist (CUDA 13, November 2026)."""

MIN_TF32X3_TERMS = 64
"""Terms of a sum from which 3xTF32 has smaller errors than fused multiply-adds (by simulation)."""

CYCLES_PER_US = 1790
"""Of the H200 that estimates of convolutions were fitted to (2026-11)."""

ELEMENT_BYTES = {"tf32": 4, "bf16": 2}
"""Bytes of an activation by tensor-core precision. Kernels that need tensor cores have no fp32."""

DEVICES: Mapping[str, DeviceLimits] = MappingProxyType(
    {
        limits.name: limits
        for limits in (
            DeviceLimits("V100", 70, 80, 96 << 10, 2048),
            DeviceLimits("T4", 75, 40, 64 << 10, 1024),
            DeviceLimits("A100", 80, 108, 163 << 10, 2048),
            DeviceLimits("RTX 3090", 86, 82, 99 << 10, 1536),
            DeviceLimits("RTX 4090", 89, 128, 99 << 10, 1536),
            DeviceLimits("L40S", 89, 142, 99 << 10, 1536),
            DeviceLimits("H100", 90, 132, 227 << 10, 2048),
            DeviceLimits("H200", 90, 132, 227 << 10, 2048),
            DeviceLimits("B200", 100, 148, 227 << 10, 2048),
        )
    }
)
"""Limits of GPUs by model, for plans without a GPU. Source: NVIDIA's data sheets and white papers
of the models."""

DEFAULT_LIMITS = DEVICES["H100"]
"""Limits that plans without a GPU are made for."""


def allows_tf32x3(precision: str, limits: DeviceLimits) -> bool:
    """Return whether products in `precision` may be computed by 3xTF32 on a GPU."""
    fast = limits.capability in TF32X3_CAPABILITIES
    return precision == "fp32" and fast and math.isfinite(TF32X3_MARGIN)


def splits_in_shared_memory(precision: str, limits: DeviceLimits) -> bool:
    """Return whether 3xTF32 of convolutions uses ``wgmma``, which reads split operands."""
    fast = limits.capability == WGMMA_CAPABILITY
    return allows_tf32x3(precision, limits) and fast and TF32X3_WGMMA


def limits_of(setting: Setting) -> DeviceLimits:
    """Return the limits that a plan is made for."""
    return setting.limits or DEFAULT_LIMITS


def limits_of_sums(setting: Setting) -> DeviceLimits:
    """Return the limits for sums over samples: with micro-shards, each has a share of the GPU."""
    limits, shards = limits_of(setting), setting.kernel_shards
    if shards == 1:
        return limits
    return replace(limits, multiprocessors=max(limits.multiprocessors // shards, 1))
