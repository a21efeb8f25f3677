"""Update rules that scale the step of each layer by norms: LARS and LAMB, in host memory.

Before the update, the gradient of each layer is replaced by r · (g + λ w), where r depends on the
norms of the layer's weight and of its gradient, or of what a rule makes of it. The update is then
that of stochastic gradient descent (`applied_rule`). Ranks that share the update compute
norms as for clipping (`dptrain.backends.clipping`), so that they have the same bits for any number
of ranks and threads:

1. `LayerScaling.measure` stores the sums of squares of every 16 elements of a slice.
2. The ranks that share these sums wait for each other.
3. `layer_ratios` adds those of each weight; `LayerScaling.scale` multiplies the slice.

A GPU does the same for all layers in two kernels (``clipping.cu``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.plan.flat import ALIGNMENT
from dptrain.plan.optimizers import LAMB, LARS

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica
    from dptrain.plan.plan import Plan


class LayerScaling(NamedTuple):
    """The kernels that scale a slice of the gradient.

    Attributes:
        measure: prepares the slice for the update with a number, and stores the sums of squares of
            its parameters and gradients.
        scale: applies the ratios of all slots.
    """

    measure: Callable[[int], None]
    scale: Callable[[NDArray[np.float64]], None]


class SlotRange(NamedTuple):
    """The part of a slot that is in a slice, in elements from its start.

    Attributes:
        slot: its number.
        start, stop: the elements, with the padding after the slot.
        decay: λ of the parameter.
        rate_factor: by which its learning rate is multiplied.
    """

    slot: int
    start: int
    stop: int
    decay: float
    rate_factor: float


def slot_ranges(plan: Plan, elements: slice) -> Iterator[SlotRange]:
    """Yield the slots of a slice of the flat arrays, which starts and stops at multiples of 16."""
    slots = plan.trained.slots
    for index, slot in enumerate(slots):
        end = slots[index + 1].start if index + 1 < len(slots) else plan.trained.size
        start, stop = max(slot.start, elements.start), min(end, elements.stop)
        if start < stop:
            decay, factor = plan.optimizer.decay_of(slot.parameter), slot.parameter.rate_factor
            yield SlotRange(index, start - elements.start, stop - elements.start, decay, factor)


def ratio_sources(plan: Plan) -> list[int]:
    """Return the slot whose norms determine the ratio of each slot; −1 for a ratio of 1.

    It is the slot itself if it is a weight, which has at least two dimensions, and that of the
    weight of its layer if it is a bias. Parameters of normalisations have a ratio of 1.
    """
    weights: dict[str, int] = {}
    for index, slot in enumerate(plan.trained.slots):
        if len(slot.parameter.shape) > 1:
            weights.setdefault(slot.node.name, index)
    return [
        index if len(slot.parameter.shape) > 1 else weights.get(slot.node.name, -1)
        for index, slot in enumerate(plan.trained.slots)
    ]


def layer_ratios(plan: Plan, squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ratio of each slot.

    Args:
        plan: with a rule that scales layers.
        squares: (2, size / 16), sums of squares of all parameters and gradients. NumPy adds those
            of a slot in an order that depends on their number alone.
    """
    rule = plan.optimizer
    assert isinstance(rule, LARS | LAMB)
    everything = slice(0, plan.trained.size)
    of_slots = []
    for _, start, stop, decay, _ in slot_ranges(plan, everything):
        norms = np.sqrt(squares[:, start // ALIGNMENT : stop // ALIGNMENT].sum(axis=1)).tolist()
        of_slots.append(rule.ratio(norms[0], norms[1], decay))
    return np.array([of_slots[k] if k >= 0 else 1.0 for k in ratio_sources(plan)])


def numpy_scaling(
    replica: Replica, elements: slice, squares: Sequence[NDArray[np.float64]]
) -> LayerScaling:
    """Return the kernels by NumPy.

    Args:
        replica: has the flat arrays.
        elements: the slice.
        squares: receive the sums of squares of its parameters and gradients.
    """
    rule, ranges = replica.plan.optimizer, list(slot_ranges(replica.plan, elements))
    w, g = replica.flat_parameters[elements], replica.flat_gradients[elements]
    state = {name: flat[elements] for name, flat in replica.flat_state.items()}

    def measure(number: int) -> None:
        if isinstance(rule, LAMB):
            m, v = state["first_moment"], state["second_moment"]
            m[:] = rule.beta1 * m + (1.0 - rule.beta1) * g
            v[:] = rule.beta2 * v + (1.0 - rule.beta2) * g * g
            mean, square = m / (1.0 - rule.beta1**number), v / (1.0 - rule.beta2**number)
            g[:] = mean / (np.sqrt(square) + rule.epsilon)
            for _, start, stop, decay, _ in ranges:
                g[start:stop] += decay * w[start:stop]
        for array, sums in zip((w, g), squares, strict=True):
            _sum_squares(array, sums)

    def scale(ratios: NDArray[np.float64]) -> None:
        adds_decay = isinstance(rule, LARS)
        for slot, start, stop, decay, _ in ranges:
            d: NDArray[Any] = g[start:stop]
            g[start:stop] = ratios[slot] * (d + decay * w[start:stop] if adds_decay else d)

    return LayerScaling(measure, scale)


def _sum_squares(array: NDArray[Any], sums: NDArray[np.float64]) -> None:
    np.sum(np.square(array, dtype=np.float64).reshape(-1, ALIGNMENT), axis=1, out=sums)
