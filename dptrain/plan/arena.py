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

from dptrain.network.layers import Shape
from dptrain.plan.lowering import BufferSpec

ALIGNMENT = 256
"""Bytes; a GPU's allocation granularity, and a multiple of every vector width."""


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
    placed: dict[str, Buffer] = {}
    for name in sorted(lives, key=lambda name: (-sizes[name], lives[name], name)):
        first, last = lives[name]
        spans = sorted(
            (other.offset, other.offset + other.nbytes)
            for other in placed.values()
            if other.first <= last and first <= other.last
        )
        offset = 0
        for start, stop in spans:
            if offset + sizes[name] <= start:
                break
            offset = max(offset, -(-stop // ALIGNMENT) * ALIGNMENT)
        spec = specs[name]
        placed[name] = Buffer(name, spec.shape, spec.dtype, first, last, offset)
    return placed, max((b.offset + b.nbytes for b in placed.values()), default=0)
