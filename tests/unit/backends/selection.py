"""Selection of the networks that each backend computes in each precision, and of their tier.

The product of all cases with all backends and precisions is large, and most of its elements test
what another one tests. A case has traits: the kinds of its layers, their options, and pairs of
layers that a backend may fuse. A few cases that together have all traits stand for all cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from dptrain.network import (
    AveragePool2d,
    Conv2d,
    Flatten,
    Layer,
    MaxPool2d,
    Network,
    Node,
    ReLU,
    SumPool2d,
)
from dptrain.network.elementwise import Activation
from tests.unit.backends import cases
from tests.unit.backends.cases import Case
from tests.unit.backends.graph_cases import GRAPH_CASES

CASES = (*cases.CASES, *GRAPH_CASES)
VARIANTS = cases.variants()
"""Pairs of a backend and a precision."""
DETAILED = {*dict(reversed(VARIANTS)).items(), ("numba", "fp32-direct")}
"""Variants whose quick tier has cases with all traits: the first precision of each backend, and
algorithms of their own. The others have all kinds of layers there."""

QUICK_VARIANTS = {("reference", "fp64"), ("numba", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")}
"""Variants for which tests of a property, rather than of a case, are in the quick tier: those that
differ in their elementwise kernels."""

OWN_KINDS = {
    ("numba", "fp32-direct"): {"conv"},
    **{("cudnn", precision): {"conv", "dense"} for precision in ("fp32", "tf32", "bf16")},
}
"""Kinds of layers that a variant computes by kernels which no other variant has; all if missing."""

EMULATED = ("cuda", "cudnn")
"""Backends whose cases are divided between their precisions, because the emulator is slow."""

MANY = 32
"""Channels from which kernels divide them between threads or use vectors."""


@dataclass(frozen=True)
class Trial:
    """A case that a backend computes in a precision."""

    case: Case
    backend: str
    precision: str
    is_quick: bool

    @property
    def parameter(self) -> object:
        """The trial as a parameter of a test: case, backend, precision."""
        return marked(self.case, self.backend, self.precision, is_quick=self.is_quick,
                      name=f"{self.case.name}-{self.backend}-{self.precision}")  # fmt: skip


def marked(*values: object, name: str, is_quick: bool) -> object:
    """Return values of parameters that belong to the quick tier or to the parts."""
    return pytest.param(*values, id=name, marks=() if is_quick else pytest.mark.more)


def kinds(network: Network) -> frozenset[str]:
    """Return the kinds of the layers, without the first one, and of the loss."""
    layers = [layer.kind for layer in network.layers[1:] if not isinstance(layer, Flatten)]
    return frozenset([*(layers or [network.layers[0].kind]), network.loss.kind])


def kind_of(layer: Layer) -> str:
    """Return the kind of a layer for pairs; functions that no backend fuses are one kind."""
    is_function = isinstance(layer, Activation) and not isinstance(layer, ReLU)
    return "function" if is_function else layer.kind


def traits(case: Case) -> frozenset[str]:
    """Return what a case tests: kinds and options of layers, and pairs of layers."""
    nodes = case.network.nodes[1:]
    found = set(kinds(case.network))
    for node in nodes:
        found |= {f"{node.layer.kind}, {option}" for option in _options(node)}
        shape = node.input_shape
        found |= {f"{node.layer.kind}, many channels"} if shape[0] >= MANY else set()
    names = [kind_of(node.layer) for node in nodes if not isinstance(node.layer, Flatten)]
    found |= {f"{one}, then {other}" for one, other in itertools.pairwise(names)}
    return frozenset(found if case.network.is_chain else {*found, case.name})


def _options(node: Node) -> list[str]:
    """Return the options of a layer with windows that change how its kernels count pixels."""
    layer = node.layer
    if not isinstance(layer, Conv2d | MaxPool2d | AveragePool2d | SumPool2d):
        return []
    window = layer.window if isinstance(layer, Conv2d) else layer.windows
    (rows, columns), (down, right) = window, layer.strides
    pads = [number for pair in layer.pads(node.input_shape) for number in pair]
    options = {
        "1x1": window == (1, 1),
        "even window": rows % 2 == 0,
        "window not square": rows != columns,
        "stride": down > 1,
        "uneven stride": down != right,
        "overlap": down < rows,
        "gaps": down > rows,
        "padding": max(pads) > 0,
        "uneven padding": len(set(pads)) > 1,
        "wide padding": max(pads) > 1,
        "as large as the map": window == node.input_shape[1:],
    }
    if isinstance(layer, Conv2d):
        dilated = layer.dilations != (1, 1)
        options |= {
            "full padding": layer.padding == "full",
            "groups": layer.groups > 1,
            "one channel a group": layer.groups == layer.filters > 1,
            "groups with other filters": layer.groups > 1 and layer.filters != node.input_shape[0],
            "groups, stride": layer.groups > 1 and down > 1,
            "groups, uneven stride": layer.groups > 1 and down != right,
            "dilation": dilated,
            "dilation, stride": dilated and down > 1,
            "dilation, stride, common divisor": all(map(is_common, layer.dilations, layer.strides)),
            "groups, dilation": dilated and layer.groups > 1,
            "one channel a group, dilation": dilated and layer.groups == layer.filters > 1,
            "no bias": not layer.bias,
            "floor": layer.rounding == "floor",
            "many filters": layer.filters >= MANY,
        }
    return [name for name, holds in options.items() if holds]


def is_common(dilation: int, stride: int) -> bool:
    """Return whether a dilation and a stride have a common divisor above 1."""
    return math.gcd(dilation, stride) > 1


def cover(
    candidates: Iterable[Case], properties: Callable[[Case], Iterable[str]]
) -> list[Case]:  # fmt: skip
    """Return few cases that together have all properties of the candidates: each time the one with
    most properties that none before it has, and of these the smallest.
    """
    left = {case.name: (case, set(properties(case)), -_size(case)) for case in candidates}
    chosen = []
    while left:
        name = max(left, key=lambda name: (len(left[name][1]), left[name][2]))
        case, gained, _ = left.pop(name)
        if not gained:
            break
        chosen.append(case)
        for _, missing, _ in left.values():
            missing -= gained
    return chosen


def _size(case: Case) -> int:
    """Return the number of inputs of all layers, which the time on the emulator grows with."""
    return sum(math.prod(node.input_shape) for node in case.network.nodes) * case.batch_size


def each_kind() -> list[Case]:
    """Return few cases with all kinds of layers and losses."""
    return cover(CASES, lambda case: kinds(case.network))


def select(backend: str, precision: str) -> tuple[list[Case], list[Case]]:
    """Return the cases of the quick tier and those of the parts for a variant."""
    own = [
        case for case in CASES
        if kinds(case.network) & OWN_KINDS.get((backend, precision), kinds(case.network))
    ]  # fmt: skip
    quick = each_kind()
    if (backend, precision) in DETAILED:
        quick += cover(own, traits)
    if (backend, precision) == ("reference", "fp64"):
        quick = list(CASES)
    turns = [other for name, other in VARIANTS if name == backend] if backend in EMULATED else [""]
    start = turns.index(precision) if backend in EMULATED else 0
    names = {case.name for case in quick}
    more = {case.name for case in (*cover(own, traits), *own[start :: len(turns)])} - names
    return ([case for case in CASES if case.name in names],
            [case for case in CASES if case.name in more])  # fmt: skip


def trials() -> list[Trial]:
    """Return what is computed: each case by each backend, in one precision or more."""
    found = []
    for backend, precision in VARIANTS:
        quick, more = select(backend, precision)
        for chosen, is_quick in ((quick, True), (more, False)):
            found += [Trial(case, backend, precision, is_quick) for case in chosen
                      if case.is_implemented(backend)]  # fmt: skip
    return found
