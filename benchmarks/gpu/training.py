"""Compare a training step of dptrain with PyTorch in each of its modes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from benchmarks.gpu import targets
from benchmarks.gpu.clock import Laps, Program, ratio, take_turns
from benchmarks.gpu.ours import Step
from benchmarks.targets import Target
from benchmarks.timing import Ratio
from dptrain.network import Network

PRECISIONS = ("fp32", "tf32", "bf16")
"""Precisions, the most precise first."""


@dataclass(frozen=True)
class Case:
    """Times of all programs for a network and a batch size.

    Attributes:
        network, batch_size: the case.
        ours: times by backend and precision.
        theirs: times by PyTorch's mode, whose name starts with its precision.
        memory_bytes: peak memory by program.
        failed: reasons by program that failed or computed a wrong result.
    """

    network: str
    batch_size: int
    ours: dict[tuple[str, str], Laps]
    theirs: dict[str, Laps]
    memory_bytes: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def comparisons(self) -> list[Comparison]:
        """Return a comparison for each program of dptrain."""
        return [
            Comparison(self, backend, precision, best_mode(self.theirs, precision))
            for backend, precision in self.ours
        ]


@dataclass(frozen=True)
class Comparison:
    """A program of dptrain and the fastest comparable mode of PyTorch, if any."""

    case: Case
    backend: str
    precision: str
    mode: str | None

    @property
    def ours(self) -> Laps:
        """Times of dptrain."""
        return self.case.ours[self.backend, self.precision]

    @property
    def ratio(self) -> Ratio | None:
        """Speedup of dptrain over PyTorch."""
        return None if self.mode is None else ratio(self.case.theirs[self.mode], self.ours)

    @property
    def goals(self) -> list[tuple[Target, float]]:
        """Targets, each with the measured value."""
        goals = []
        least = targets.STEP_US.get((self.case.network, self.case.batch_size))
        if least is not None:
            goals.append((least, self.ours.median))
        faster = targets.faster(self.case.network, self.case.batch_size, self.precision)
        if self.ratio is not None and faster is not None:
            goals.append((faster, self.ratio.value))
        return goals


def best_mode(theirs: dict[str, Laps], precision: str) -> str | None:
    """Return PyTorch's fastest mode that is at least as precise."""
    coarsest = PRECISIONS.index(precision)
    counts = [mode for mode in theirs if PRECISIONS.index(mode.split()[0]) <= coarsest]
    return min(counts, key=lambda mode: theirs[mode].median, default=None)


Build = Callable[[], tuple[Program, int]]
"""Function that builds a program and returns it with its peak memory in bytes."""


def measure_case(
    network: Network,
    batch_size: int,
    ours: Iterable[tuple[str, str]],
    theirs: dict[str, Build],
    blocks: int,
) -> Case:
    """Build all programs, then time them in alternating blocks.

    Args:
        network, batch_size: the case.
        ours: backends and precisions.
        theirs: PyTorch's programs, by mode.
        blocks: number of blocks of each program.
    """
    programs: dict[str, Program] = {}
    memory: dict[str, int] = {}
    failed: dict[str, str] = {}
    pairs = list(ours)
    builds: dict[str, Build] = {
        " ".join(pair): partial(our_program, network, *pair, batch_size) for pair in pairs
    }
    builds |= {f"PyTorch {mode}": build for mode, build in theirs.items()}
    for name, build in builds.items():
        # Libraries raise any kind of exception; the report lists what failed, and why.
        try:
            programs[name], memory[name] = build()
        except Exception as error:
            failed[name] = reason(error)
    laps = take_turns(programs, blocks)
    programs.clear()
    release_memory()
    mine = {pair: laps[" ".join(pair)] for pair in pairs if " ".join(pair) in laps}
    others = {mode: laps[f"PyTorch {mode}"] for mode in theirs if f"PyTorch {mode}" in laps}
    return Case(network.name, batch_size, mine, others, memory, failed)


def our_program(
    network: Network, backend: str, precision: str, batch_size: int
) -> tuple[Program, int]:
    """Build the step of dptrain."""
    step = Step(network, backend, precision, batch_size)
    return step.program, step.memory_bytes


def reason(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def release_memory() -> None:
    """Return unused cached memory of both libraries to the GPU."""
    gc.collect()
    torch, cupy = (sys.modules.get(name) for name in ("torch", "cupy"))
    if torch is not None:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
