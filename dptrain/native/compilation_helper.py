"""Processes that compile requested functions into the cache.

A helper receives names and signatures as JSON, on its standard input. It compiles what no other
process has claimed, and ends. It also ends when its parent does, which closes the input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from numba import types

if TYPE_CHECKING:
    from dptrain.native.compilation import Request

SMALLEST = 15_000
"""Smallest sum of `Request.code_length` for a helper: about 6 seconds. It takes one to start."""
_PROGRAM = """
import json, sys
work = json.loads(sys.stdin.readline())
sys.path[:] = work["path"]
from dptrain.native.compilation_helper import help_to_compile
help_to_compile(work["requests"])
"""


@contextlib.contextmanager
def helpers(requests: Sequence[Request], number: int) -> Iterator[None]:
    """Let up to `number` processes help to compile, until the block ends."""
    described = [each for each in map(_describe, requests) if each is not None]
    number = min(number, sum(each.code_length for each in requests) // SMALLEST)
    if not described or number < 1 or any(each.path is None for each in requests):
        yield
        return
    work = json.dumps({"path": sys.path, "requests": described}) + "\n"
    processes = list[subprocess.Popen[bytes]]()
    try:
        with contextlib.suppress(OSError):  # Without them, this process compiles everything.
            for _ in range(number):
                process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                processes.append(process)
                assert process.stdin is not None
                process.stdin.write(work.encode())
                process.stdin.flush()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _describe(request: Request) -> Any:
    """Return the name of a function and its signature; None if a helper cannot import it."""
    function = request.dispatcher.py_func
    if function.__module__ == "__main__":
        return None
    try:
        signature = [_describe_type(kind) for kind in request.signature]
    except TypeError:
        return None
    name, *arguments = getattr(function, "maker", (function.__qualname__,))
    return function.__module__, name, arguments, signature


def _describe_type(kind: Any) -> Any:
    """Return the description from which `_type_of` makes the type of an argument.

    Raises:
        TypeError: it is none of the types that kernels have.
    """
    if isinstance(kind, types.Array):
        return [str(kind.dtype), kind.ndim, kind.layout, not kind.mutable, kind.aligned]
    if isinstance(kind, types.BaseTuple):
        name = getattr(kind, "instance_class", tuple)
        return [[name.__module__, name.__qualname__], *map(_describe_type, kind)]
    if isinstance(kind, types.Number | types.Boolean):
        return str(kind)
    raise TypeError(f"{kind} has no description")


def _type_of(description: Any) -> Any:
    """Return the type of an argument, see `_describe_type`."""
    if isinstance(description, str):
        return types.boolean if description == "bool" else getattr(types, description)
    if isinstance(description[0], str):
        dtype, ndim, layout, readonly, aligned = description
        return types.Array(_type_of(dtype), ndim, layout, readonly=readonly, aligned=aligned)
    (module, name), *elements = description
    kinds = tuple(map(_type_of, elements))
    if module == "builtins":
        return types.BaseTuple.from_types(kinds)
    return types.BaseTuple.from_types(kinds, getattr(importlib.import_module(module), name))


def help_to_compile(work: Sequence[Any]) -> None:
    """Compile functions that no other process has claimed, in this order.

    Args:
        work: names of the module and of the function, and the signature, of each. If there are
            arguments, the function makes the one to compile.
    """
    from dptrain.native.compilation import collector_paused, request

    threading.Thread(target=_end_with_parent, daemon=True).start()
    with collector_paused():
        for module, name, arguments, signature in work:
            found: Any = getattr(importlib.import_module(module), name)
            found = found(*arguments) if arguments else found
            kinds = tuple(map(_type_of, signature))
            dispatcher = getattr(found, "dispatcher", found)
            wanted = request(dispatcher, kinds, lambda compiled: compiled)
            if not wanted.is_stored:
                wanted.compile_unless_claimed()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
