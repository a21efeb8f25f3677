"""Digests of the state of a replica: parameters, optimizer state and running statistics.

The digest of a tensor whose 32-bit words are x_i, at positions i of the whole state, is

    d = Σ_i x_i (2 i + 1)  mod 2⁶⁴

It is a sum of integers, so that it depends neither on the order of additions nor on threads, and
the digest of a tensor is the sum of those of its slices. Every odd number is invertible modulo 2⁶⁴.
For a state of fewer than 2³¹ words follows: any change within one word changes d, and so do any two
flipped bits, wherever they are, and any flipped bits of which an odd number has the lowest position
in its word. Changed words that are random cancel with a probability of at most 2⁻³². With more
words, multipliers repeat after 2³¹ words, and two flips of the same bit at that distance cancel.

Source: multilinear hashing, Carter and Wegman, "Universal classes of hash functions", 1979, with
multipliers that are not random, because errors of memory are no attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.plan.flat import CORRECT, LOSS, SUMS, FlatLayout

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica

WORD_BYTES = 4
"""Size of the words that are multiplied."""

PARAMETERS, STATISTICS = "parameters", "statistics"
"""Names of arrays of the state; the others are those of the optimizer state."""

GRADIENT, STEP_SUMS = "gradient", "sum over samples"
"""Names of what a step computes: the gradient, and sums such as the loss."""

MOST_NAMED = 3
"""Tensors that a message names."""

_BLOCK = 1 << 16
"""Words that NumPy multiplies at a time."""

DigestKernel = Callable[[], NDArray[np.uint64]]
"""Computes the digests of the parts of a flat array."""


class Tensor(NamedTuple):
    """A tensor of the state of a replica.

    Attributes:
        array: `PARAMETERS`, `STATISTICS`, the name of an array of the optimizer state, or
            `GRADIENT` or `STEP_SUMS`.
        name: of the parameter, of the statistics or of the sum.
    """

    array: str
    name: str


def tensors_text(tensors: Sequence[Tensor]) -> str:
    """Return the names of the first tensors.

    Example:
        >>> tensors_text([Tensor("parameters", "fc.weight"), Tensor("momentum", "fc.weight")])
        'fc.weight (parameters) and fc.weight (momentum)'
    """
    names = [f"{each.name} ({each.array})" for each in tensors[:MOST_NAMED]]
    if len(tensors) > MOST_NAMED:
        names.append(f"{len(tensors) - MOST_NAMED} more")
    return " and ".join(names)


def numpy_digests(flat: NDArray[Any], bounds: NDArray[np.int64], first: int) -> DigestKernel:
    """Return the kernel by NumPy.

    Args:
        flat: (n,), of a type of 4 or 8 bytes.
        bounds: int64 (parts + 1,), the first word of each part, and the end.
        first: position of the first word in the state.

    Example:
        >>> words = np.array([1, 2, 3], np.uint32)
        >>> numpy_digests(words, np.array([0, 1, 3]), 0)().tolist()
        [1, 21]
    """
    words = flat.view(np.uint32)

    def digest(start: int, stop: int) -> int:
        positions = np.arange(first + start, first + stop, dtype=np.uint64)
        odd = (2 * positions + 1) & np.uint64(0xFFFFFFFF)
        return int(np.sum(words[start:stop] * odd, dtype=np.uint64))

    def compute() -> NDArray[np.uint64]:
        sums = [
            sum(digest(at, min(at + _BLOCK, stop)) for at in range(start, stop, _BLOCK)) % 2**64
            for start, stop in pairwise(bounds.tolist())
        ]
        return np.array(sums, np.uint64)

    return compute


class StateDigests:
    """The digests of all tensors of a replica, or of slices of the trained ones.

    Args:
        replica: with training.
        elements: of the flat arrays of the parameters and of the optimizer state; start and stop
            are multiples of 16. None for all elements, and for the running statistics.
        arrays: the arrays of the state to use; None for all.

    Attributes:
        tensors: the tensors, in the order of their digests.
    """

    def __init__(
        self,
        replica: Replica,
        elements: slice | None = None,
        arrays: Sequence[str] | None = None,
    ) -> None:
        plan, first = replica.plan, 0
        flats = {PARAMETERS: (replica.flat_parameters, plan.layout)}
        flats |= {name: (flat, plan.trained) for name, flat in replica.flat_state.items()}
        if elements is None:
            flats[STATISTICS] = (replica.statistics.flat, plan.statistics)
        self.tensors: tuple[Tensor, ...] = ()
        self._kernels: list[DigestKernel] = []
        for array, (flat, layout) in flats.items():
            words = flat.dtype.itemsize // WORD_BYTES
            used = slice(0, layout.size) if elements is None else elements
            names, bounds = _parts(layout, used)
            if names and (arrays is None or array in arrays):
                self.tensors += tuple(Tensor(array, name) for name in names)
                kernel = replica.backend.bind_digests(
                    replica, flat[used], bounds * words, first + used.start * words
                )
                self._kernels.append(kernel)
            first += layout.size * words

    def compute(self) -> NDArray[np.uint64]:
        """Return the digests, uint64 (tensors,); waits for a device."""
        if not self._kernels:
            return np.zeros(0, np.uint64)
        return np.concatenate([compute() for compute in self._kernels])


def _parts(layout: FlatLayout, elements: slice) -> tuple[list[str], NDArray[np.int64]]:
    """Return the tensors in a slice, and the first element of each and the end, from its start.

    The padding after a tensor belongs to it.
    """
    names, starts = [], []
    ends = [slot.start for slot in layout.slots[1:]] + [layout.size]
    for slot, end in zip(layout.slots, ends, strict=True) if layout.slots else ():
        if max(slot.start, elements.start) < min(end, elements.stop):
            names.append(slot.name)
            starts.append(max(slot.start, elements.start) - elements.start)
    return names, np.array([*starts, elements.stop - elements.start], np.int64)


class GradientDigests:
    """The digests of the gradient of each tensor, of the loss, and of the correct predictions.

    Args:
        replica: with training.
        flat: a flat gradient of it, such as a row of `Replica.gradient_slots`.

    Attributes:
        tensors: the tensors, in the order of their digests.
    """

    def __init__(self, replica: Replica, flat: NDArray[Any]) -> None:
        layout = replica.plan.trained
        names, bounds = _parts(layout, slice(0, layout.size))
        sums = [layout.size + LOSS, layout.size + CORRECT]
        ends = np.array([*bounds[:-1], *sums, sums[-1] + 1], np.int64)
        self.tensors = tuple(Tensor(GRADIENT, name) for name in names)
        self.tensors += tuple(Tensor(STEP_SUMS, SUMS[each]) for each in (LOSS, CORRECT))
        words = flat.dtype.itemsize // WORD_BYTES
        self._flat, self._ends, self._memory = flat[: ends[-1]], ends, replica.memory
        self.compute = replica.backend.bind_digests(replica, self._flat, ends * words, 0)

    def are_finite(self) -> NDArray[np.bool_]:
        """Return whether all numbers of each tensor are finite, bool (tensors,)."""
        finite = np.isfinite(self._memory.download(self._flat))
        return np.logical_and.reduceat(finite, self._ends[:-1])
