"""Atomic operations on 64-bit words of memory, given by address, for threads outside the
interpreter.
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

from dptrain.backends.numba.entries import ENTRY, I64

WORD = I64.as_pointer()
VOID = ir.FunctionType(ir.VoidType(), [])


def _codegen(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return Numba's code generator for an intrinsic that needs only the builder."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        result = write(builder, *args)
        return context.get_dummy_value() if result is None else result

    return codegen


@intrinsic
def load(typingctx, address):  # type: ignore[no-untyped-def]
    """Load the word at `address` with acquire ordering."""

    def write(b, address):  # type: ignore[no-untyped-def]
        return b.load_atomic(b.inttoptr(address, WORD), "acquire", 8)

    return types.int64(types.int64), _codegen(write)


@intrinsic
def store(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store a word with release ordering."""

    def write(b, address, value):  # type: ignore[no-untyped-def]
        b.store_atomic(value, b.inttoptr(address, WORD), "release", 8)

    return types.none(types.int64, types.int64), _codegen(write)


@intrinsic
def exchange(typingctx, address, expected, value):  # type: ignore[no-untyped-def]
    """Write `value` if the word is `expected`; return the word's previous value."""

    def write(b, address, expected, value):  # type: ignore[no-untyped-def]
        pointer = b.inttoptr(address, WORD)
        return b.extract_value(b.cmpxchg(pointer, expected, value, "acq_rel", "acquire"), 0)

    return types.int64(types.int64, types.int64, types.int64), _codegen(write)


@intrinsic
def pause(typingctx):  # type: ignore[no-untyped-def]
    """Execute the processor's spin-wait hint, if it has one."""

    def write(b):  # type: ignore[no-untyped-def]
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64", "i386", "i686"):
            b.call(cgutils.get_or_insert_function(b.module, VOID, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            hint = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            function = cgutils.get_or_insert_function(b.module, hint, "llvm.aarch64.hint")
            b.call(function, [ir.IntType(32)(1)])

    return types.none(), _codegen(write)


@intrinsic
def yield_core(typingctx):  # type: ignore[no-untyped-def]
    """Yield this core to another runnable thread."""

    def write(b):  # type: ignore[no-untyped-def]
        name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
        kind = ir.FunctionType(ir.IntType(32), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, name), [])

    return types.none(), _codegen(write)


@intrinsic
def call(typingctx, entry, start, stop, thread, record):  # type: ignore[no-untyped-def]
    """Call a kernel by the address of its entry (`entries`); the result is nonzero if it failed."""

    def write(b, entry, start, stop, thread, record):  # type: ignore[no-untyped-def]
        function = b.inttoptr(entry, ENTRY.as_pointer())
        failed = b.call(function, [start, stop, thread, b.inttoptr(record, WORD)])
        return b.zext(failed, I64)

    return types.int64(*(types.int64,) * 5), _codegen(write)
