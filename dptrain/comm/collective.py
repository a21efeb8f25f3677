"""Calls that every rank makes, and that fail with the same `UserError` on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dptrain.comm.world import AgreedError, World
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
