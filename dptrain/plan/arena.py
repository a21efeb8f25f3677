"""The arena: one block of memory that holds all buffers of a replica.

Two buffers may overlap if no stage needs both. Buffers are placed by decreasing size, each at the
lowest offset that is free during its whole life. On the networks of the zoo the size of the arena
is within a few percent of the lower bound, the largest sum of buffers that are live at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from dptrain.errors import UserError
from dptrain.memory import format_bytes
from dptrain.network.layers import Shape
from dptrain.plan.lowering import BufferSpec

ALIGNMENT = 256
"""Alignment of buffers in bytes: the granularity of GPU allocations, and a multiple of the vector
width of every CPU."""

MAX_BYTES = 2**62
"""Largest sum of the sizes of all buffers; offsets are 64-bit integers."""


@dataclass(frozen=True)
class Buffer:
    """A buffer in the arena.

    Attributes:
        name: name of the tensor.
        shape: shape in canonical order, batch first; a backend may store the other axes in another
            order.
        dtype: NumPy name of the dtype.
        first, last: indices of the first and the last stage that need the content.
        offset: bytes from the start of the arena.
    """

    name: str
    shape: Shape
    dtype: str
    first: int
    last: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes, without padding."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def assign_offsets(
    specs: Mapping[str, BufferSpec],
    accesses: Sequence[tuple[Sequence[str], Sequence[str]]],
    kept: Set[str] = frozenset(),
    permanent: Set[str] = frozenset(),
) -> tuple[dict[str, Buffer], int]:
    """Assign an offset in the arena to every buffer that a stage reads or writes.

    Args:
        specs: shape and dtype by name.
        accesses: names that each stage reads, and names that it writes.
        kept: names whose content is read after the last stage.
        permanent: names whose content is read in the next step.

    Returns:
        Buffers by name, and the size of the arena in bytes.

    Raises:
        UserError: the buffers are larger than an address space.
    """
    lives: dict[str, list[int]] = {}
    for index, (reads, writes) in enumerate(accesses):
        for name in (*reads, *writes):
            lives.setdefault(name, [index, index])[1] = index
    for name in kept & lives.keys():
        lives[name][1] = len(accesses)
    for name in permanent & lives.keys():
        lives[name] = [0, len(accesses)]
    sizes = {
        name: math.prod(specs[name].shape) * np.dtype(specs[name].dtype).itemsize for name in lives
    }
    if sum(sizes.values()) > MAX_BYTES:
        raise UserError(
            f"the buffers need {format_bytes(sum(sizes.values()))}, more than a computer can "
            "address; use a smaller batch size or network"
        )
    order = sorted(lives, key=lambda name: (-sizes[name], lives[name], name))
    offsets = _first_fit([sizes[name] for name in order], [lives[name] for name in order])
    buffers: dict[str, Buffer] = {}
    for name, offset in zip(order, offsets, strict=True):
        spec, (first, last) = specs[name], lives[name]
        buffers[name] = Buffer(name, spec.shape, spec.dtype, first, last, offset)
    return buffers, max((b.offset + b.nbytes for b in buffers.values()), default=0)


def _first_fit(sizes: Sequence[int], lives: Sequence[Sequence[int]]) -> list[int]:
    """Return the lowest free offset for every buffer, in the given order.

    Args:
        sizes: bytes of each buffer.
        lives: first and last stage of each buffer.
    """
    # Buffers that have an offset already, sorted by it. Arrays, because every pair of buffers is
    # compared, and a network with 20,000 layers has 40,000 buffers.
    starts, ends, firsts, lasts = (np.empty(len(sizes), np.int64) for _ in range(4))
    offsets: list[int] = []
    for count, (size, (first, last)) in enumerate(zip(sizes, lives, strict=True)):
        overlaps = (firsts[:count] <= last) & (lasts[:count] >= first)
        occupied, free_from = starts[:count][overlaps], ends[:count][overlaps]
        # Candidate offsets: 0, and after each occupied range and all that start before it.
        candidates = np.concatenate(([0], np.maximum.accumulate(free_from)))
        fits = np.flatnonzero(candidates[:-1] + size <= occupied)
        offset = int(candidates[fits[0] if len(fits) else -1])
        offsets.append(offset)
        end = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
        position = int(np.searchsorted(starts[:count], offset))
        for array, value in ((starts, offset), (ends, end), (firsts, first), (lasts, last)):
            array[position + 1 : count + 1] = array[position:count]
            array[position] = value
    return offsets
