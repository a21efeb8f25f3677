"""What a profile of a job says: the step taken apart by part, layer, kind of operation and rank.

These are records of plain numbers, written to ``profile.json`` and read back from it. Names are
those of docs/measuring.md, the same in tables, files, traces and reports; times are milliseconds,
sizes bytes, rates 10⁹ a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptrain.records import Form

FORM = Form(
    noun="profile",
    otherwise="expected what `dptrain profile --output` writes",
    anew="profile anew",
)


@dataclass(frozen=True)
class Spread:
    """A sample in short: median, quartiles and mean, and how many values it has."""

    median: float
    q1: float
    q3: float
    mean: float
    n: int


@dataclass(frozen=True)
class Parts:
    """What a mean step is made of, in milliseconds; the five add up to the step.

    Attributes:
        compute: stages of the plan, load and update included.
        data_wait: until the minibatch was there.
        transfer: exposed communication while all ranks were in it.
        imbalance: waiting in communication for a rank that was not there yet.
        other: between the rest.
    """

    compute: float
    data_wait: float
    transfer: float
    imbalance: float
    other: float

    @property
    def total(self) -> float:
        """The mean step."""
        return self.compute + self.data_wait + self.transfer + self.imbalance + self.other


@dataclass(frozen=True)
class StageProfile:
    """A stage, or all stages of one kind.

    Attributes:
        name: ``conv1+relu1+pool1.forward``; of a kind, ``conv+relu+maxpool.forward``.
        group: layers, ``conv1+relu1+pool1``.
        kind: their kinds, ``conv+relu+maxpool``.
        phase: ``forward``, ``backward``, ``backward_weight``, ``backward_input``, ``load``,
            ``loss``, ``update``.
        calls: how often in a step.
        time_ms: over steps, mean of the ranks.
        slowest_ms, slowest_rank: the rank with the largest mean.
        share, cumulative_share: of the mean step; cumulative in the order of time.
        flops, bytes_moved: a step and rank.
        memory_bytes: of all buffers that live while the stage runs.
        gflops, gb_per_s: rates from the mean time; 10⁹ a second.
        roofline_share: least time that the measured roofs allow over the mean time; None where no
            roof was measured.
        note: what the backend says of how it is computed.
    """

    name: str
    group: str
    kind: str
    phase: str
    calls: int
    time_ms: Spread
    slowest_ms: float
    slowest_rank: int
    share: float
    cumulative_share: float
    flops: float
    bytes_moved: float
    memory_bytes: int
    gflops: float
    gb_per_s: float
    roofline_share: float | None
    note: str


@dataclass(frozen=True)
class RankProfile:
    """Mean milliseconds of one rank's steps.

    Attributes:
        busy_ms: from the step's begin to the moment when nothing but the other ranks is missing.
        exposed_ms, hidden_ms: communication that computing waited for, and that ran behind it.
        imbalance_ms: part of `exposed_ms` spent waiting for the slowest rank of each step.
        behind_ms: by how much it came to the sums later than the median rank; a straggler's is
            large.
    """

    rank: int
    host: str
    device: str
    samples: float
    step_ms: float
    busy_ms: float
    compute_ms: float
    data_wait_ms: float
    exposed_ms: float
    hidden_ms: float
    imbalance_ms: float
    behind_ms: float


@dataclass(frozen=True)
class Roofs:
    """Measured on rank 0 beside the profile: peak of products, and of copying.

    Attributes:
        gflops: of a product of large matrices.
        gb_per_s: read and written, of a copy far larger than any cache.
        how: in words.
        copies: (bytes of source and target, gb_per_s), from small to large.
    """

    gflops: float
    gb_per_s: float
    how: str
    copies: tuple[tuple[int, float], ...] = ()

    def bandwidth(self, nbytes: float) -> float:
        """GB/s of copying where so many bytes are touched in all."""
        larger = [rate for size, rate in self.copies if size >= nbytes]
        return larger[0] if larger else self.gb_per_s

    def least_ms(self, flops: float, nbytes: float) -> float:
        """Milliseconds that so much work takes at least.

        max(FLOPs / peak, bytes / bandwidth). Source: Williams, Waterman and Patterson, "Roofline:
        an insightful visual performance model for multicore architectures", 2009.
        """
        return max(flops / self.gflops, nbytes / self.bandwidth(nbytes)) / 1e6


@dataclass(frozen=True)
class SumTime:
    """One gradient sum alone, between barriers, as often as there is a bucket of its size."""

    bucket_bytes: int
    buckets: int
    time_ms: Spread


@dataclass(frozen=True)
class Profile:
    """One measured job.

    Attributes:
        job: network, data, backend, precision, strategy, transport, ranks, nodes, threads,
            batch_size (of all ranks), local_batch (of the largest share), optimizer, parameters,
            seed, bucket_kib, cores (that a rank may use), possible (efficiency that the
            cores allow).
        steps: timed.
        step_ms: of the slowest rank of each step.
        step_times_ms: those, in order.
        samples_per_s: minibatch over the median step.
        timing_ms: of a step, what its timing takes; the calls of the clock timed alone.
        parts: of the mean step, over ranks.
        stages: in the order of the plan.
        kinds: stages by kind and phase, sorted by time.
        ranks: in order.
        sums: gradient sums alone; empty for one rank.
        roofs: None where they were not measured.
        memory: bytes by purpose, with ``peak`` of the process.
        environment: as in ``env.json``.
    """

    job: dict[str, Any]
    steps: int
    step_ms: Spread
    step_times_ms: tuple[float, ...]
    samples_per_s: float
    timing_ms: float
    parts: Parts
    stages: tuple[StageProfile, ...]
    kinds: tuple[StageProfile, ...]
    ranks: tuple[RankProfile, ...]
    sums: tuple[SumTime, ...]
    roofs: Roofs | None
    memory: dict[str, int]
    environment: dict[str, Any]

    def write(self, path: Path) -> None:
        """Write ``profile.json``.

        Raises:
            UserError: it cannot be written.
        """
        FORM.write(self, path)

    def text(self) -> str:
        """The JSON of the file."""
        return FORM.text(self)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read what `write` has written.

        Raises:
            UserError: there is no such file, or it is no profile of this version.
        """
        return FORM.read(path, cls._from)

    @classmethod
    def _from(cls, values: Mapping[str, Any]) -> Profile:
        def spread(found: Mapping[str, Any]) -> dict[str, Any]:
            return {**found, "time_ms": Spread(**found["time_ms"])}

        if not (values["stages"] and values["kinds"] and values["ranks"]):
            raise ValueError("no stage or no rank")
        roofs = values["roofs"]
        return cls(
            **{
                **values,
                "step_ms": Spread(**values["step_ms"]),
                "step_times_ms": tuple(values["step_times_ms"]),
                "parts": Parts(**values["parts"]),
                "stages": tuple(StageProfile(**spread(s)) for s in values["stages"]),
                "kinds": tuple(StageProfile(**spread(s)) for s in values["kinds"]),
                "ranks": tuple(RankProfile(**r) for r in values["ranks"]),
                "sums": tuple(SumTime(**spread(s)) for s in values["sums"]),
                "roofs": None if roofs is None else _roofs(roofs),
            }
        )


def _roofs(values: Mapping[str, Any]) -> Roofs:
    copies = tuple((int(size), float(rate)) for size, rate in values["copies"])
    return Roofs(**{**values, "copies": copies})
