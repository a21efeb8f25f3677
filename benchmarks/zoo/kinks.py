"""Kinks: points at which the slope of a function changes, so that rounding decides a gradient.

At 0 of ReLU, or if two elements of a window of max pooling are nearly equal, a gradient has two
values. Whether a difference comes from this alone can be shown: PyTorch in float64 computes the
other value if the element is moved across the kink by as little as rounding moves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

MARGIN = 16.0
"""Distance of an element from a kink that counts as rounding, relative to the largest error of
PyTorch in float32 in the same channel of the same call: other algorithms round otherwise."""

TRIALS = 100
"""Elements that are tried at most, those of the last calls first."""

POINTS = {
    "relu": (0.0,), "relu6": (0.0, 6.0), "leaky_relu": (0.0,), "prelu": (0.0,), "abs": (0.0,),
    "hardswish": (-3.0, 3.0), "hardsigmoid": (-3.0, 3.0), "hardtanh": (), "clamp": (),
    "max_pool2d": (),
}  # fmt: skip
"""Kinks of functions by their names in PyTorch; bounds of ``hardtanh`` and ``clamp`` are arguments,
and those of pooling are differences of elements."""


@dataclass(frozen=True, eq=False)
class Kink:
    """An element near a kink.

    Attributes:
        call: number of the call of a function of `POINTS`.
        index: flat index in the input.
        move: what is added to move it across.
        crossed: whether it is on the other side in float32.
        distance: from the kink, relative to the largest that counts as near.
    """

    call: int
    index: int
    move: float
    crossed: bool
    distance: float


class Kinks(TorchFunctionMode):
    """Records the inputs of functions with kinks, or finds the elements near a kink.

    Args:
        moves: elements that are moved across.
        single: `inputs` of a run in float32. If they are passed, this run in float64 adds the
            elements near a kink to `near`.

    Attributes:
        computed: weights of convolutions that the module computes from parameters.
        first_uses: number of calls before the first use of a parameter or of a weight that a module
            computes, by `id`.
    """

    def __init__(self, moves: Collection[Kink] = (), single: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.inputs, self.near = list[Any](), list[Kink]()
        self.first_uses, self.computed = dict[Any, int](), list[Any]()
        self._moves, self._single, self._num_calls = moves, single, 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "").strip("_")
        if name == "conv2d" and not args[1].is_leaf:
            args[1].retain_grad()
            self.computed.append(args[1])
            self.first_uses[id(args[1])] = self._num_calls
        for each in (*args, *kwargs.values()):
            if isinstance(each, nn.Parameter):
                self.first_uses.setdefault(id(each), self._num_calls)
        if name not in POINTS or not isinstance(args[0], torch.Tensor):
            return function(*args, **kwargs)
        call, x = self._num_calls, args[0].detach()
        self._num_calls += 1
        if self._single is not None:
            self._find(call, name, x, args[1:], kwargs)
        elif not self._moves:
            self.inputs.append(x.clone())
        moves = [each for each in self._moves if each.call == call]
        if moves:
            change = torch.zeros_like(x).flatten()
            for each in moves:
                change[each.index] = each.move
            # What works in place also changes what others read.
            in_place = function.__name__.endswith("_") or kwargs.get("inplace", False)
            add = args[0].add_ if in_place else args[0].add
            args = (add(change.reshape(x.shape)), *args[1:])
        return function(*args, **kwargs)

    def _find(self, call: int, name: str, x: Any, args: Any, kwargs: Any) -> None:
        """Add the elements near a kink of a call."""
        assert self._single is not None
        single = self._single[call].to(x.dtype)
        others = [axis for axis in range(x.ndim) if axis != 1]
        limit = MARGIN * (single - x).abs().amax(others, keepdim=True)
        if name == "max_pool2d":
            found = [_near_in_windows(x, single, limit, *args, **kwargs)]
        else:
            points = POINTS[name] or [each for each in (*args, *kwargs.values())
                                      if isinstance(each, int | float)][:2]  # fmt: skip
            found = [_near(x, single, limit, each) for each in points]
        for columns in found:
            values = zip(*(each.tolist() for each in columns), strict=True)
            self.near += [Kink(call, *each) for each in values]


def _near(x: Any, single: Any, limit: Any, point: float) -> Sequence[Any]:
    """Return index, move, crossed and distance of the elements near a point."""
    distance = ((x - point).abs() / limit).flatten()
    (found,) = (distance <= 1.0).nonzero(as_tuple=True)
    there = x.flatten()[found]
    crossed = (there > point) != (single.flatten()[found] > point)
    return found, 2.0 * (point - there), crossed, distance[found]


def _near_in_windows(
    x: Any, single: Any, limit: Any, kernel_size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> Sequence[Any]:  # fmt: skip
    """Return as `_near` the second elements of windows whose first one is nearly equal."""
    kernel, step, pads, dilations = (
        (each, each) if isinstance(each, int) else tuple(each)
        for each in (kernel_size, stride or kernel_size, padding, dilation)
    )
    outputs = nn.functional.max_pool2d(x, kernel, step, pads, dilations, ceil_mode).shape[2:]
    reach = [dilations[axis] * (kernel[axis] - 1) + 1 for axis in (0, 1)]
    sides = list[int]()
    for axis in (1, 0):
        size = (outputs[axis] - 1) * step[axis] + reach[axis]
        sides += [pads[axis], size - pads[axis] - x.shape[2 + axis]]

    def windows(values: Any) -> Any:
        """Return (N, C, P, Q, R·S), with -inf for padding."""
        padded = nn.functional.pad(values, sides, value=-torch.inf)
        for axis in (0, 1):
            padded = padded.unfold(2 + axis, reach[axis], step[axis])
        return padded[..., :: dilations[0], :: dilations[1]].flatten(-2)

    values, indices = windows(x).topk(2)
    gap, second = values[..., 0] - values[..., 1], indices[..., 1]
    distance = (gap / (2.0 * limit)).flatten()
    (found,) = ((distance <= 1.0) & (distance > 0.0)).nonzero(as_tuple=True)
    crossed = (windows(single).argmax(-1) == second).flatten()[found]
    positions = windows(torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape))
    index = positions.gather(-1, second[..., None]).flatten()[found].long()
    return index, 2.0 * gap.flatten()[found], crossed, distance[found]


@dataclass(frozen=True)
class Distance:
    """Distance between two gradients.

    Attributes:
        squares: sums of squares of differences by the number of calls before the first use of a
            parameter.
    """

    squares: Mapping[int, float]

    def __float__(self) -> float:
        return math.sqrt(sum(self.squares.values()))

    def exceeds(self, other: Distance, number: int, ratio: float) -> bool:
        """Return whether it is more than `ratio` times another one for some parameters."""
        return self.squares[number] > ratio**2 * other.squares[number]


SMOOTH = nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish
"""Functions of which `without_kinks` makes SiLU."""


def without_kinks(module: nn.Module) -> nn.Module:
    """Return a copy of a module with SiLU for functions with kinks, and means for maxima.

    Convolutions, normalisations and connections are the same, so errors of these stay. Functions
    that are no modules stay too.
    """
    module = deepcopy(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, SMOOTH):
                setattr(parent, name, nn.SiLU())
            elif isinstance(child, nn.MaxPool2d):
                window = child.kernel_size, child.stride, child.padding, child.ceil_mode
                setattr(parent, name, nn.AvgPool2d(*window))
    return module


def explain(
    distance: Callable[[frozenset[Kink]], Distance],
    near: Collection[Kink],
    rounding: Distance,
    ratio: float,
) -> frozenset[Kink]:
    """Return elements that make a distance small if they are moved across kinks.

    The gradient of a parameter that is used after a kink does not depend on it. Calls are therefore
    searched from the last to the first one, and those before which gradients agree have no kink
    that matters. Of the parameters that a kink changes, those that are used last decide whether it
    is crossed.

    Args:
        distance: from the gradients that PyTorch computes with elements moved.
        near: elements near kinks.
        rounding: distance of PyTorch in float32.
        ratio: the search ends when the distance is that many times `rounding`.
    """
    trials, by_call, moved = TRIALS, dict[int, list[Kink]](), frozenset[Kink]()
    for kink in sorted(near, key=lambda each: each.distance):
        by_call.setdefault(kink.call, []).append(kink)
    now, large = distance(moved), ratio / 3
    best = float(now), moved
    if best[0] > ratio * float(rounding):
        crossed = frozenset(each for each in near if each.crossed)
        now, moved = min(((now, moved), (distance(crossed), crossed)), key=lambda x: float(x[0]))
    for call in sorted(by_call, reverse=True):
        if float(now) <= ratio * float(rounding):
            break
        before = [call] if call in now.squares else [x for x in now.squares if x < call]
        if not any(now.exceeds(rounding, each, large) for each in before):
            continue
        tried = by_call[call][: max(trials, 0)]
        trials -= len(tried)
        gains = dict[Kink, tuple[float, int]]()
        for kink in tried:
            found = distance(moved ^ {kink}).squares
            changed = [each for each, square in rounding.squares.items()
                       if abs(found[each] - now.squares[each]) > 9.0 * square]  # fmt: skip
            if changed:
                last = max(changed)
                gains[kink] = found[last] / now.squares[last], last
        for kink, (_, last) in sorted(gains.items(), key=lambda each: each[1]):
            trial = distance(moved ^ {kink})
            if now.exceeds(rounding, last, large) and trial.squares[last] < now.squares[last]:
                now, moved = trial, moved ^ {kink}
        best = min(best, (float(now), moved), key=lambda each: each[0])
    return min(best, (float(now), moved), key=lambda each: each[0])[1]
