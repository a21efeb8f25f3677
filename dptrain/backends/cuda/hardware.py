"""Properties of all GPUs, and the limits of some models.

Without a GPU, plans are made for `DEFAULT_LIMITS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import Setting

WARP_SIZE = 32
"""Threads of a warp."""

WARP_GROUP_SIZE = 128
"""Threads of a warp group: the four warps that issue ``wgmma`` together."""

DEFAULT_SHARED_BYTES = 48 << 10
"""Shared memory that a block can have on every GPU without an opt-in, in bytes."""

MAX_THREAD_REGISTERS = 255
"""32-bit registers that a thread can have."""

VECTOR_BYTES = 16
"""Bytes of the widest load or store of a thread."""

TF32X3_MARGIN = math.inf
"""fp32 products use tensor cores (3xTF32, ``kernels/mma.cuh``) if their estimated time, multiplied
by this, is lower than that of fused multiply-adds. With 1e-9 all supported products do, with
`math.inf` none. Halo tiles have no estimate for fused multiply-adds to compare with, so they are
used with every finite margin. No estimate has been compared with measurements yet, so the default
is infinity; ``benchmarks.gpu_fp32`` measures 1e-9, 1.15 and infinity."""

MIN_TF32X3_TERMS = 64
"""Terms of a sum from which 3xTF32 has smaller errors than fused multiply-adds (by simulation)."""

ELEMENT_BYTES = {"tf32": 4, "bf16": 2}
"""Bytes of an activation by tensor-core precision. Kernels that need tensor cores have no fp32."""

DEVICES: Mapping[str, DeviceLimits] = MappingProxyType({
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
})  # fmt: skip
"""Limits of GPUs by model, for plans without a GPU. Source: NVIDIA's data sheets and white papers
of the models."""

DEFAULT_LIMITS = DEVICES["H100"]
"""Limits that plans without a GPU are made for."""


def allows_tf32x3(precision: str, limits: DeviceLimits) -> bool:
    """Return whether products in `precision` may be computed by 3xTF32 on a GPU."""
    return precision == "fp32" and limits.has_tensor_floats and math.isfinite(TF32X3_MARGIN)


def limits_of(setting: Setting) -> DeviceLimits:
    """Return the limits that a plan is made for."""
    return setting.limits or DEFAULT_LIMITS
