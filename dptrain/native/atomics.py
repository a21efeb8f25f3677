"""Atomic operations on words of memory, given by address, for threads outside the interpreter.

Words have 64 bits; the functions whose names end in 32 take words of 32 bits, on which threads can
wait (`waiting`).
"""

from __future__ import annotations

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


def codegen_of(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return Numba's code generator for an intrinsic that needs only the builder."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        result = write(builder, *args)
        return context.get_dummy_value() if result is None else result

    return codegen


@intrinsic
def load(typingctx, address):
    """Load the word at `address` with acquire ordering."""

    def write(b, address):
        return b.load_atomic(b.inttoptr(address, WORD), "acquire", 8)

    return types.int64(types.int64), codegen_of(write)


@intrinsic
def store(typingctx, address, value):
    """Store a word with release ordering."""

    def write(b, address, value):
        b.store_atomic(value, b.inttoptr(address, WORD), "release", 8)

    return types.none(types.int64, types.int64), codegen_of(write)


@intrinsic
def exchange(typingctx, address, expected, value):
    """Write `value` if the word is `expected`; return the word's previous value."""

    def write(b, address, expected, value):
        pointer = b.inttoptr(address, WORD)
        return b.extract_value(b.cmpxchg(pointer, expected, value, "acq_rel", "acquire"), 0)

    return types.int64(types.int64, types.int64, types.int64), codegen_of(write)


@intrinsic
def load32(typingctx, address):
    """Load the signed 32-bit word at `address`; sequentially consistent."""

    def write(b, address):
        return b.sext(b.load_atomic(b.inttoptr(address, WORD32), "seq_cst", 4), I64)

    return types.int64(types.int64), codegen_of(write)


@intrinsic
def store32(typingctx, address, value):
    """Store a 32-bit word; sequentially consistent."""

    def write(b, address, value):
        b.store_atomic(b.trunc(value, I32), b.inttoptr(address, WORD32), "seq_cst", 4)

    return types.none(types.int64, types.int64), codegen_of(write)


@intrinsic
def release32(typingctx, address, value):
    """Store a 32-bit word with release ordering.

    On x86, several such stores overlap; those of `store32` wait for each other.
    """

    def write(b, address, value):
        b.store_atomic(b.trunc(value, I32), b.inttoptr(address, WORD32), "release", 4)

    return types.none(types.int64, types.int64), codegen_of(write)


@intrinsic
def fence(typingctx):
    """Order all earlier stores before all later loads."""

    def write(b):
        b.fence("seq_cst")

    return types.none(), codegen_of(write)


@intrinsic
def add32(typingctx, address, value):
    """Add to a 32-bit word, modulo 2^32; return its previous value. Sequentially consistent."""

    def write(b, address, value):
        pointer = b.inttoptr(address, WORD32)
        return b.sext(b.atomic_rmw("add", pointer, b.trunc(value, I32), "seq_cst"), I64)

    return types.int64(types.int64, types.int64), codegen_of(write)


@intrinsic
def exchange32(typingctx, address, expected, value):
    """Write `value` if the 32-bit word is `expected`; return its previous value. Sequentially
    consistent.
    """

    def write(b, address, expected, value):
        words = b.trunc(expected, I32), b.trunc(value, I32)
        pair = b.cmpxchg(b.inttoptr(address, WORD32), *words, "seq_cst", "seq_cst")
        return b.sext(b.extract_value(pair, 0), I64)

    return types.int64(types.int64, types.int64, types.int64), codegen_of(write)


@intrinsic
def pause(typingctx):
    """Execute the processor's spin-wait hint, if it has one."""

    def write(b):
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64", "i386", "i686"):
            b.call(cgutils.get_or_insert_function(b.module, VOID, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            hint = ir.FunctionType(ir.VoidType(), [I32])
            function = cgutils.get_or_insert_function(b.module, hint, "llvm.aarch64.hint")
            b.call(function, [I32(1)])

    return types.none(), codegen_of(write)


@intrinsic
def yield_core(typingctx):
    """Yield this core to another runnable thread."""

    def write(b):
        name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
        kind = ir.FunctionType(I32, [])
        b.call(cgutils.get_or_insert_function(b.module, kind, name), [])

    return types.none(), codegen_of(write)


@intrinsic
def call(typingctx, entry, start, stop, thread, record):
    """Call a kernel by the address of its entry (`entries`); the result is nonzero if it failed."""

    def write(b, entry, start, stop, thread, record):
        function = b.inttoptr(entry, ENTRY.as_pointer())
        failed = b.call(function, [start, stop, thread, b.inttoptr(record, WORD)])
        return b.zext(failed, I64)

    return types.int64(*(types.int64,) * 5), codegen_of(write)
