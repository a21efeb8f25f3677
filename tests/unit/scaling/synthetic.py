"""Profiles of a job that never ran, whose steps follow a known law.

``python -m tests.unit.scaling.synthetic DIR`` writes a whole study of such, profiles included.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.measure.profile.profile import (
    Parts,
    Profile,
    RankProfile,
    Roofs,
    Spread,
    StageProfile,
    StepParts,
    SumTime,
)
from dptrain.scaling.analysis import analyse
from dptrain.scaling.points import Measured

STAGES = (
    ("load", "load", "", "load", 0.01, 0),
    ("conv1+relu1+pool1.forward", "conv1+relu1+pool1", "conv+relu+maxpool", "forward", 0.17, 2.1e6),
    ("conv2+relu2+pool2.forward", "conv2+relu2+pool2", "conv+relu+maxpool", "forward", 0.14, 3.4e6),
    ("fc1.forward", "fc1", "dense", "forward", 0.05, 4.1e5),
    ("loss", "loss", "", "loss", 0.01, 0),
    ("fc1.backward_weight", "fc1", "dense", "backward_weight", 0.06, 4.1e5),
    ("fc1.backward_input", "fc1", "dense", "backward_input", 0.05, 4.1e5),
    ("conv2+relu2+pool2.backward_weight", "conv2+relu2+pool2", "conv+relu+maxpool",
     "backward_weight", 0.21, 3.4e6),
    ("conv2+relu2+pool2.backward_input", "conv2+relu2+pool2", "conv+relu+maxpool",
     "backward_input", 0.17, 3.4e6),
    ("conv1+relu1+pool1.backward_weight", "conv1+relu1+pool1", "conv+relu+maxpool",
     "backward_weight", 0.13, 2.1e6),
)  # fmt: skip
"""Name, group, kind, phase, share of compute without the update, FLOPs a sample."""
BACKWARD = sum(share for *_, phase, share, _ in STAGES if phase.startswith("backward"))


@dataclass(frozen=True)
class Law:
    """What steps take, in milliseconds: the α–β model, with known numbers.

    Attributes:
        sample, data: of a sample.
        update, other: of any step.
        alpha, beta: of a message; of a byte.
        overlap: share of a sum that is hidden.
        imbalance: times √(2 ln p).
        cores: of the one node; None: ranks never share.
        per_node: ranks per node; None: all ranks are on one node.
        noise: relative standard deviation between launches.
    """

    sample: float = 0.25
    update: float = 0.3
    data: float = 0.002
    other: float = 0.02
    alpha: float = 0.02
    beta: float = 4e-7
    overlap: float = 0.5
    imbalance: float = 0.1
    cores: int | None = None
    noise: float = 0.0
    size: int = 800_000
    per_node: int | None = None

    def possible(self, workers: int) -> float:
        """Share of the workers that have a core."""
        return 1.0 if self.cores is None else min(self.cores / workers, 1.0)

    def sum_ms(self, ranks: int, size: float | None = None) -> float:
        """A sum of all gradients, or of so many bytes, by Rabenseifner's algorithm."""
        latency = 2 * self.alpha * math.log2(ranks)
        return latency + 2 * self.beta * (size or self.size) * (ranks - 1) / ranks

    def nodes(self, ranks: int) -> int:
        """Number of nodes of so many ranks."""
        return 1 if self.per_node is None else math.ceil(ranks / self.per_node)

    def parts(self, ranks: int, threads: int, local: float) -> Parts:
        """Of a step without noise."""
        slow = 1 / self.possible(ranks * threads)
        compute = (self.update + self.sample * local / threads) * slow
        total = self.sum_ms(ranks) * slow if ranks > 1 else 0.0
        backward = BACKWARD * self.sample * local / threads * slow
        late = self.imbalance * math.sqrt(2 * math.log(ranks))
        hidden = min(self.overlap * total, backward)
        return Parts(compute, self.data * local * slow, total - hidden, late, self.other)


def _spread(value: float, n: int) -> Spread:
    return Spread(value, 0.98 * value, 1.03 * value, value, n)


