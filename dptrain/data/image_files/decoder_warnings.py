"""Warnings of a decoder, for the file that caused them, while other threads decode other files.

`warnings.catch_warnings` changes the whole process, so that threads would lose or mix up warnings.
libtiff prints messages on the standard error stream; they are omitted while a file is decoded,
because Pillow raises an error for each one that matters.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_lock = threading.Lock()
_own = threading.local()
_users = 0
_filters: warnings.catch_warnings[Any] | None = None
_show_others: Any = None
_handlers: dict[str, int | None] = {}
_HANDLERS = ("TIFFSetErrorHandler", "TIFFSetWarningHandler")
_silent = logging.NullHandler()
"""Without a handler, Python prints the errors that Pillow logs before it raises them."""


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Return the list to which the texts of this thread's warnings are added.

    Warnings of other threads are shown as before.
    """
    messages: list[str] = []
    _enter()
    _own.messages = messages
    try:
        yield messages
    finally:
        _own.messages = None
        _leave()


def _enter() -> None:
    global _users, _filters, _show_others
    with _lock:
        _users += 1
        if _users == 1:
            _filters = warnings.catch_warnings()
            _filters.__enter__()
            _show_others = warnings.showwarning
            warnings.simplefilter("always")
            warnings.showwarning = _receive
            _handlers.update((name, _set_handler(name, None)) for name in _HANDLERS)
            logging.getLogger("PIL").addHandler(_silent)


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            assert _filters is not None
            _filters.__exit__(None, None, None)
            for name in _HANDLERS:
                _set_handler(name, _handlers[name])
            logging.getLogger("PIL").removeHandler(_silent)


def _receive(message: Warning | str, *arguments: Any, **options: Any) -> None:
    messages: list[str] | None = getattr(_own, "messages", None)
    if messages is None:
        _show_others(message, *arguments, **options)
    else:
        messages.append(str(message))


def _set_handler(name: str, handler: int | None) -> int | None:
    """Replace a function of libtiff that prints messages; None prints nothing."""
    library = _libtiff()
    if library is None:
        return None
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
    previous: int | None = function(handler)
    return previous


@cache
def _libtiff() -> ctypes.CDLL | None:
    """Return the library that Pillow has loaded; None if it is not found."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        names = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libtiff" in line}
        return ctypes.CDLL(min(names)) if names else None
    except OSError:
        return None
