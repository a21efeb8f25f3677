"""Gates: a group of processes waits until all of them have arrived.

A gate is a piece of shared memory with three 32-bit words: the number of processes that have
arrived in the present round, the number of the round, and the number of processes that sleep. The
last process to arrive resets the first word and increments the round, which is what the others wait
for. It makes a system call only if another process sleeps. Arriving and waiting are separate calls,
so that a process can work in between.
"""

from __future__ import annotations

from dptrain.native.atomics import add32, load32, store32
from dptrain.native.compilation import Request
from dptrain.native.jit import native, request_interpreted
from dptrain.native.waiting import wait_while, wake

ARRIVED, SLEEPERS, ROUND = 0, 4, 128
"""Offsets in bytes of the words in a gate. Waiting processes poll the round, which is in another
pair of cache lines than the words that change when a process arrives."""

GATE_BYTES = 256
"""Size of a gate; its address is a multiple of 128."""


@native
def _arrive(gate: int, processes: int) -> int:
    """Arrive at the gate.

    Args:
        gate: address of the gate.
        processes: number of processes of the group.

    Returns:
        The round before this process arrived, which it passes to `_pass`.
    """
    number: int = load32(gate + ROUND)
    if add32(gate + ARRIVED, 1) + 1 == processes:
        store32(gate + ARRIVED, 0)
        store32(gate + ROUND, number + 1)
        if load32(gate + SLEEPERS) != 0:
            wake(gate + ROUND, processes, 1)
    return number


@native
def _pass(gate: int, number: int, spins: int, timeout_ns: int) -> int:
    """Wait until all processes of the group have arrived.

    Args:
        gate: address of the gate.
        number: the round in which this process arrived, from `_arrive`.
        spins: polls before the process yields its core and then sleeps.
        timeout_ns: longest sleep in nanoseconds.

    Returns:
        1 if all have arrived; 0 if not until the timeout, or until a signal arrived.
    """
    passed: int = wait_while(gate + ROUND, number, spins, 1, 0)
    if passed == 0:
        add32(gate + SLEEPERS, 1)
        passed = wait_while(gate + ROUND, number, 0, 1, timeout_ns)
        add32(gate + SLEEPERS, -1)
    return passed


def request_arrive() -> Request:
    """Request `_arrive` for Python."""
    return request_interpreted(_arrive, 2)


def request_pass() -> Request:
    """Request `_pass` for Python; it releases the interpreter's lock."""
    return request_interpreted(_pass, 4)