def make_profile(
    law: Law, *, ranks: int, threads: int = 1, batch_size: int, noise: float = 0.0,
    step_ms: float | None = None, steps: int = 50, **facts: Any,
) -> Profile:  # fmt: skip
    """A profile whose times are the law's, times exp(noise).

    Args:
        step_ms: takes the place of the law's step; its parts keep their shares.
        facts: of the environment, in place of those here.
    """
    local = math.ceil(batch_size / ranks)
    parts = law.parts(ranks, threads, local)
    whole = parts.total
    factor = math.exp(noise) * (1.0 if step_ms is None else step_ms / whole)
    parts = Parts(**{name: factor * value for name, value in parts.known.items()})
    step = factor * whole
    rest = parts.compute - factor * law.update / law.possible(ranks * threads)
    stages = [
        _stage(*stage[:4], time=stage[4] * rest, flops=stage[5] * local, step=step, steps=steps)
        for stage in STAGES
    ]
    stages.append(
        _stage("update", "update", "", "update", time=parts.compute - rest, flops=4e5, step=step,
               steps=steps)
    )  # fmt: skip
    total = factor * law.sum_ms(ranks) / law.possible(ranks * threads) if ranks > 1 else 0.0
    hidden = total - parts.transfer
    generator = np.random.default_rng(ranks)
    return Profile(
        job={
            "network": "model0", "data": "synthetic", "backend": "numba", "precision": "fp32",
            "strategy": "mirrored", "transport": "auto", "ranks": ranks,
            "nodes": law.nodes(ranks),
            "threads": threads, "batch_size": batch_size, "local_batch": local,
            "optimizer": "sgd", "parameters": 199_882, "seed": 0, "bucket_kib": None,
            "cores": law.cores or 64, "possible": law.possible(ranks * threads),
        },
        steps=steps,
        step_ms=_spread(step, steps),
        step_times_ms=tuple((step * generator.lognormal(0, 0.02, steps)).tolist()),
        samples_per_s=1e3 * batch_size / step,
        timing_ms=0.01,
        parts=parts,
        step_parts=StepParts(
            {name: _spread(value, steps) for name, value in parts.known.items()}, parts, parts,
            0.5, 0.5,
        ),
        stages=tuple(stages),
        kinds=tuple(sorted(stages, key=lambda stage: -stage.time_ms.median)),
        ranks=tuple(
            RankProfile(rank, "node", "", local, step, step - parts.transfer - parts.imbalance,
                        parts.compute, parts.data_wait, parts.transfer + parts.imbalance, hidden,
                        parts.imbalance, 0.1 * rank)
            for rank in range(ranks)
        ),
        sums=() if ranks == 1 else (SumTime(law.size, 1, _spread(total, steps)),),
        roofs=Roofs(90.0, 12.0, "made up"),
        memory={"parameters": 799_528, "activations": 4_000_000, "peak": 2 * 10**8},
        environment={
            "started": "2026-11-21T12:00:00+00:00", "host": "node", "cpu": "a processor",
            "cores": law.cores or 64, "os": "Linux", "python": "3.11.2",
            "versions": {"dptrain": "0.1.0", "numpy": "2.0.0"}, "mpi": {"library": "MPICH 5"},
            **facts,
        },
        sweep=() if ranks == 1 else tuple(
            SumTime(size, 0, _spread(factor * law.sum_ms(ranks, size), steps))
            for size in (law.size * 2**k // 64 for k in range(9))
        ),
    )  # fmt: skip


def _stage(
    name: str, group: str, kind: str, phase: str, *, time: float, flops: float, step: float,
    steps: int,
) -> StageProfile:  # fmt: skip
    rate = flops / time / 1e6 if time else 0.0
    return StageProfile(
        name, group, kind, phase, 1, _spread(time, steps), time, 1.02 * time, 0,
        time / step, 0.0, flops, 1e6, 10**6, rate, 1.0 / time if time else 0.0, rate / 90, "",
    )  # fmt: skip


def make_launches(
    law: Law, ranks: Iterable[int] = (1, 2, 4), *, threads: Iterable[int] = (1,),
    launches: int = 5, batch_size: int = 32, seed: int = 0,
) -> list[Measured]:  # fmt: skip
    """Launches of weak and strong scaling, the base once."""
    generator = np.random.default_rng(seed)
    ranks, threads = list(ranks), list(threads)
    base = ranks[0] * threads[0]
    found: list[Measured] = []
    for k in range(launches):
        for t in threads:
            for r in ranks:
                for scaling in (
                    ("weak", "strong") if (r, t) != (ranks[0], threads[0]) else ("weak",)
                ):
                    batch = batch_size * r * t // base if scaling == "weak" else batch_size
                    profile = make_profile(
                        law, ranks=r, threads=t, batch_size=batch,
                        noise=law.noise * generator.standard_normal(),
                    )  # fmt: skip
                    folder = f"launches/{scaling}-r{r}-t{t}-{k + 1}"
                    found.append(Measured(folder, len(found), profile))
    return found


def write_study(folder: Path, law: Law, ranks: Iterable[int]) -> None:
    """``study.json`` and the profiles below ``launches``."""
    launches = make_launches(law, ranks)
    commands = {m.folder: f"mpirun -n {m.profile.job['ranks']} dptrain profile" for m in launches}
    for measured in launches:
        (folder / measured.folder).mkdir(parents=True)
        measured.profile.write(folder / measured.folder / "profile.json")
    analyse(launches, commands=commands).write(folder / "study.json")


if __name__ == "__main__":
    write_study(Path(sys.argv[1]), Law(noise=0.02, cores=32), (1, 2, 4, 8, 16, 32))
