"""The sums of the gradients of micro-shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from dptrain.backends.replica import Arrays
from dptrain.plan.shards import add_in_order


def write_gradient_slots(arrays: Arrays, name: str, gradients: Sequence[NDArray[Any]]) -> None:
    """Write the sum of each gradient slot. Without micro-shards, there is one slot.

    Args:
        arrays: of the group.
        name: local name of the gradient, such as ``dweight``.
        gradients: of each micro-shard; are overwritten.
    """
    pitch = arrays["gradient_slots"].shape[1]
    for slot, total in enumerate(add_in_order(gradients, arrays["merges"])):
        flat = arrays[f"{name}_slots"][slot * pitch :]
        flat[: total.size] = total.reshape(-1)
