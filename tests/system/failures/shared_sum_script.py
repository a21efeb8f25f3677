"""Trains with sums in shared memory; one rank fails in a phase of the sum of step 7.

shared_sum_script.py RUN_DIRECTORY PHASE FAILURE RANK
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dptrain import Trainer
from dptrain.backends.replica import Replica
from dptrain.comm.launching.launcher import find_launch
from dptrain.comm.sums.shared import SharedSum
from dptrain.comm.watchdog.mpi_files import own_files
from dptrain.network import Dense, Network, ReLU

FAILING_STEP = 7
CHECKPOINT = Path("run/checkpoints/step-00000006")
"""What rank 0 still writes while the others begin step 7."""


def _fail(how: str) -> None:
    while not CHECKPOINT.exists():
        time.sleep(0.01)
    Path("failing").write_text("\n".join(own_files()))
    Path("failing").rename("failed")
    if how == "bug":
        raise ZeroDivisionError("seven by nothing")
    os.kill(os.getpid(), getattr(signal, how))


def _fail_in(phase: str, how: str) -> None:
    """Let this process fail in a phase of the sum of step `FAILING_STEP`."""
    calls = dict.fromkeys(("start", "update"), 0)
    start, update, loss = SharedSum._start, Replica.update_slice, SharedSum._sum_slices
    synchronize = SharedSum._synchronize

    def fails(counted: str) -> bool:
        return calls[counted] == FAILING_STEP

    def failing_start(self: SharedSum, bucket: int) -> None:
        calls["start"] += 1
        if fails("start") and phase == "before arriving":
            _fail(how)
        start(self, bucket)
        if fails("start") and phase == "after arriving":
            _fail(how)

    def failing_sum(self: SharedSum, buckets: Any) -> None:
        loss(self, buckets)
        if fails("start") and phase == "after the sum":
            _fail(how)

    def failing_update(self: Replica, elements: slice, rate: float, *, number: int) -> None:
        calls["update"] += 1
        if fails("update") and phase == "during the update":
            half = (elements.start + elements.stop) // 32 * 16
            update(self, slice(elements.start, half), rate, number=number)
            _fail(how)
        update(self, elements, rate, number=number)

    def failing_end(self: SharedSum, what: str) -> None:
        if fails("update") and phase == "before the end":
            _fail(how)
        synchronize(self, what)
        if fails("update") and phase == "after the end":
            _fail(how)

    replaced: dict[str, Callable[..., None]] = {
        "_start": failing_start, "_sum_slices": failing_sum, "_synchronize": failing_end,
    }  # fmt: skip
    for name, function in replaced.items():
        setattr(SharedSum, name, function)
    Replica.update_slice = failing_update  # type: ignore[method-assign]


def _limit_wait(seconds: float) -> None:
    """Let this rank wait `seconds` for a rank that fails in step `FAILING_STEP`.

    The time counts from the failure: ranks start at different times, and may have to compile.
    """
    updates = 0
    update, synchronize = Replica.update_slice, SharedSum._synchronize

    def counting_update(self: Replica, elements: slice, rate: float, *, number: int) -> None:
        nonlocal updates
        updates += 1
        update(self, elements, rate, number=number)

    def limited_synchronize(self: SharedSum, what: str) -> None:
        if updates == FAILING_STEP:
            while not Path("failed").exists():
                time.sleep(0.01)
            self.world.timeout = seconds
        synchronize(self, what)

    Replica.update_slice = counting_update  # type: ignore[method-assign]
    SharedSum._synchronize = limited_synchronize  # type: ignore[method-assign]


def _main(folder: str, phase: str, how: str, rank: str) -> None:
    if find_launch().rank == int(rank):
        _fail_in(phase, how)
    elif how == "SIGSTOP":
        _limit_wait(5.0)
    random = np.random.default_rng(3)
    x = random.normal(size=(240, 40)).astype(np.float32)
    trainer = Trainer(
        Network((40,), [Dense(64), ReLU(), Dense(10)]),
        (x, (x[:, 0] > 0).astype(np.int64)),
        seed=1, batch_size=24, epochs=1, checkpoint_every=2, run_dir=folder, progress=False,
        backend="reference", transport="shared", threads=1, baseline_steps=0,
    )  # fmt: skip
    trainer.fit()
    sys.stdout.write(f"done {trainer.job.world.rank}\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
