"""Atomic operations on words of memory, given by address, for threads outside the interpreter.

Words have 64 bits; the functions whose names end in 32 take words of 32 bits, on which threads can
wait (`waiting`).
"""

from __future__ import annotations

import functools
import inspect
import platform
import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.native.entries import ENTRY, I64

I32 = ir.IntType(32)
WORD, WORD32 = I64.as_pointer(), I32.as_pointer()
VOID = ir.FunctionType(ir.VoidType(), [])


def operation(write: Callable[..., Any]) -> Any:
    """Return the intrinsic that a function builds.

    Args:
        write: receives the builder and words of 64 bits; it returns a word, or nothing if its
            annotation is None.
    """
    count = len(inspect.signature(write).parameters) - 1
    result = types.none if write.__annotations__.get("return") == "None" else types.int64
    signature = result(*(types.int64,) * count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        word = write(builder, *args)
        return context.get_dummy_value() if word is None else word

    @functools.wraps(write)
    def typed(typingctx: Any, *words: Any) -> Any:
        return signature, codegen

    return intrinsic(typed)


@operation
def load(b, address):
    """Load the word at `address` with acquire ordering."""
    return b.load_atomic(b.inttoptr(address, WORD), "acquire", 8)


@operation
def store(b, address, value) -> None:
    """Store a word with release ordering."""
    b.store_atomic(value, b.inttoptr(address, WORD), "release", 8)


@operation
def exchange(b, address, expected, value):
    """Write `value` if the word is `expected`; return the word's previous value."""
    pointer = b.inttoptr(address, WORD)
    return b.extract_value(b.cmpxchg(pointer, expected, value, "acq_rel", "acquire"), 0)


@operation
def load32(b, address):
    """Load the signed 32-bit word at `address`; sequentially consistent."""
    return b.sext(b.load_atomic(b.inttoptr(address, WORD32), "seq_cst", 4), I64)


@operation
def store32(b, address, value) -> None:
    """Store a 32-bit word; sequentially consistent."""
    b.store_atomic(b.trunc(value, I32), b.inttoptr(address, WORD32), "seq_cst", 4)


@operation
def release32(b, address, value) -> None:
    """Store a 32-bit word with release ordering.

    On x86, several such stores overlap; those of `store32` wait for each other.
    """
    b.store_atomic(b.trunc(value, I32), b.inttoptr(address, WORD32), "release", 4)


@operation
def fence(b) -> None:
    """Order all earlier stores before all later loads."""
    b.fence("seq_cst")


@operation
def add32(b, address, value):
    """Add to a 32-bit word, modulo 2^32; return its previous value. Sequentially consistent."""
    pointer = b.inttoptr(address, WORD32)
    return b.sext(b.atomic_rmw("add", pointer, b.trunc(value, I32), "seq_cst"), I64)


@operation
def exchange32(b, address, expected, value):
    """Write `value` if the 32-bit word is `expected`; return its previous value. Sequentially
    consistent.
    """
    words = b.trunc(expected, I32), b.trunc(value, I32)
    pair = b.cmpxchg(b.inttoptr(address, WORD32), *words, "seq_cst", "seq_cst")
    return b.sext(b.extract_value(pair, 0), I64)


@operation
def pause(b) -> None:
    """Execute the processor's spin-wait hint, if it has one."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64", "i386", "i686"):
        b.call(cgutils.get_or_insert_function(b.module, VOID, "llvm.x86.sse2.pause"), [])
    elif machine in ("aarch64", "arm64"):
        hint = ir.FunctionType(ir.VoidType(), [I32])
        function = cgutils.get_or_insert_function(b.module, hint, "llvm.aarch64.hint")
        b.call(function, [I32(1)])


@operation
def yield_core(b) -> None:
    """Yield this core to another runnable thread."""
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
    kind = ir.FunctionType(I32, [])
    b.call(cgutils.get_or_insert_function(b.module, kind, name), [])


@operation
def call(b, entry, start, stop, thread, record):
    """Call a kernel by the address of its entry (`entries`); the result is nonzero if it failed."""
    function = b.inttoptr(entry, ENTRY.as_pointer())
    failed = b.call(function, [start, stop, thread, b.inttoptr(record, WORD)])
    return b.zext(failed, I64)
