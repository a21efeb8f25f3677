"""Gates at which the ranks of a node wait for each other, with the timeout of the job.

A rank arrives at a gate, may work, and then waits until all ranks of its node have arrived; see
`dptrain.native.gates`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.node.activity import Wait
from dptrain.comm.world import World
from dptrain.native.entries import address_of
from dptrain.native.gates import ROUND, request_arrive, request_pass

SPINS = 400_000
"""Polls of a waiting rank that has a core for each thread: at least 13 ms (AMD EPYC, Zen 4). A rank
that yields or sleeps while another program uses its core gets it back after a time slice of some
milliseconds; then it is late for the next gate, where the other ranks yield and sleep."""

OVERSUBSCRIBED_SPINS = 20
"""Polls if threads share cores: a rank that polls takes time slices from those that compute."""

SLEEP_NS = 100_000_000
"""Longest sleep before signals and the deadline are checked."""


class Gates:
    """Gates in memory that the ranks of a node share.

    Args:
        world: the ranks.
        gates: int32 (gates, 64), zeros at first.
    """

    def __init__(self, world: World, gates: NDArray[np.int32]) -> None:
        self._world, self._gates = world, gates
        self._addresses = [address_of(gate) for gate in gates]
        self._requests = request_arrive(), request_pass()
        self._spins = OVERSUBSCRIBED_SPINS if world.is_crowded else SPINS

    @cached_property
    def _arrive(self) -> Callable[[int, int], int]:
        arrive: Callable[[int, int], int] = self._requests[0].result
        return arrive

    @cached_property
    def _pass(self) -> Callable[[int, int, int, int], int]:
        pass_: Callable[[int, int, int, int], int] = self._requests[1].result
        return pass_

    def __len__(self) -> int:
        return len(self._addresses)

    def arrive(self, gate: int) -> int:
        """Arrive at a gate; return the number of its round, for `wait`."""
        return self._arrive(self._addresses[gate], self._world.local_size)

    def is_open(self, gate: int, number: int) -> bool:
        """Return True if all ranks of the node have arrived, without waiting."""
        return bool(self._gates[gate, ROUND // 4] != number)

    def wait(self, gate: int, number: int, what: str) -> None:
        """Wait until all ranks of the node have arrived at a gate.

        Args:
            gate: index of the gate.
            number: from `arrive`.
            what: what the ranks wait for, for the error message.

        Raises:
            RankTimeoutError: the wait took longer than the world's timeout; names `what`.
        """
        address = self._addresses[gate]
        if self._pass(address, number, self._spins, SLEEP_NS):
            return
        wait = Wait(self._world, what)
        while not self._pass(address, number, 0, SLEEP_NS):
            wait.check()
        wait.end()
