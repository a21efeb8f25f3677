"""The properties of a GPU on which the selection of kernels depends."""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS = 1 << 16
"""32-bit registers of a multiprocessor."""

RESERVED_BYTES = 1 << 10
"""Shared memory that the driver reserves for each resident block, in bytes."""

MAX_BLOCKS = {75: 16, 86: 16, 87: 16, 89: 24}
"""Resident blocks of a multiprocessor by compute capability, if they are not 32."""

TENSOR_FLOAT_CAPABILITY = 80
"""First compute capability whose tensor cores multiply tf32 and bf16."""


@dataclass(frozen=True)
class DeviceLimits:
    """The properties of a GPU on which the selection of kernels depends.

    Source: CUDA C++ Programming Guide, section "Compute Capabilities".

    Attributes:
        name: of the model.
        capability: compute capability, such as 90 for 9.0.
        multiprocessors: their number.
        shared_bytes: shared memory that a block can have, and all blocks of a multiprocessor
            together, in bytes.
        max_threads: resident threads of a multiprocessor.
    """

    name: str
    capability: int
    multiprocessors: int
    shared_bytes: int
    max_threads: int

    @property
    def has_tensor_floats(self) -> bool:
        """Whether tensor cores multiply tf32 and bf16."""
        return self.capability >= TENSOR_FLOAT_CAPABILITY

    def blocks_per_sm(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Return the resident blocks of a multiprocessor (occupancy); 0 if not even one fits.

        Args:
            threads: of a block.
            registers: 32-bit registers of a thread, which are allocated in groups of eight.
            shared_bytes: shared memory of a block.

        Example:
            >>> DeviceLimits("H100", 90, 132, 227 << 10, 2048).blocks_per_sm(256, 100, 40_000)
            2
        """
        by_registers = REGISTERS // (threads * (-(-registers // 8) * 8))
        by_shared_memory = self.shared_bytes // (shared_bytes + RESERVED_BYTES)
        most = MAX_BLOCKS.get(self.capability, 32)
        return min(by_registers, by_shared_memory, self.max_threads // threads, most)
