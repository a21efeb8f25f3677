"""Compilation of kernel sources on several threads.

A network needs 15 to 40 sources, each of which compiles in 0.4 to 1.5 s. NVRTC releases the
interpreter's lock and compiles several sources at the same time, so binding the stages of a plan
only requests them: 22 sources took 14.7 s on one core and 7.4 s on two (cifar, bf16, CUDA 12.9).
The ranks of a node, which need the same sources, share the work: a rank does not compile what
another one is compiling, and reads it from the cache later. The threads end when nothing is left to
compile, so that a process may build any number of replicas.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from dptrain.backends.cuda.device.device import Macro

Source = tuple[str, tuple[tuple[str, Macro], ...]]
"""A file and the macros that it is compiled with."""

Task = tuple["Future[bytes]", Source]

POLL_S = 0.02
"""Seconds until a source that another process is compiling is requested again."""


class Modules:
    """The sources that kernels need, each of which is compiled once and loaded when it is used.

    Args:
        compile: returns the machine code of a file with macros, or None if another process is
            compiling it; several threads call it.
        load: returns the loaded module of machine code.
        threads: largest number of threads that compile.
    """

    def __init__(
        self,
        compile: Callable[[str, Mapping[str, Macro]], bytes | None],
        load: Callable[[bytes], Any],
        threads: int,
    ) -> None:
        self._compile, self._load, self._num_threads = compile, load, threads
        self._codes: dict[Source, Future[bytes]] = {}
        self._modules: dict[Source, Any] = {}
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._running = 0

    def request(self, file: str, defines: Mapping[str, Macro]) -> Source:
        """Let a thread compile a source, unless it was requested before; return its key."""
        source = file, tuple(sorted(defines.items()))
        if source not in self._codes:
            self._codes[source] = Future()
            with self._lock:
                self._tasks.append((self._codes[source], source))
                starts = self._running < self._num_threads
                self._running += starts
            if starts:
                # A daemon, so that the end of the program does not wait for it.
                threading.Thread(target=self._work, name="dptrain-nvrtc", daemon=True).start()
        return source

    def module(self, source: Source) -> Any:
        """Return the loaded module of a requested source.

        Raises:
            CompileError: the source has errors.
        """
        if source not in self._modules:
            self._modules[source] = self._load(self._codes[source].result())
        return self._modules[source]

    def load_all(self) -> None:
        """Load every source that was requested so far; errors are those of `module`."""
        for source in self._codes:
            self.module(source)

    @property
    def progress(self) -> tuple[int, int]:
        """The number of requested sources whose machine code is ready, and the number of all."""
        futures = list(self._codes.values())
        return sum(future.done() for future in futures), len(futures)

    def _work(self) -> None:
        """Compile until no task is left, so that the threads of a replica end."""
        while (task := self._next()) is not None:
            future, (file, defines) = task
            try:
                code = self._compile(file, dict(defines))
            except BaseException as error:
                future.set_exception(error)
                continue
            if code is None:
                self._tasks.append(task)
                time.sleep(POLL_S)
            else:
                future.set_result(code)

    def _next(self) -> Task | None:
        """Return a task; None if there is none, and the thread that calls this ends."""
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            self._running -= 1
            return None
