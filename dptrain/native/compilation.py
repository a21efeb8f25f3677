"""Compile what a program will call, together with the other processes of the machine.

Binding a kernel only requests its machine code. `compile_requested` compiles everything that was
requested; at the latest the first launch calls it. The longest compilations begin first. Each is
claimed by its file in the cache, so ranks of a node and jobs that start at the same time divide the
work, and load what the others have compiled. A process with several cores starts helpers
(`compilation_helper`), which do the same. If no cache can be written, each process compiles
everything itself.

Functions are compiled and loaded in a thread of their own, so that the main thread handles signals
at once. LLVM calls functions of Python when it loads one; an exception that a handler raised there
would be printed and lost.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

from dptrain.cache import claim
from dptrain.native.compilation_helper import helpers

POLL_S = 0.01
"""Time between two attempts to load what another process compiles."""
SIGNAL_POLL_S = 0.1
"""Longest time until a signal is handled."""
INTRINSIC_LENGTH = 600
"""What an intrinsic adds to `code_length`."""


class Request:
    """A request for the machine code of a function for some types of arguments.

    Args:
        dispatcher: Numba's dispatcher of the function, with a `KernelCache`.
        signature: types of the arguments.
        find: returns the result from what Numba compiled, for example an address.
    """

    __slots__ = ("__weakref__", "_find", "_result", "dispatcher", "signature")

    def __init__(
        self, dispatcher: Any, signature: tuple[Any, ...], find: Callable[[Any], Any]
    ) -> None:
        self.dispatcher, self.signature, self._find = dispatcher, signature, find
        self._result: Any = None

    @property
    def is_done(self) -> bool:
        """True if the function is compiled or loaded."""
        return self._result is not None

    @property
    def path(self) -> Path | None:
        """The file in the cache; None if nothing is stored."""
        path: Path | None = self.dispatcher._cache.path(self.signature, self.dispatcher.targetctx)
        return path

    @property
    def is_stored(self) -> bool:
        """True if the cache has a file of it, which may be damaged."""
        return self.path is not None and self.path.exists()

    @property
    def result(self) -> Any:
        """What `find` returns; everything that was requested is compiled before."""
        if self._result is None:
            compile_requested()
        return self._result

    def compile(self) -> None:
        """Load the function from the cache, or compile and store it."""
        self.dispatcher.compile(self.signature)
        # While the collector is paused, this releases what the compiler left, and nothing older.
        gc.collect(0)
        self._result = self._find(self.dispatcher.overloads[self.signature])

    def compile_unless_claimed(self) -> bool:
        """Call `compile`; return False if another process is compiling the function."""
        path = self.path
        with contextlib.nullcontext(True) if path is None else claim(path) as is_claimed:
            if is_claimed:
                self.compile()
        return is_claimed

    @property
    def code_length(self) -> int:
        """Length of the bytecode of everything that is compiled: an estimate of the time."""
        return _code_length(self.dispatcher, set())


def _code_length(called: Any, counted: set[Any]) -> int:
    """Return the length of the code of a function and of those that it calls, each once."""
    called = getattr(called, "dispatcher", called)
    if not isinstance(called, _Intrinsic | Dispatcher) or called in counted:
        return 0
    counted.add(called)
    if isinstance(called, _Intrinsic):
        return INTRINSIC_LENGTH
    function = called.py_func
    code, names = function.__code__, function.__globals__
    return len(code.co_code) + sum(
        _code_length(names.get(name), counted) for name in set(_names(code))
    )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


_lock = threading.RLock()
_requests: weakref.WeakValueDictionary[Any, Request] = weakref.WeakValueDictionary()


def request(dispatcher: Any, signature: tuple[Any, ...], find: Callable[[Any], Any]) -> Request:
    """Request the machine code of a function. The request ends with its last reference.

    Args:
        dispatcher, signature, find: see `Request`.
    """
    key = dispatcher, signature
    with _lock:
        found = _requests.get(key)
        if found is None:
            found = _requests[key] = Request(dispatcher, signature, find)
    return found


class Progress:
    """Functions that are being compiled.

    Attributes:
        requests: the functions that were not in the cache.
        stopped: number of those that were stored, and of all, when a signal ended the compilation.
    """

    def __init__(self) -> None:
        self.requests: tuple[Request, ...] = ()
        self.stopped = (0, 0)

    def counts(self) -> tuple[int, int]:
        """Return the number of functions that are compiled, and of all; (0, 0) if none is."""
        if not self.requests:
            return self.stopped
        return sum(each.is_done or each.is_stored for each in self.requests), len(self.requests)

    def end(self, *, is_stopped: bool) -> None:
        """Note that no function is being compiled any more."""
        stored = sum(each.is_stored for each in self.requests)
        self.stopped = (stored, len(self.requests)) if is_stopped else (0, 0)
        self.requests = ()


progress = Progress()


def compile_requested(processes: int = 1) -> None:
    """Compile everything that was requested and is not compiled.

    Args:
        processes: number of processes that compile, including this one.
    """
    with _lock:
        missing = [each for each in list(_requests.values()) if not each.is_done]
        if missing:
            _call_in_thread(_load_stored, missing)
        missing = [each for each in missing if not each.is_done]
        missing.sort(key=lambda each: (-each.code_length, repr(each.signature)))
        if not missing:
            return
        progress.requests, is_stopped = tuple(missing), True
        try:
            with helpers(missing, processes - 1):
                _call_in_thread(_compile_all, missing)
            is_stopped = False
        finally:
            progress.end(is_stopped=is_stopped)


def _call_in_thread(
    function: Callable[[Iterable[Request], threading.Event], None], requests: Iterable[Request]
) -> None:
    """Call `function` in a thread, so that signals are handled at once in the main thread.

    A function of LLVM takes up to some seconds. If a signal's handler raises an exception here, the
    thread ends after the function that it compiles.
    """
    stop, has_ended, errors = threading.Event(), threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            function(requests, stop)
        except BaseException as error:
            errors.append(error)
        finally:
            _running.discard(has_ended)
            has_ended.set()

    _running.add(has_ended)
    threading.Thread(target=run, name="dptrain-compilation", daemon=True).start()
    try:
        # A signal that arrives just before a wait begins does not end the wait.
        while not has_ended.wait(SIGNAL_POLL_S):
            pass
    finally:
        stop.set()
    if errors:
        raise errors[0]


_running: set[threading.Event] = set()


def is_compiling() -> bool:
    """Return True if a function is still being compiled, perhaps after an interruption.

    The process must then end without destructors of C++, which would run next to the compiler.
    """
    return bool(_running)


def _load_stored(requests: Iterable[Request], stop: threading.Event) -> None:
    """Load the functions that the cache has; end early after `stop` is set."""
    for each in requests:
        if each.is_stored and not stop.is_set():
            each.compile()


def _compile_all(requests: Iterable[Request], stop: threading.Event) -> None:
    """Compile, or load what other processes compile; end early after `stop` is set."""
    missing = list(requests)
    with collector_paused():
        while missing and not stop.is_set():
            left = [each for each in missing if stop.is_set() or not each.compile_unless_claimed()]
            if len(left) == len(missing):
                stop.wait(POLL_S)
            missing = left


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which took a tenth of the time of compilations."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
