"""Functions in Python that are compiled to machine code: kernels, and what they call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numba

from dptrain.native.compilation import Request, request
from dptrain.native.entries import (
    EntryCompiler,
    InlinedCompiler,
    Record,
    entry_address,
    kind,
)
from dptrain.native.kernel_cache import KernelCache


class KernelError(RuntimeError):
    """A kernel raised an exception, because its arrays do not match."""


class Items(NamedTuple):
    """The items that a call of a kernel computes.

    Attributes:
        start, stop: their range.
        thread: number of the thread, which selects its scratch memory.
    """

    start: int
    stop: int
    thread: int


class Kernel:
    """A function over a range of items, compiled for the types of the arguments that it is bound
    to.

    Args:
        function: the Python function.
        source: its text, if a program wrote it and it is no part of its module.
        maker: name of the function of the module that made it then, and its arguments.

    Attributes:
        py_func: the Python function.
        dispatcher: Numba's dispatcher.
    """

    def __init__(
        self, function: Callable[..., None], source: str = "", maker: tuple[str, ...] = ()
    ) -> None:
        self.py_func = function
        if maker:
            function.__dict__["maker"] = maker
        self.dispatcher = numba.njit(
            error_model="numpy",
            fastmath={"contract"},
            no_cpython_wrapper=True,
            pipeline_class=EntryCompiler,
        )(function)
        self.dispatcher._cache = KernelCache(function, source)

    def request(self, *args: Any) -> Request:
        """Request the machine code for arguments like `args`.

        Args:
            args: arguments after the items; only their types matter.
        """
        signature = tuple(map(kind, (Items(0, 0, 0), *args)))
        return request(self.dispatcher, signature, entry_address)

    def bound_to(self, *args: Any) -> Callable[[int, int, int], None]:
        """Return a function that runs on a range (start, stop, thread) in the calling thread.

        It releases the interpreter's lock. `ThreadPool.bind` is faster for repeated launches.
        """
        address = self.request(*args).result
        entry = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_int64,) * 4)(address)
        record = Record(args)

        def run(start: int, stop: int, thread: int) -> None:
            if entry(start, stop, thread, record.address):
                raise KernelError(f"kernel {self.py_func.__name__} raised an exception")

        return run

    def __call__(self, start: int, stop: int, thread: int, *args: Any) -> None:
        """Run on a range in this thread."""
        self.bound_to(*args)(start, stop, thread)


def kernel(function: Callable[..., None]) -> Kernel:
    """Make `function` a kernel.

    Its first argument is `Items`. The compiler may contract products and sums to fused
    multiply-adds; NaN and infinity keep their meaning.
    """
    return Kernel(function)


def native(function: Callable[..., int]) -> Any:
    """Compile a function of integers that returns an integer; `interpreted` makes it callable."""
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = KernelCache(function)
    return dispatcher


def request_interpreted(dispatcher: Any, arguments: int) -> Request:
    """Request what `interpreted` returns."""
    return request(dispatcher, (numba.int64,) * arguments, lambda compiled: compiled.entry_point)


def interpreted(dispatcher: Any, arguments: int) -> Callable[..., int]:
    """Return a `native` function that Python can call and that releases the interpreter's lock.

    The call does no dispatch by argument types, which saves 0.1 µs.
    """
    call: Callable[..., int] = request_interpreted(dispatcher, arguments).result
    return call


def inlined(function: Callable[..., Any], *, always: bool = False) -> Any:
    """Make `function` callable from kernels; it is compiled as part of each.

    Args:
        function: the function.
        always: whether LLVM must replace each call by the code, however long it is. A loop with a
            call is not vectorised.
    """
    return numba.njit(
        forceinline=always,
        error_model="numpy",
        fastmath={"contract"},
        # It is never called from Python, so two wrappers need not be compiled.
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=InlinedCompiler,
    )(function)
