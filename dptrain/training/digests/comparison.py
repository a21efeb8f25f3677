"""Comparisons of digests over the ranks.

Replicas that are separate hold the same bits after every update. Every `digest_every` steps, and
before each checkpoint and snapshot, each rank computes the digest of its whole state, and one
all-gather of 24 bytes compares them. Only if they differ, a second one sends the digest of each
tensor. The job then ends on all ranks before anything is written.

If the ranks of a node share the parameters, the node is one replica of them: the digests of the
slices that its ranks update are added. Running statistics belong to each rank. With the strategy
``central`` the optimizer state is on rank 0 alone and is not compared. Replicas on different models
of processors or devices are not compared with each other, because they may round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from dptrain.backends.digests import PARAMETERS, STATISTICS, StateDigests, Tensor
from dptrain.comm.world import AgreedError, CorruptedError
from dptrain.errors import UserError
from dptrain.texts import command_line
from dptrain.training.callbacks import Callback
from dptrain.training.digests.differences import (
    Difference,
    Digests,
    difference_text,
    find_difference,
    hardware,
    merged,
)
from dptrain.training.digests.guard import CorruptedSliceError
from dptrain.training.persistence.snapshots import newest_step

if TYPE_CHECKING:
    from dptrain.training.engines import StepResult
    from dptrain.training.job import Job
    from dptrain.training.trainer import Trainer

_Part = tuple[tuple[Tensor, ...], Callable[[], Digests], list[tuple[int, ...]]]
"""Tensors, what computes their digests on this rank, and the ranks of each replica of them."""


class StateComparison:
    """Compares the replicas of a job.

    Args:
        job: with several ranks of the same backend.
    """

    def __init__(self, job: Job) -> None:
        replica, world = job.replica, job.world
        self.replica, self._world = replica, world
        own = [] if job.spec.batch_norm == "rank" else [STATISTICS]
        nodes = [tuple(node) for node in world.nodes().ranks]
        alone: list[tuple[int, ...]] = [(rank,) for rank in range(world.size)]
        everything = StateDigests(replica, arrays=own)
        self._parts: list[_Part] = [(everything.tensors, everything.compute, alone)]
        if not replica.arrays.is_shared:
            state = () if job.spec.strategy == "central" else tuple(replica.flat_state)
            compared = StateDigests(replica, arrays=[PARAMETERS, *state])
            self._parts.append((compared.tensors, compared.compute, alone))
        elif len(nodes) > 1:
            layout = slice(0, replica.plan.trained.size)
            names = StateDigests(replica, layout).tensors
            slices = [
                StateDigests(replica, each) for each in job.engine.gradient_sum.updated_slices
            ]
            self._parts.append((names, lambda: _added(names, slices), nodes))
        self._hardware = [hardware(rank) for rank in job.run_spec.ranks]

    def compare(self, error: CorruptedSliceError | None = None) -> Difference | None:
        """Return how the replicas differ, the same on every rank; all ranks call this.

        Args:
            error: what this rank has found in state with one copy.

        Raises:
            CorruptedError: the error of any rank, if the replicas are equal; on every rank.
        """
        own = [compute() for _, compute, _ in self._parts]
        totals = [np.sum(each, dtype=np.uint64) for each in own]
        has_error = np.uint64(error is not None)
        gathered = self._world.all_gather_array(np.array([*totals, has_error], np.uint64))
        for part, (_, _, replicas) in enumerate(self._parts):
            one = [Tensor("", "")]
            if self._find(one, gathered[:, part : part + 1], replicas) is not None:
                break
        else:
            if gathered[:, -1].any():
                self._raise_any(error)
            return None
        differences = []
        for digests, (tensors, _, replicas) in zip(own, self._parts, strict=True):
            found = self._find(tensors, self._world.all_gather_array(digests), replicas)
            differences += [] if found is None else [found]
        assert differences, "digests of replicas differ, and those of their tensors do not"
        return merged(differences)

    def _raise_any(self, error: CorruptedSliceError | None) -> NoReturn:
        """Raise the error of the first rank that has one, on every rank."""
        errors = self._world.all_gather_json(None if error is None else str(error))
        raise CorruptedError(str(AgreedError.of(errors)))

    def _find(
        self, tensors: Sequence[Tensor], digests: Digests, replicas: Sequence[tuple[int, ...]]
    ) -> Difference | None:
        """Return the differences between replicas of the same hardware.

        Args:
            tensors: the names of the digests.
            digests: uint64 (ranks, tensors).
            replicas: the ranks of each replica, whose digests are added.
        """
        kinds: dict[tuple[str, ...], dict[tuple[int, ...], Digests]] = {}
        for ranks in replicas:
            kind = tuple(sorted({self._hardware[rank] for rank in ranks}))
            sums = np.asarray(np.sum(digests[list(ranks)], axis=0, dtype=np.uint64))
            kinds.setdefault(kind, {})[ranks] = sums
        found = [find_difference(tensors, each) for each in kinds.values()]
        return merged([each for each in found if each is not None])


def _added(names: Sequence[Tensor], slices: Sequence[StateDigests]) -> Digests:
    """Return the digests of tensors of which this rank has slices."""
    sums = dict.fromkeys(names, 0)
    for part in slices:
        for tensor, value in zip(part.tensors, part.compute().tolist(), strict=True):
            sums[tensor] = (sums[tensor] + value) % 2**64
    return np.array(list(sums.values()), np.uint64)


class StateChecks(Callback):
    """Check the state every `JobSpec.digest_every` steps, and before it is written.

    Args:
        writers: callbacks that write the state; they follow this one.
    """

    def __init__(self, writers: Sequence[Callback]) -> None:
        self._writers = writers
        self._comparison: StateComparison | None = None

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self.is_due(trainer, trainer.step) or trainer.is_last_step:
            self.compare(trainer.job, trainer.step)

    def is_due(self, trainer: Trainer, step: int) -> bool:
        """Return whether the state is checked after step number `step`, counted from 1."""
        every = trainer.job.spec.digest_every
        if not every:
            return False
        return not step % every or any(
            each.needs_parameters(trainer, step) for each in self._writers
        )

    def compare(self, job: Job, step: int) -> None:
        """Check the state after step number `step`, counted from 1; all ranks call this.

        Raises:
            CorruptedError: replicas differ, or state with one copy has changed; on every rank.
        """
        if not _compares(job):
            job.engine.check_state()
            return
        error = None
        try:
            job.engine.check_state()
        except CorruptedSliceError as caught:
            error = caught
        if self._comparison is None or self._comparison.replica is not job.replica:
            self._comparison = StateComparison(job)
        found = self._comparison.compare(error)
        if found is not None:
            raise CorruptedError(difference_text(found, job.run_spec.ranks, f"after step {step}"))

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return trainer.job.world.size > 1 and self.is_due(trainer, step)

    def close(self) -> None:
        self._comparison = None


def _compares(job: Job) -> bool:
    """Return whether the replicas of a job are expected to hold the same bits."""
    has_several = job.world.size > 1 and bool(job.spec.digest_every)
    return has_several and not job.is_mixed and not job.is_alone


@contextmanager
def explaining_corruption(job: Job) -> Iterator[None]:
    """Add to errors of silent corruption what to do; rank 0 writes them to the run directory."""
    try:
        yield
    except (CorruptedError, CorruptedSliceError) as error:
        message = f"{error}; {_advice(job)}"
        if job.run is not None:
            with suppress(UserError):
                job.run.write_failure(message)
        raise type(error)(message) from None


def _advice(job: Job) -> str:
    """Return what to do, with the newest state that was written: it was checked before."""
    step = -1 if job.run_path is None else newest_step(job.run_path)
    if job.run_path is None or step < 0:
        return "no state was written before; train again without this hardware"
    command = command_line("train", "--resume", job.run_path)
    return f"{command} continues after step {step}; leave this hardware out"
