"""CUDA graphs: repeated work that is captured once and launched as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dptrain.backends.cuda.device.gpu import GPU


class Graph:
    """Work that is enqueued repeatedly to the current stream, as one CUDA graph.

    The first run enqueues the work directly, which compiles and loads what it needs. The second run
    captures it.

    Args:
        gpu: device of the work.
        start: function that enqueues the work.
        warm: whether the work has run before, so that the first run captures it.

    Source: CUDA C++ Programming Guide, section "CUDA Graphs".
    """

    def __init__(self, gpu: GPU, start: Callable[[], None], warm: bool) -> None:
        self._gpu, self._start, self._warm = gpu, start, warm
        self._graph: Any = None

    def run(self) -> None:
        """Enqueue the work."""
        stream = self._gpu.current
        if not self._warm:
            self._start()
            self._gpu.join_streams()
            self._warm = True
            return
        if self._graph is None:
            self._gpu.load_functions()  # A capture does not allow it.
            stream.begin_capture()
            try:
                self._start()
                self._gpu.join_streams()
            finally:
                # After an error this drops what was captured and ends the capture mode.
                self._graph = stream.end_capture()
        self._graph.launch(stream)
