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

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.digests import PARAMETERS, STATISTICS, StateDigests, Tensor, tensors_text
from dptrain.comm.world import AgreedError, CorruptedError
from dptrain.errors import UserError
from dptrain.training.callbacks import Callback
from dptrain.training.digests.guard import ADVICE, CorruptedSliceError
from dptrain.training.spec import RankSpec

if TYPE_CHECKING:
    from dptrain.training.engines import StepResult
    from dptrain.training.job import Job
    from dptrain.training.trainer import Trainer

Digests = NDArray[np.uint64]

_Part = tuple[tuple[Tensor, ...], Callable[[], Digests], list[tuple[int, ...]]]
"""Tensors, what computes their digests on this rank, and the ranks of each replica of them."""


class Difference(NamedTuple):
    """A difference between replicas.

    Attributes:
        ranks: of each tensor those of the replicas that differ; of all if no majority agrees.
        tensors: that differ, in the order of the state.
        is_minority: True if most replicas agree on each tensor, and `ranks` are the others.
    """

    ranks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    is_minority: bool


def find_difference(
    tensors: Sequence[Tensor], replicas: Mapping[tuple[int, ...], Digests]
) -> Difference | None:
    """Return how the digests of replicas differ; None if they are equal.

    Args:
        tensors: the names of the digests.
        replicas: digests, uint64 (tensors,), by the ranks of each replica.

    Example:
        >>> tensors = [Tensor("parameters", "fc.weight"), Tensor("parameters", "fc.bias")]
        >>> values = {(0,): [1, 2], (1,): [1, 3], (2,): [1, 2]}
        >>> find_difference(tensors, {ranks: np.array(d) for ranks, d in values.items()}).ranks
        (1,)
    """
    blamed: set[int] = set()
    different, is_minority = [], True
    for number, tensor in enumerate(tensors):
        values = {ranks: int(digests[number]) for ranks, digests in replicas.items()}
        counts = Counter(values.values())
        if len(counts) <= 1:
            continue
        common, count = counts.most_common(1)[0]
        has_majority = 2 * count > len(values)
        is_minority = is_minority and has_majority
        different.append(tensor)
        for ranks, value in values.items():
            blamed |= set(ranks) if not has_majority or value != common else set()
    return Difference(tuple(sorted(blamed)), tuple(different), is_minority) if different else None


def merged(differences: Sequence[Difference]) -> Difference | None:
    """Return differences as one; None if there are none."""
    if not differences:
        return None
    ranks = sorted({rank for each in differences for rank in each.ranks})
    tensors = dict.fromkeys(tensor for each in differences for tensor in each.tensors)
    return Difference(tuple(ranks), tuple(tensors), all(each.is_minority for each in differences))


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
        self._hardware = [_hardware(rank) for rank in job.run_spec.ranks]

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


def _hardware(rank: RankSpec) -> str:
    return f"{rank.processor}, {rank.device}, {rank.backend} {rank.precision}"


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
            raise_corrupted(job, found, step)

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return trainer.job.world.size > 1 and self.is_due(trainer, step)

    def close(self) -> None:
        self._comparison = None


def _compares(job: Job) -> bool:
    """Return whether the replicas of a job are expected to hold the same bits."""
    has_several = job.world.size > 1 and bool(job.spec.digest_every)
    return has_several and not job.is_mixed and not job.is_alone


def raise_corrupted(job: Job, found: Difference, step: int) -> NoReturn:
    """Raise the same error on every rank; rank 0 writes it to the run directory."""
    message = difference_text(found, job.run_spec.ranks, step)
    if job.run is not None:
        with suppress(UserError):
            job.run.write_failure(message)
    raise CorruptedError(message)


def difference_text(found: Difference, ranks: Sequence[RankSpec], step: int) -> str:
    """Return the line that names a difference, and what to do.

    Args:
        found: the difference.
        ranks: the hardware of all ranks.
        step: number of completed steps.
    """
    named = [f"rank {each} on {place_text(ranks[each])}" for each in found.ranks]
    others = "from those of the other ranks" if found.is_minority else "from each other"
    cause = (
        "its memory or arithmetic is wrong"
        if len(named) == 1
        else "the memory or arithmetic of at least one of them is wrong"
    )
    return (
        f"silent corruption: after step {step}, {tensors_text(found.tensors)} of "
        f"{' and '.join(named)} differ{'s' if len(found.tensors) == 1 else ''} {others}; {cause}; "
        f"{ADVICE}"
    )


def place_text(rank: RankSpec) -> str:
    """Return host and device of a rank."""
    return f"{rank.host} ({rank.processor if rank.device == 'cpu' else rank.device})"
