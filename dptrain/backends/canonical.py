"""Flat arrays in an order that all backends share, to exchange them between different backends."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from dptrain.backends.named_arrays import canonical_view
from dptrain.plan.flat import FlatLayout


class CanonicalOrder:
    """Copies flat arrays to an order that does not depend on the backend, and back.

    Parameters are sorted by name, each in canonical layout, without padding.

    Args:
        layout: of the flat arrays.

    Attributes:
        size: number of elements of all parameters.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._slots = sorted(layout.slots, key=lambda slot: slot.name)
        self.size = sum(slot.parameter.size for slot in self._slots)

    def read(self, flat: NDArray[Any], canonical: NDArray[Any]) -> None:
        """Copy the parameters in a flat array of the backend to `canonical`."""
        self._copy(flat, canonical, writes_flat=False)

    def write(self, flat: NDArray[Any], canonical: NDArray[Any]) -> None:
        """Copy `canonical` to the parameters in a flat array of the backend."""
        self._copy(flat, canonical, writes_flat=True)

    def _copy(self, flat: NDArray[Any], canonical: NDArray[Any], *, writes_flat: bool) -> None:
        start = 0
        for slot in self._slots:
            stored = canonical_view(slot, flat[slot.start : slot.stop])
            named = canonical[start : start + slot.parameter.size].reshape(stored.shape)
            start += slot.parameter.size
            if writes_flat:
                stored[...] = named
            else:
                named[...] = stored
