"""Compare inference by dptrain with that by PyTorch and ONNX Runtime, on a batch in GPU memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dptrain
from benchmarks.batch import random_batch
from benchmarks.gpu.clock import Laps, Program, host_timer, ratio, stream_timer, take_turns
from benchmarks.gpu.training import PRECISIONS, reason, release_memory
from benchmarks.timing import Ratio
from dptrain.batch import Batch
from dptrain.network import Dropout, Network

LATENCY_BLOCKS, LATENCY_US, MIN_PASSES, MAX_PASSES = 10, 10_000.0, 3, 60
"""Blocks of single passes of each program, their duration in µs, and the passes of a block."""


@dataclass(frozen=True)
class Inference:
    """A program that computes the outputs of a batch.

    Attributes:
        program: enqueues one pass after the other.
        wait: waits until all passes have run.
        output: returns the outputs (N, F) of the last pass.
    """

    program: Program
    wait: Callable[[], object]
    output: Callable[[], NDArray[Any]]


@dataclass(frozen=True)
class Passes:
    """Times of a program.

    Attributes:
        laps: µs of a pass, of passes that are enqueued one after the other.
        latencies_us: times of single passes, from the call until the host knows the end.
    """

    laps: Laps
    latencies_us: NDArray[np.float64]

    @property
    def percentiles_us(self) -> tuple[float, float, float]:
        """Latencies that 50, 95 and 99% of the passes do not exceed."""
        p50, p95, p99 = np.percentile(self.latencies_us, [50, 95, 99])
        return float(p50), float(p95), float(p99)


@dataclass(frozen=True)
class InferenceCase:
    """Times of all programs for a network, a batch size and a precision.

    Attributes:
        network, batch_size, precision: the case.
        ours: times by backend.
        theirs: times by program of a peer, whose name starts with its precision.
        failed: reasons by program that failed or computed a wrong result.
    """

    network: str
    batch_size: int
    precision: str
    ours: dict[str, Passes]
    theirs: dict[str, Passes]
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """The peer with the highest throughput."""
        return min(self.theirs, key=lambda name: self.theirs[name].laps.median, default=None)

    @property
    def quickest(self) -> str | None:
        """The peer with the lowest median latency."""
        return min(self.theirs, key=lambda name: self.theirs[name].percentiles_us[0], default=None)

    def throughput_ratio(self, backend: str) -> Ratio | None:
        """Return the throughput divided by that of the best peer."""
        if self.best is None:
            return None
        return ratio(self.theirs[self.best].laps, self.ours[backend].laps)

    def latency_ratio(self, backend: str) -> float | None:
        """Return the median latency of the quickest peer divided by that of `backend`."""
        if self.quickest is None:
            return None
        return self.theirs[self.quickest].percentiles_us[0] / self.ours[backend].percentiles_us[0]


BuildInference = Callable[[], Inference]


def our_inference(
    network: Network, backend: str, precision: str, x: NDArray[np.float32]
) -> Inference:
    """Return the pass that `Replica.predict` runs, with the batch loaded."""
    replica = dptrain.make_replica(
        network, backend, len(x), precision=precision, training=False
    )  # fmt: skip
    replica.load(Batch.of(x), training=False)
    start = partial(replica.run_forward, loss=False)
    for _ in range(2):  # The second pass is captured.
        start()
    stream = getattr(getattr(replica, "device", None), "stream", None)
    timer = host_timer if stream is None else stream_timer(stream)

    def output() -> NDArray[Any]:
        start()
        replica.memory.synchronize()
        return np.array(replica.output()).reshape(len(x), -1)

    return Inference(Program(start, timer), replica.memory.synchronize, output)


def without_dropout(network: Network) -> Network:
    """Return the network as inference computes it, with the names of its parameters."""
    layers = [node.layer for node in network.nodes if not isinstance(node.layer, Dropout)]
    name = f"{network.name} without dropout"
    return Network(network.input_shape, layers, network.loss, name)


def latencies_us(program: Inference, passes: int) -> list[float]:
    """Return the times of single passes on the host's clock."""
    times = []
    for _ in range(passes):
        begin = time.perf_counter_ns()
        program.program.start()
        program.wait()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times


def measure_passes(programs: Mapping[str, Inference], blocks: int) -> dict[str, Passes]:
    """Time all programs in alternating blocks: throughput, then latency."""
    laps = take_turns({name: each.program for name, each in programs.items()}, blocks)
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(min(blocks, LATENCY_BLOCKS)):
        for name, program in programs.items():
            count = int(np.clip(LATENCY_US / laps[name].median, MIN_PASSES, MAX_PASSES))
            # The first pass after another program's is not counted.
            found[name] += latencies_us(program, count + 1)[1:]
    return {name: Passes(laps[name], np.array(found[name])) for name in programs}


Judge = Callable[[str, NDArray[Any]], None]
"""Raises ArithmeticError if the outputs of the program with this name are wrong."""


def measure_inference(
    network: Network,
    batch_size: int,
    precision: str,
    backends: Sequence[str],
    theirs: Mapping[str, BuildInference],
    judge: Judge,
    blocks: int,
) -> InferenceCase:
    """Build all programs, check their outputs, then time them.

    Args:
        network, batch_size, precision: the case.
        backends: of dptrain.
        theirs: programs of peers by name, which starts with the precision.
        judge: checks outputs.
        blocks: number of blocks of each program.
    """
    x, _ = random_batch(network, batch_size)
    builds: dict[str, BuildInference] = {
        backend: partial(our_inference, network, backend, precision, x) for backend in backends
    }
    programs: dict[str, Inference] = {}
    failed: dict[str, str] = {}
    for name, build in {**builds, **theirs}.items():
        # Libraries raise any kind of exception; the report lists what failed, and why.
        try:
            program = build()
            judge(name, program.output())
            programs[name] = program
        except Exception as error:
            ours = name in backends
            failed[f"{name} {precision}" if ours else f"PyTorch {name}"] = reason(error)
    found = measure_passes(programs, blocks)
    programs.clear()
    release_memory()
    mine = {name: found[name] for name in backends if name in found}
    others = {name: found[name] for name in theirs if name in found}
    return InferenceCase(network.name, batch_size, precision, mine, others, failed)


def precisions_up_to(precision: str) -> tuple[str, ...]:
    """Return the precisions of peers that count: at least as precise."""
    return PRECISIONS[: PRECISIONS.index(precision) + 1]
