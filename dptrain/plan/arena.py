"""Where each buffer lies in the one block of memory that a replica's activations share.

Two buffers may overlap when no stage needs both. Placement is greedy by size, the largest first,
each at the lowest offset that is free during its whole life: simple, and within a few percent of
the lower bound (the largest sum of live buffers) on the networks here.
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
"""Bytes; a GPU's allocation granularity, and a multiple of every vector width."""

MAX_BYTES = 2**62
"""Largest sum of the sizes of all buffers; offsets are 64-bit integers."""


@dataclass(frozen=True)
class Buffer:
    """A piece of the arena.

    Attributes:
        shape: canonical order, batch first; a backend may store the axes behind it otherwise.
        first, last: indices of the stages between which its content matters, both included.
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


def place(
    specs: Mapping[str, BufferSpec],
    accesses: Sequence[tuple[Sequence[str], Sequence[str]]],
    outlive: Set[str] = frozenset(),
) -> tuple[dict[str, Buffer], int]:
    """Give every buffer that some stage touches an offset.

    Args:
        specs: shape and dtype by name.
        accesses: for each stage, the names read and written.
        outlive: names whose content is read after the last stage.

    Returns:
        Buffers by name, and the size of the arena in bytes.
    """
    lives: dict[str, list[int]] = {}
    for index, (reads, writes) in enumerate(accesses):
        for name in (*reads, *writes):
            lives.setdefault(name, [index, index])[1] = index
    for name in outlive & lives.keys():
        lives[name][1] = len(accesses)
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
    # Buffers that have an offset, sorted by it; arrays, because a network with thousands of layers
    # compares every pair of buffers.
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
        place = int(np.searchsorted(starts[:count], offset))
        for array, value in ((starts, offset), (ends, end), (firsts, first), (lasts, last)):
            array[place + 1 : count + 1] = array[place:count]
            array[place] = value
    return offsets
