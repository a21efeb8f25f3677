"""Limits of the GPU that tile configurations are planned for: an H200 (compute capability 9.0).

Plans are made without a GPU, so the cost models use these constants. On a device whose blocks have
less shared memory (`Device.shared_bytes`), a smaller configuration is bound.
"""

from __future__ import annotations

NUM_MULTIPROCESSORS = 132

WARP_SIZE = 32
"""Threads of a warp."""

WARP_GROUP_SIZE = 128
"""Threads of a warp group: the four warps that issue ``wgmma`` together."""

SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor that its blocks can use, in bytes."""

RESERVED_BYTES = 1 << 10
"""Shared memory that the driver reserves for each resident block, in bytes."""

DEFAULT_SHARED_BYTES = 48 << 10
"""Shared memory that a block can have on every GPU without an opt-in, in bytes."""

REGISTERS = 1 << 16
"""32-bit registers of a multiprocessor."""

MAX_THREAD_REGISTERS = 255
"""32-bit registers that a thread can have."""

VECTOR_BYTES = 16
"""Bytes of the widest load or store of a thread."""

ELEMENT_BYTES = {"tf32": 4, "bf16": 2}
"""Bytes of an activation by tensor-core precision. Kernels that need tensor cores have no fp32."""
