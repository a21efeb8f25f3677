"""Calls that every rank makes, and that fail with the same `UserError` on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.world import AgreedError, World, pieces
from dptrain.errors import UserError

T = TypeVar("T")


def call_on_all_ranks(world: World, action: Callable[[], T]) -> T:
    """Call `action` on every rank; if it raises `UserError` on one, every rank raises it.

    Args:
        world: the ranks; every rank calls this function.
        action: a function without collective calls.

    Returns:
        This rank's result.

    Raises:
        AgreedError: the error of the lowest rank that failed; the same on every rank.
    """
    error: UserError | None = None
    result: list[T] = []
    try:
        result.append(action())
    except UserError as caught:
        error = caught
    world.agree(error)
    return result[0]


def call_on_rank_zero(world: World, action: Callable[[], T]) -> T | None:
    """Call `action` on rank 0; if it raises `UserError` there, every rank raises it.

    Args:
        world: the ranks; every rank calls this function.
        action: a function without collective calls.

    Returns:
        The result on rank 0; None on the other ranks.

    Raises:
        AgreedError: the error of rank 0; the same on every rank.
    """
    error: str | None = None
    result: T | None = None
    if world.is_rank_zero:
        try:
            result = action()
        except UserError as caught:
            error = str(caught)
    error = world.broadcast_json(error)
    if error is not None:
        raise AgreedError(error)
    return result


def broadcast_arrays(
    world: World, arrays: Mapping[str, NDArray[Any]] | None, root: int
) -> dict[str, NDArray[Any]]:
    """Return the arrays of rank `root` on every rank; all ranks call this.

    Args:
        world: the ranks.
        arrays: of rank `root`; those of other ranks are ignored.
        root: the rank.
    """
    own = dict(arrays or {}) if world.rank == root else {}
    if world.size == 1:
        return own
    received = _empty_arrays(world.all_gather_json(_described(own))[root])
    for name, values in received.items():
        if world.rank == root:
            values[...] = own[name]
        world.broadcast(values, root)
    return received


def exchange_arrays(
    world: World, arrays: Mapping[str, NDArray[Any]], target: int, source: int
) -> dict[str, NDArray[Any]]:
    """Send arrays to rank `target`, and return those of rank `source`; all ranks call this.

    Args:
        world: the ranks.
        arrays: of this rank; the ranks may have different ones.
        target, source: the ranks; rank `source` has this one as its target.
    """
    if world.size == 1:
        return dict(arrays)
    assert world.comm is not None
    received = _empty_arrays(world.all_gather_json(_described(arrays))[source])
    requests = [
        world.comm.Irecv(part, source)
        for values in received.values()
        for part in pieces(values.reshape(-1).view(np.uint8))
    ]
    copies = [np.array(values).reshape(-1).view(np.uint8) for values in arrays.values()]
    requests += [world.comm.Isend(part, target) for copy in copies for part in pieces(copy)]
    for request in requests:
        world.wait(request, f"the arrays of rank {source}")
    return received


def _described(arrays: Mapping[str, NDArray[Any]]) -> dict[str, list[Any]]:
    """Return type and shape of arrays, as JSON values."""
    return {name: [each.dtype.name, list(each.shape)] for name, each in arrays.items()}


def _empty_arrays(described: Mapping[str, list[Any]]) -> dict[str, NDArray[Any]]:
    """Return arrays of these types and shapes."""
    return {name: np.empty(shape, dtype) for name, (dtype, shape) in described.items()}
