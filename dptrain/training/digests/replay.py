"""Replays: a step is computed twice before its update, by ranks that exchange their parts.

With micro-shards the bits of a gradient depend on no rank. Every `JobSpec.replay_every` steps each
rank sends its samples, and the digests of its gradient slots, of the loss and of its batch
statistics, to another rank with the same hardware. That rank computes the micro-shards again, one
after the other, and adds them along the tree. A rank alone does so itself. The totals of batch
statistics are those of the step, which every rank has. So wrong arithmetic is found, and memory
that changed during a step.

Only if digests differ, all ranks compute the part again that differs, and the minority is wrong.
The job then ends on all ranks, before the update. Tensors that are not finite in these computations
are not compared, because the bits of a NaN depend on the instructions; then training diverges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.digests import STEP_SUMS, GradientDigests, Tensor, numpy_digests
from dptrain.backends.flat_arrays import FlatArrays
from dptrain.backends.replica import CropWindowReplica, Replica, SumStatistics
from dptrain.batch import Batch
from dptrain.comm.collective import broadcast_arrays, exchange_arrays
from dptrain.comm.world import CorruptedError, World
from dptrain.philox import philox
from dptrain.plan.plan import with_micro_shards
from dptrain.plan.shards import MicroShards, add_in_order, merge_table
from dptrain.training.digests.differences import (
    Difference,
    Digests,
    difference_text,
    find_difference,
    hardware,
)
from dptrain.training.spec import RunSpec

_STREAM = 0xFFFFFFFE
"""Part of the Philox counter in which dropout has the index of a layer; no layer has this one."""


def draw_checkers(seed: int, step: int, ranks: Sequence[str]) -> list[int]:
    """Return the rank that computes the part of each rank again, a pure function of its arguments.

    Ranks with the same hardware are shifted by a random number; a rank without a like is itself.

    Args:
        seed: of the run.
        step: number of the step.
        ranks: the hardware of each rank, in words.

    Example:
        >>> sorted(draw_checkers(0, 7, ["EPYC", "Xeon", "EPYC"]))
        [0, 1, 2]
    """
    words = philox((0, 0, step, _STREAM), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    checkers = list(range(len(ranks)))
    for kind in set(ranks):
        alike = [rank for rank, other in enumerate(ranks) if other == kind]
        shift = 1 + (int(words[0]) * (len(alike) - 1) >> 32)
        for number, rank in enumerate(alike):
            checkers[rank] = alike[(number + shift) % len(alike)]
    return checkers


@dataclass
class Recording:
    """The sums of batch statistics of a pass.

    Attributes:
        rows: of each sum a row for each micro-shard of this rank.
        totals: of each sum the total over all ranks.
    """

    rows: list[NDArray[np.float64]] = field(default_factory=list)
    totals: list[NDArray[np.float64]] = field(default_factory=list)

    def recorded(self, add: SumStatistics) -> SumStatistics:
        """Return a sum that is recorded."""

        def add_and_record(parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
            self.rows.append(parts.copy())
            add(parts, totals)
            self.totals.append(totals.copy())

        return add_and_record

    def replayed(self) -> tuple[list[NDArray[np.float64]], SumStatistics]:
        """Return a list, and a sum that yields the recorded totals and appends its rows there."""
        rows: list[NDArray[np.float64]] = []

        def replay(parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
            totals[:] = self.totals[len(rows)]
            rows.append(parts.copy())

        return rows, replay


class Replay:
    """Computes steps again; all ranks make the same calls.

    Args:
        replica: of this rank, on a host, with micro-shards.
        world: the ranks.
        spec: of the job, with the hardware of all ranks.
    """

    def __init__(self, replica: Replica, world: World, spec: RunSpec) -> None:
        self._replica, self._world, self._ranks = replica, world, spec.ranks
        self._every = spec.job.replay_every
        # A BLAS library may add in another order with another number of cores.
        self._hardware = [f"{hardware(rank)}, {rank.cores} cores" for rank in spec.ranks]
        self._again = _replica_of_one_shard(replica, spec.job.batch_size)
        self._digests = [GradientDigests(replica, row) for row in replica.gradient_slots]
        self._digests_again = GradientDigests(self._again, self._again.flat_gradients)

    @property
    def memory_bytes(self) -> int:
        """Memory that replays need in addition to that of the replica."""
        return self._again.plan.arena_bytes + int(self._again.gradient_slots.nbytes)

    def begin(self, batch: Batch) -> Recording | None:
        """Return an empty recording if the step of a minibatch is computed again."""
        return None if (batch.step + 1) % self._every else Recording()

    def check(self, batch: Batch, recording: Recording) -> None:
        """Compare the gradients of all ranks with those that other ranks compute.

        Args:
            batch: of the pass, on this rank.
            recording: of the pass.

        Raises:
            CorruptedError: they differ; the same on every rank.
        """
        world = self._world
        checkers = draw_checkers(self._replica.context.seed, batch.step, self._hardware)
        checker, owner = checkers[world.rank], checkers.index(world.rank)
        samples = {n: a for n, a in batch._asdict().items() if isinstance(a, np.ndarray)}
        sent = {**samples, "digests": self._own_digests(recording)}
        received = exchange_arrays(world, sent, checker, owner)
        original = received.pop("digests")
        found, _ = self._compute(owner, batch, received, recording)
        different = world.all_gather_array(np.array([(found != original).any()])).reshape(-1)
        if not different.any():
            return
        pairs = world.all_gather_json([original.tolist(), found.tolist()])
        for checker in np.flatnonzero(different).tolist():
            owner = checkers.index(checker)
            again = self._compute(owner, batch, broadcast_arrays(world, samples, owner), recording)
            difference = self._vote(owner, checker, pairs[checker], *again, recording)
            if difference is not None:
                when = f"before the update of step {batch.step + 1}"
                text = difference_text(difference, self._ranks, when, "from repeated computations")
                raise CorruptedError(text)

    def _own_digests(self, recording: Recording) -> Digests:
        """Return the digests of what this rank has computed."""
        gradients = [digests.compute() for digests in self._digests]
        return np.concatenate([*gradients, _digests_of(recording.rows)])

    def _compute(
        self, owner: int, batch: Batch, arrays: dict[str, NDArray[Any]], recording: Recording
    ) -> tuple[Digests, NDArray[np.bool_]]:
        """Compute the part of a rank; return its digests, and whether their tensors are finite.

        Args:
            owner: the rank.
            batch: of the pass, on this rank.
            arrays: those of the batch of rank `owner`.
            recording: of the pass.
        """
        again, world = self._again, self._world
        one, plan = again.plan.micro_shards, self._replica.plan
        assert one is not None
        assert plan.micro_shards is not None
        for name, values in self._replica.statistics.items():
            again.statistics[name] = values
        counts = plan.micro_shards.counts
        shards = MicroShards.of_rank(one.total, owner, world.size, plan.passes, counts)
        shards = shards.of_pass(batch.part)
        offsets = shards.offsets(batch.global_count)
        values_of: dict[str, Any] = {"x": None, **arrays}
        samples = batch._replace(**values_of)
        rows: list[list[NDArray[np.float64]]] = []

        def gradient(shard: int) -> NDArray[Any]:
            again.context.part = shard  # Selects the micro-shard, see `MicroShards.of_pass`.
            start, stop = offsets[shard - shards.start :][:2]
            again.load(samples.part_of(int(start), int(stop)))
            passed, again.sum_statistics = recording.replayed()
            again.run()
            rows.append(passed)
            return np.array(again.flat_gradients)

        digests, finite = [], []
        for first, last in shards.subtrees:
            gradients: Iterator[NDArray[Any]] = map(gradient, range(first, last))
            leaves = [(shard, shard + 1) for shard in range(first, last)]
            (total,) = add_in_order(gradients, merge_table(one.total, leaves))
            again.flat_gradients[:] = total
            digests.append(self._digests_again.compute())
            finite.append(self._digests_again.are_finite())
        sums = [np.concatenate(each) for each in zip(*rows, strict=True)]
        finite.append(np.array([np.isfinite(each).all() for each in sums], bool))
        return np.concatenate([*digests, _digests_of(sums)]), np.concatenate(finite)

    def _vote(
        self,
        owner: int,
        checker: int,
        pair: Sequence[Sequence[int]],
        now: Digests,
        finite: NDArray[np.bool_],
        recording: Recording,
    ) -> Difference | None:
        """Return which ranks are wrong; None if only tensors differ that are not finite.

        Args:
            owner, checker: the ranks whose digests differ.
            pair: the digests of these two ranks.
            now, finite: what this rank has computed after them.
            recording: of the pass.
        """
        world, (first, second) = self._world, (np.array(each, np.uint64) for each in pair)
        computed: dict[tuple[int, ...], Digests] = {(owner,): first, (checker, checker): second}
        compared = np.flatnonzero(world.all_gather_array(finite).any(axis=0))
        for rank, digests in enumerate(world.all_gather_array(now)):
            if self._hardware[rank] == self._hardware[owner]:
                computed[rank, rank, rank] = digests
        num_sums, gradients = len(recording.rows), self._digests_again.tensors
        tensors = [*gradients] * ((len(first) - num_sums) // len(gradients))
        tensors += [
            Tensor(STEP_SUMS, f"batch statistics {i + 1} of {num_sums}") for i in range(num_sums)
        ]
        return find_difference(
            [tensors[at] for at in compared.tolist()],
            {ranks: digests[compared] for ranks, digests in computed.items()},
        )


def open_replay(replica: Replica, world: World, spec: RunSpec) -> Replay | None:
    """Return what computes steps again; None if no step of the job is.

    Its kernels are bound, and not compiled.

    Args:
        replica, world, spec: as for `Replay`.
    """
    every, steps = spec.job.replay_every, spec.job.steps
    return Replay(replica, world, spec) if 0 < every <= steps else None


def _replica_of_one_shard(replica: Replica, batch_size: int) -> Replica:
    """Return a replica that computes one micro-shard with the parameters of another one."""
    shards = replica.plan.micro_shards
    assert shards is not None
    size = -(-batch_size // shards.total)
    backend, one = replica.backend, MicroShards(shards.total, 0, 1)
    plan = replace(with_micro_shards(replica.plan, backend, one, size), passes=1)
    own = replica.arrays
    arrays = FlatArrays(
        parameters=own.parameters,
        gradients=replica.memory.zeros((1, plan.layout.gradient_pitch), plan.dtype),
        state=own.state,
        squares=own.squares,
        is_owner=False,
        is_shared=True,
    )
    again = backend.make_replica(plan, seed=replica.context.seed, arrays=arrays, compiles=False)
    if isinstance(replica, CropWindowReplica) and replica.image_format is not None:
        assert isinstance(again, CropWindowReplica)
        again.share_cached_images(replica)
    return again


def _digests_of(sums: Sequence[NDArray[np.float64]]) -> Digests:
    """Return a digest of the rows of each sum of batch statistics."""
    kernels = [numpy_digests(each.reshape(-1), np.array([0, 2 * each.size]), 0) for each in sums]
    return np.array([compute()[0] for compute in kernels], np.uint64)
