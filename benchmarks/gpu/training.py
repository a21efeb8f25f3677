"""A training step of dptrain beside PyTorch's in each of its modes, in turns."""

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
"""The most precise first."""


@dataclass(frozen=True)
class Case:
    """A network at a batch size, by every program.

    Attributes:
        network, batch_size: which.
        ours: times by backend and precision.
        theirs: times by name of PyTorch's mode, which begins with its precision.
        memory_bytes: of each program.
        failed: programs that did not run, or gave something else, and why.
    """

    network: str
    batch_size: int
    ours: dict[tuple[str, str], Laps]
    theirs: dict[str, Laps]
    memory_bytes: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def comparisons(self) -> list[Comparison]:
        """One for each of our programs."""
        return [
            Comparison(self, backend, precision, best_mode(self.theirs, precision))
            for backend, precision in self.ours
        ]


@dataclass(frozen=True)
class Comparison:
    """One of our programs beside the best of PyTorch's modes; None where there is none."""

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
        """How many times faster dptrain is."""
        return None if self.mode is None else ratio(self.case.theirs[self.mode], self.ours)

    @property
    def goals(self) -> list[tuple[Target, float]]:
        """What is to be reached, with what was."""
        goals = []
        least = targets.STEP_US.get((self.case.network, self.case.batch_size))
        if least is not None:
            goals.append((least, self.ours.median))
        if self.ratio is not None:
            goals.append((targets.faster(self.case.batch_size), self.ratio.value))
        return goals


def best_mode(theirs: dict[str, Laps], precision: str) -> str | None:
    """The fastest of PyTorch's modes that is at least as precise."""
    coarsest = PRECISIONS.index(precision)
    counts = [mode for mode in theirs if PRECISIONS.index(mode.split()[0]) <= coarsest]
    return min(counts, key=lambda mode: theirs[mode].median, default=None)


Build = Callable[[], tuple[Program, int]]
"""Makes a program, and says how many bytes it takes."""


def measure_case(
    network: Network,
    batch_size: int,
    ours: Iterable[tuple[str, str]],
    theirs: dict[str, Build],
    blocks: int,
) -> Case:
    """Build everything, then take turns.

    Args:
        network, batch_size: the case.
        ours: backends and precisions.
        theirs: PyTorch's programs, by mode.
        blocks: of each program.
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
        # What libraries raise is nobody's to list; the report says what is missing, and why.
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
    """The step of dptrain, ready."""
    step = Step(network, backend, precision, batch_size)
    return step.program, step.memory_bytes


def reason(error: BaseException) -> str:
    """The first line of an error, with its kind."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def release_memory() -> None:
    """Give what nobody uses any more back to the GPU, for the other library to use."""
    gc.collect()
    torch, cupy = (sys.modules.get(name) for name in ("torch", "cupy"))
    if torch is not None:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
