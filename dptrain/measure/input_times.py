"""How long input takes, and which part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

NEGLIGIBLE = 0.1
"""Share of a step that is too small to be reported."""

MIN_STEPS = 10
"""Number of steps, without the first one, from which a run reports the times of input."""


@dataclass
class InputTimes:
    """Times that a loader takes, on whichever thread, for the minibatches of a run.

    A loader that reads minibatches one by one leaves out its first one.

    Attributes:
        reading_ns: reading samples from memory or files, with decoding.
        assembling_ns: drawing random numbers, and changing images or computing crop windows.
        batches: minibatches.
        starts: numbers of the steps that began with a new loader, counted from the run's first.
            They wait until a minibatch has been read, which later steps need not.
    """

    reading_ns: int = 0
    assembling_ns: int = 0
    batches: int = 0
    starts: list[int] = field(default_factory=list)

    def add_reading(self, begin_ns: int) -> int:
        """Add the time since `begin_ns` to reading; return the present time."""
        now = perf_counter_ns()
        self.reading_ns += now - begin_ns
        return now

    def add_assembling(self, begin_ns: int) -> int:
        """Add the time since `begin_ns` to assembling; return the present time."""
        now = perf_counter_ns()
        self.assembling_ns += now - begin_ns
        return now

    def counts(self) -> tuple[int, int, int]:
        """Return the times and the number of minibatches, for `reset`."""
        return self.reading_ns, self.assembling_ns, self.batches

    def reset(self, counts: tuple[int, int, int]) -> None:
        """Forget what was added since `counts` were returned."""
        self.reading_ns, self.assembling_ns, self.batches = counts

    def mean_ms(self) -> tuple[float, float]:
        """Return reading and assembling per minibatch in milliseconds."""
        count = max(self.batches, 1) * 1e6
        return self.reading_ns / count, self.assembling_ns / count


@dataclass(frozen=True)
class InputCost:
    """Times of input in milliseconds per step, means over the ranks.

    Attributes:
        step_ms: the whole step.
        wait_ms: waiting for the minibatch.
        copy_ms: copying the minibatch to the network's input; 0 if it was not measured.
        reading_ms, assembling_ms: see `InputTimes`; they may overlap with the step.
        early_copy_ms: copying it during earlier steps, to a device and there.
    """

    step_ms: float
    wait_ms: float
    copy_ms: float
    reading_ms: float
    assembling_ms: float
    early_copy_ms: float = 0.0

    @property
    def share(self) -> float:
        """Share of a step in which nothing but input happened.

        Copies during earlier steps do not count, unless they take about as long as a step.
        """
        if not self.step_ms:
            return 0.0
        alone_ms = self.wait_ms + self.copy_ms
        if self.copies_all_the_time:
            alone_ms = max(alone_ms, self.early_copy_ms)
        return min(alone_ms / self.step_ms, 1.0)

    @property
    def copies_all_the_time(self) -> bool:
        """True if copying a minibatch during earlier steps takes about as long as a step."""
        return self.early_copy_ms > (1.0 - NEGLIGIBLE) * self.step_ms

    @property
    def ahead(self) -> float:
        """Share of the time in which minibatches were read and assembled during other steps."""
        ahead_ms = self.reading_ms + self.assembling_ms - self.wait_ms
        return min(max(ahead_ms / self.step_ms, 0.0), 1.0) if self.step_ms else 0.0

    @property
    def part(self) -> str:
        """The part of input that takes longest: ``reading``, ``assembling`` or ``copying``."""
        early_ms = self.early_copy_ms if self.copies_all_the_time else 0.0
        if max(self.copy_ms, early_ms) > self.wait_ms:
            return "copying"
        return "reading" if self.reading_ms >= self.assembling_ms else "assembling"

    def to_dict(self) -> dict[str, Any]:
        """Return the values for ``summary.json``."""
        return {
            "part": self.part,
            "share": self.share,
            "wait_ms": self.wait_ms,
            "reading_ms": self.reading_ms,
            "assembling_ms": self.assembling_ms,
            "copying_ms": self.copy_ms + self.early_copy_ms,
        }

    def ahead_line(self) -> str:
        """Return a line about minibatches that are read ahead; empty if that takes little time."""
        if self.ahead <= NEGLIGIBLE:
            return ""
        return (
            f"minibatches were read ahead for {self.ahead:.0%} of the time, which slows "
            "computation and communication unless the reader has a core of its own"
        )
