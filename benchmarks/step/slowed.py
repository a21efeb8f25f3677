"""Run `dptrain` with a slowed CPU backend: python -m benchmarks.step.slowed 3 train …"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from dptrain.__main__ import main
from dptrain.backends.numba.backend import NumbaReplica


def slow_down(factor: float) -> None:
    """Let each step of the backend numba compute for `factor` times as long, by sleeping."""
    run_timed: Callable[[NumbaReplica], Any] = NumbaReplica.run_timed

    def slowed(self: NumbaReplica) -> Any:
        begin = time.perf_counter()
        ends = run_timed(self)
        time.sleep((factor - 1.0) * (time.perf_counter() - begin))
        return ends

    NumbaReplica.run_timed = slowed  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(float(sys.argv.pop(1)))
    main()
