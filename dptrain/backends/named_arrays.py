"""Flat arrays by parameter name, in canonical layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.backends.memory import HOST, Memory
from dptrain.errors import UserError
from dptrain.plan.flat import FlatLayout, Slot


class NamedArrays(Mapping[str, NDArray[Any]]):
    """Parameters (or gradients, or optimizer state) by name, in canonical layout.

    Reading an item returns a copy that is read-only; assigning one writes to the replica. A part
    is changed by ``w = parameters[name].copy()``, changes of ``w`` and ``parameters[name] = w``.

    Args:
        layout: of the flat array.
        flat: the flat array.
        memory: where it is allocated.
        on_write: called after each write.

    Example:
        >>> replica.parameters["conv1.weight"].shape            # doctest: +SKIP
        (16, 3, 3, 3)
        >>> replica.parameters["conv1.bias"] = np.zeros(16)     # doctest: +SKIP
    """

    def __init__(
        self,
        layout: FlatLayout,
        flat: NDArray[Any],
        memory: Memory = HOST,
        on_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._layout, self._flat, self._memory = layout, flat, memory
        self._on_write = on_write

    def _slot(self, name: str) -> Slot:
        try:
            return self._layout[name]
        except KeyError:
            names = ", ".join(self) or "none"
            raise KeyError(f"no parameter {name!r}; this network has {names}") from None

    def __getitem__(self, name: str) -> NDArray[Any]:
        slot = self._slot(name)
        return _copy(slot, self._memory.download(self._flat[slot.start : slot.stop]))

    def copies(self) -> dict[str, NDArray[Any]]:
        """Return all items, which a device sends together."""
        return self._named(self._memory.download(self._flat))

    def _named(self, flat: NDArray[Any]) -> dict[str, NDArray[Any]]:
        slots = (self._slot(name) for name in self)
        return {slot.name: _copy(slot, flat[slot.start : slot.stop]) for slot in slots}

    def staging(self) -> NDArray[Any]:
        """Return host memory for `begin_copies`, pinned if they are on a GPU."""
        return self._memory.host_copy(self._flat)

    def begin_copies(self, staging: NDArray[Any]) -> Callable[[], dict[str, NDArray[Any]]]:
        """Start to send all items to the host; on a device, later work does not wait for it.

        Args:
            staging: from `staging`; neither it nor the arrays are written meanwhile.

        Returns:
            A function that waits for the items, in any thread, and returns copies.
        """
        if not len(self):
            return dict
        wait = self._memory.begin_download(self._flat, staging)

        def receive() -> dict[str, NDArray[Any]]:
            wait()
            return self._named(staging)

        return receive

    def __setitem__(self, name: str, value: ArrayLike) -> None:
        slot = self._slot(name)
        array = np.asarray(value)
        if array.shape != slot.parameter.shape:
            raise UserError(
                f"array for {name} has shape {array.shape}; expected {slot.parameter.shape}"
            )

        def write(target: NDArray[Any]) -> None:
            target[...] = array.reshape(slot.storage.view)

        self.fill(name, write)

    def fill(self, name: str, write: Callable[[NDArray[Any]], None]) -> None:
        """Overwrite a parameter by a function that writes to a host array.

        Args:
            name: of the parameter.
            write: fills the array that it receives, in canonical order and of shape
                `Storage.view`. For a replica in host memory this is the parameter itself.
        """
        slot = self._slot(name)
        flat = self._flat[slot.start : slot.stop]
        stored = self._memory.download(flat)
        try:
            write(canonical_view(slot, stored))
            self._memory.upload(flat, stored)
        finally:
            self._on_write()

    @property
    def nbytes(self) -> int:
        """Size of the flat array in bytes, with the padding between the arrays."""
        return int(self._flat.nbytes) if len(self) else 0

    @property
    def flat(self) -> NDArray[Any]:
        """The flat array, in storage layout, to be read."""
        return self._flat

    def like(self) -> NamedArrays:
        """Return zeros of the same layout in the same memory."""
        flat = self._memory.zeros(self._flat.shape, self._flat.dtype.name)
        return NamedArrays(self._layout, flat, self._memory)

    def fits(self, other: NamedArrays) -> bool:
        """Return True if `assign` copies from `other` within one memory."""
        return self._memory is other._memory and self._layout == other._layout

    def assign(self, other: NamedArrays) -> None:
        """Overwrite all arrays by those of `other`, which has the same names.

        On a device, a copy within its memory is enqueued, and the host does not wait for it.
        """
        if not len(self):
            return
        if not self.fits(other):
            for name, values in other.copies().items():
                self[name] = values
            return
        with self.write_flat() as flat:
            self._memory.copy(flat, other._flat)

    @contextmanager
    def write_flat(self) -> Iterator[NDArray[Any]]:
        """Yield the flat array, in storage layout, to be written until the block ends."""
        try:
            yield self._flat
        finally:
            self._on_write()

    def __iter__(self) -> Iterator[str]:
        return (slot.name for slot in sorted(self._layout.slots, key=lambda s: s.node.index))

    def __len__(self) -> int:
        return len(self._layout.slots)

    def __repr__(self) -> str:
        """Return one line per array: its name, shape and type."""
        shapes = {slot.name: slot.parameter.shape for slot in self._layout.slots}
        width = max(map(len, shapes), default=0)
        return "\n".join(f"{name:{width}}  {shapes[name]}  {self._flat.dtype}" for name in self)


def _copy(slot: Slot, stored: NDArray[Any]) -> NDArray[Any]:
    """Return a parameter in canonical layout; a write would have no effect on the replica."""
    canonical: NDArray[Any] = np.array(canonical_view(slot, stored), order="C", copy=True)
    canonical.flags.writeable = False
    return canonical.reshape(slot.parameter.shape)


def canonical_view(slot: Slot, stored: NDArray[Any]) -> NDArray[Any]:
    """Return a view of a parameter in canonical order, of shape `Storage.view`."""
    return np.transpose(stored.reshape(slot.storage.shape), np.argsort(slot.storage.axes))
