"""Waiting for a 32-bit word to change, outside the interpreter.

A wait has three phases: it polls the word with the processor's spin-wait hint, then it yields its
core after every poll, then it sleeps in the kernel until another thread or process wakes it. On
Linux it sleeps on a futex (futex(2)). Other systems have no futex with a stable interface; there it
polls between short sleeps.

A wait that yields to another program gets its core back after that program's time slice, some
milliseconds later. With yields among the first polls, a sum over 2 ranks took 2 to 3 ms while other
programs used the same cores, and without them 0.2 to 0.3 ms (Intel Xeon, 2 cores).

The thread that changes the word stores it first and calls `wake` afterwards. `wake` is a system
call on Linux. To save it when no thread sleeps, count the sleepers in a second word: the sleeper
adds 1 before it calls `wait_while`, and the waker reads the count after it has changed the word.
The operations of `atomics` on 32-bit words are sequentially consistent, so one of both sees the
other.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from dptrain.native.atomics import I32, load32, operation, pause, yield_core
from dptrain.native.entries import I64
from dptrain.native.jit import inlined, interpreted, native

PROCESS_PRIVATE = 128
"""FUTEX_PRIVATE_FLAG: the word is not shared with other processes, so the lookup is faster."""
WAIT, WAKE = 0, 1
"""FUTEX_WAIT and FUTEX_WAKE."""
YIELDS = 8
"""Polls that yield the core before a wait sleeps. Measured: 0.3 to 0.5 µs each on an idle core."""
LONGEST_SLEEP_US = 1000
"""Longest sleep between two polls on systems without a futex."""


def _futex_number() -> int:
    """Return the number of the system call `futex`; 0 if it is not available or not known."""
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return 0
    return {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)


FUTEX = _futex_number()


@operation
def _futex_wait(b, address, value, shared, timeout_ns):
    """Sleep while the word is `value`, until a wake, a signal or the end of the timeout."""
    time = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
    for i, part in enumerate((b.sdiv, b.srem)):
        b.store(part(timeout_ns, I64(10**9)), b.gep(time, [I32(0), I32(i)]))
    operation = _operation(b, WAIT, shared)
    return _syscall(b, address, operation, value, b.ptrtoint(time, I64))


@operation
def _futex_wake(b, address, count, shared):
    """Wake up to `count` sleepers; return how many were woken."""
    return _syscall(b, address, _operation(b, WAKE, shared), count, I64(0))


def _operation(b: ir.IRBuilder, operation: int, shared: ir.Value) -> ir.Value:
    is_shared = b.icmp_signed("!=", shared, I64(0))
    return b.select(is_shared, I64(operation), I64(operation | PROCESS_PRIVATE))


def _syscall(b: ir.IRBuilder, *args: ir.Value) -> ir.Value:
    function_type = ir.FunctionType(I64, [I64], var_arg=True)
    function = cgutils.get_or_insert_function(b.module, function_type, "syscall")
    return b.call(function, [I64(FUTEX), *args])


@operation
def _sleep_us(b, time_us) -> None:
    """Sleep in the kernel; Windows rounds the time up to a millisecond."""
    time = b.trunc(time_us, I32)
    if sys.platform == "win32":
        result, name, time = ir.VoidType(), "Sleep", b.udiv(b.add(time, I32(999)), I32(1000))
    else:
        result, name = I32, "usleep"
    function_type = ir.FunctionType(result, [I32])
    b.call(cgutils.get_or_insert_function(b.module, function_type, name), [time])


@inlined
def sleep_while(address, value, timeout_ns):
    """Poll the word between sleeps that grow to `LONGEST_SLEEP_US`, on systems without a futex."""
    slept, sleep = 0, 20
    while load32(address) == value and slept * 1000 < timeout_ns:
        _sleep_us(sleep)
        slept += sleep
        sleep = min(2 * sleep, LONGEST_SLEEP_US)


@inlined
def wait_while(address, value, spins, shared, timeout_ns):
    """Wait while the 32-bit word at `address` is `value`.

    Args:
        address: address of the word, a multiple of 4.
        value: signed value of the word.
        spins: polls with the spin-wait hint before the wait yields and then sleeps.
        shared: 1 if other processes change the word, else 0.
        timeout_ns: longest sleep in nanoseconds; with 0 the wait does not sleep.

    Returns:
        1 if the word changed; 0 if it did not until the timeout, or until a signal arrived.
    """
    for _ in range(spins):
        if load32(address) != value:
            return 1
        pause()
    for _ in range(YIELDS):
        if load32(address) != value:
            return 1
        yield_core()
    if timeout_ns > 0:
        if FUTEX:
            _futex_wait(address, value, shared, timeout_ns)
        else:
            sleep_while(address, value, timeout_ns)
    return 1 if load32(address) != value else 0


@inlined
def wake(address, count, shared):
    """Wake up to `count` threads that wait at `address`, after the word was changed.

    Args:
        address: address of the word.
        count: largest number of threads to wake.
        shared: the value that the waiting threads pass to `wait_while`.

    Returns:
        The number of sleepers that were woken; 0 on systems without a futex, where sleepers poll.
    """
    if FUTEX:
        return _futex_wake(address, count, shared)
    return 0


@native
def _wait_while(address: int, value: int, spins: int, shared: int, timeout_ns: int) -> int:
    result: int = wait_while(address, value, spins, shared, timeout_ns)
    return result


@native
def _wake(address: int, count: int, shared: int) -> int:
    result: int = wake(address, count, shared)
    return result


@functools.cache
def interpreted_wait_while() -> Callable[[int, int, int, int, int], int]:
    """Return `wait_while` for Python; it releases the interpreter's lock, and signals end it."""
    return interpreted(_wait_while, 5)


@functools.cache
def interpreted_wake() -> Callable[[int, int, int], int]:
    """Return `wake` for Python."""
    return interpreted(_wake, 3)
