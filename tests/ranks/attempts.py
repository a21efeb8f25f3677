"""Measurements of time, which other programs on the machine can disturb."""

from __future__ import annotations

from collections.abc import Callable

from dptrain.comm.world import World

ATTEMPTS = 3


def repeat_if_disturbed(world: World, measure: Callable[[float], None]) -> None:
    """Call `measure` on every rank until its assertions hold on all, at most `ATTEMPTS` times.

    Its argument is a factor for the delays that it causes on purpose: 1, 4, and then 16. What other
    programs take does not grow with them.

    Assertions come after all communication of `measure`, because the other ranks would wait for a
    rank that left it earlier.
    """
    for attempt in range(1, ATTEMPTS + 1):
        failure = None
        try:
            measure(4.0 ** (attempt - 1))
        except AssertionError as error:
            failure = error
        if not any(world.all_gather_json(failure is not None)):
            return
        if failure is not None and attempt == ATTEMPTS:
            raise failure
