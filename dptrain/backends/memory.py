"""Memory of a replica: aligned for vectors, and seen by name in the layouts that users know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.errors import UserError
from dptrain.plan.flat import FlatLayout, Slot


def aligned_zeros(size: int, dtype: str) -> NDArray[Any]:
    """Zeros that start on a cache line, as vector kernels want it; NumPy aligns to 16 bytes."""
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(dtype)


class NamedArrays(Mapping[str, NDArray[Any]]):
    """Parameters (or gradients, or optimizer state) by name, in canonical layout.

    Reading gives a copy; assigning writes through to the replica.

    Example:
        >>> replica.parameters["conv1.weight"].shape            # doctest: +SKIP
        (16, 3, 3, 3)
        >>> replica.parameters["conv1.bias"] = np.zeros(16)     # doctest: +SKIP
    """

    def __init__(self, layout: FlatLayout, flat: NDArray[Any]) -> None:
        self._layout, self._flat = layout, flat

    def _slot(self, name: str) -> Slot:
        try:
            return self._layout[name]
        except KeyError:
            names = ", ".join(self) or "none"
            raise KeyError(f"no parameter {name!r}; this network has {names}") from None

    def __getitem__(self, name: str) -> NDArray[Any]:
        canonical: NDArray[Any] = np.array(self.view(name), order="C", copy=True)
        return canonical.reshape(self._slot(name).parameter.shape)

    def __setitem__(self, name: str, value: ArrayLike) -> None:
        slot = self._slot(name)
        array = np.asarray(value)
        if array.shape != slot.parameter.shape:
            raise UserError(f"{name} has shape {slot.parameter.shape}, got {array.shape}")
        self.view(name)[...] = array.reshape(slot.storage.view)

    def view(self, name: str) -> NDArray[Any]:
        """The memory itself in canonical order, of shape `Storage.view`: no copy."""
        slot = self._slot(name)
        stored = self._flat[slot.start : slot.stop].reshape(slot.storage.shape)
        return np.transpose(stored, np.argsort(slot.storage.axes))

    def __iter__(self) -> Iterator[str]:
        return (slot.name for slot in sorted(self._layout.slots, key=lambda s: s.node.index))

    def __len__(self) -> int:
        return len(self._layout.slots)
