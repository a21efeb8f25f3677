"""The algorithms of a convolution on a GPU, and the selection among them.

To add an algorithm, add a module that defines `supports`, `estimate` and `bind`, and a row here
(docs/developers/adding-a-layer.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dptrain.backends.cuda.convolution import gather_convolution
from dptrain.backends.cuda.convolution.bound_convolution import Case, Extra
from dptrain.backends.cuda.convolution.few_channels import (
    few_channel_tiles,
    few_channel_wgrad_tiles,
)
from dptrain.backends.cuda.convolution.few_channels.few_channel_tiles import FewChannelTile
from dptrain.backends.cuda.convolution.few_channels.few_channel_wgrad_tiles import (
    FewChannelWgradTile,
)
from dptrain.backends.cuda.convolution.halo import halo_convolution, wgrad_tiles
from dptrain.backends.cuda.convolution.halo.halo_tiles import fills_halo_tiles
from dptrain.backends.cuda.convolution.halo.implicit_gemm_tiles import ImplicitGemmTile
from dptrain.backends.cuda.convolution.halo.wgrad_tiles import WgradTile, fills_wgrad_tiles
from dptrain.backends.cuda.convolution.wgmma import wgmma_convolution
from dptrain.backends.cuda.dense.algorithms import H200
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, GemmTile
from dptrain.backends.cuda.dense.wgmma_gemm_tiles import WgmmaTile
from dptrain.backends.cuda.measured import measured_first, measured_name
from dptrain.backends.cuda.weighted import separate_epilogue
from dptrain.backends.replica import Kernel
from dptrain.plan.lowering import Group, Phase, Setting
from dptrain.plan.selection import MEASURED, Algorithm, Choice, Gain, fastest, pick, rank

PRODUCTS = Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT

Factors = Mapping[str, float]
"""Factors by precision."""


@dataclass(frozen=True)
class Product(Algorithm[Case]):
    """An algorithm for products of a convolution.

    `bind` has the arguments (operation, phase, configuration).

    Attributes:
        config: returns the tile configuration and split-K of a configuration.
        buffers: returns the buffers in addition to those of every convolution.
        sum_rows: returns the rows of sums by channel that the kernel can write with its result; 0
            if it cannot.
        joins_shards: returns whether one launch can compute the weight gradients of several
            micro-shards.
        prepare: returns the kernel that writes the operands `Extra.prepared` of some phases, from
            the operation and their configurations.
    """

    config: Callable[[Case, Any], GemmConfig] = lambda case, configuration: configuration
    buffers: Callable[[Case, Any], Extra] = lambda case, configuration: Extra()
    sum_rows: Callable[[Case, Any], int] = lambda case, configuration: 0
    joins_shards: Callable[[Case], bool] = lambda case: True
    prepare: Callable[[Any, Mapping[Phase, Any]], Kernel] | None = None


def fitted(
    estimate: Callable[[Case], Sequence[tuple[float, Any]]], factors: Mapping[Phase, Factors]
) -> Callable[[Case], Sequence[tuple[float, Any]]]:
    """Return estimates that can be compared with those of other algorithms.

    The estimates of each algorithm were fitted to the layers of few networks. A factor is the
    geometric mean of measured times, divided by estimates, of 5,900 products of twelve networks
    with 32 and 256 samples (H200, 2026-11-30). In fp32 it is 1.

    Args:
        estimate: as in `Algorithm`.
        factors: in bf16 and tf32, by phase; phases without factors have 1.
    """

    def compared(case: Case) -> Sequence[tuple[float, Any]]:
        factor = factors.get(case.phase, {}).get(case.precision, 1.0)
        return [(factor * time, configuration) for time, configuration in estimate(case)]

    return compared


def _gathering(case: Case) -> Sequence[tuple[float, GemmConfig]]:
    """Return the estimated µs of gathering, comparable with those of halo tiles.

    Estimates of gathering were fitted to layers that do not fill halo tiles, and cannot be compared
    for the others, whose halo tiles were measured to be faster.
    """
    found = sorted(gather_convolution.estimate(case), key=lambda pair: pair[0])
    halo = HALO_GRADIENT if case.phase is Phase.BACKWARD_WEIGHT else HALO
    if halo.supports(case) and halo.estimate(case) and _fills_halo_tiles(case):
        return [(math.inf, config) for _, config in found]
    return found


def _fills_halo_tiles(case: Case) -> bool:
    """Return whether a layer fills halo tiles without zeros."""
    if case.phase is Phase.BACKWARD_WEIGHT:
        return fills_wgrad_tiles(case.view.folded(case.strides))
    return fills_halo_tiles(case.view, case.strides)


HALO = Product(
    ImplicitGemmTile.ALGORITHM, (Phase.FORWARD, Phase.BACKWARD_INPUT), halo_convolution.supports,
    fitted(halo_convolution.estimate, {
        Phase.FORWARD: {"bf16": 1.49, "tf32": 1.30},
        Phase.BACKWARD_INPUT: {"bf16": 1.27, "tf32": 1.33},
    }), halo_convolution.bind, config=halo_convolution.config_of,
    buffers=halo_convolution.buffers, sum_rows=halo_convolution.sum_rows,
    prepare=halo_convolution.prepare,
)  # fmt: skip

HALO_GRADIENT = Product(
    WgradTile.ALGORITHM, (Phase.BACKWARD_WEIGHT,), wgrad_tiles.supports,
    fitted(wgrad_tiles.estimate, {Phase.BACKWARD_WEIGHT: {"bf16": 1.22, "tf32": 1.06}}),
    wgrad_tiles.bind, config=wgrad_tiles.config_of,
)  # fmt: skip

GATHER = Product(
    GemmTile.ALGORITHM, PRODUCTS, gather_convolution.supports,
    fitted(_gathering, {
        Phase.FORWARD: {"bf16": 1.08, "tf32": 1.20},
        Phase.BACKWARD_WEIGHT: {"bf16": 0.90, "tf32": 1.09},
        Phase.BACKWARD_INPUT: {"bf16": 1.13, "tf32": 1.10},
    }), gather_convolution.bind,
)  # fmt: skip

CONVOLUTION: tuple[Product, ...] = (
    Product(
        FewChannelTile.ALGORITHM, (Phase.FORWARD,), few_channel_tiles.supports,
        fitted(few_channel_tiles.estimate, {Phase.FORWARD: {"bf16": 1.12, "tf32": 1.14}}),
        few_channel_tiles.bind, config=few_channel_tiles.config_of,
        serves=(Gain("model0", 1.05, f"batch size 32 in tf32, 15 pairs, {H200}"),),
    ),
    Product(
        FewChannelWgradTile.ALGORITHM, (Phase.BACKWARD_WEIGHT,), few_channel_wgrad_tiles.supports,
        fitted(few_channel_wgrad_tiles.estimate, {
            Phase.BACKWARD_WEIGHT: {"bf16": 1.45, "tf32": 1.12},
        }), few_channel_wgrad_tiles.bind,
        config=few_channel_wgrad_tiles.config_of,
        serves=(Gain("model1", 1.15, f"batch size 256 in tf32, 15 pairs, {H200}"),),
    ),
    GATHER,
    HALO,
    HALO_GRADIENT,
    Product(
        WgmmaTile.ALGORITHM, PRODUCTS, wgmma_convolution.supports,
        fitted(wgmma_convolution.estimate, {
            Phase.FORWARD: {"bf16": 1.40, "tf32": 1.13},
            Phase.BACKWARD_INPUT: {"bf16": 1.31, "tf32": 1.18},
        }), wgmma_convolution.bind, buffers=wgmma_convolution.buffers,
        sum_rows=wgmma_convolution.sum_rows, joins_shards=wgmma_convolution.joins_shards,
        prepare=wgmma_convolution.prepare,
        serves=(Gain("resnet18-cifar", 1.17, f"batch size 32 in tf32, 9 pairs, {H200}"),),
    ),
)  # fmt: skip
"""The algorithms. Estimates are in µs."""


def unpools_separately(group: Group, setting: Setting) -> bool:
    """Return whether the gradient before fused pooling is written to `dmaps`."""
    case = Case(group, setting, Phase.BACKWARD_INPUT)
    if not gather_convolution.unpools_separately(case):
        return False
    return choose(case).algorithm.name == GATHER.name


def writes_dz(group: Group, setting: Setting) -> bool:
    """Return whether a phase of its own writes the gradient before ReLU and epilogue to `dmaps`."""
    return separate_epilogue(group) is not None or unpools_separately(group, setting)


def case_of(group: Group, setting: Setting, phase: Phase) -> Case:
    """Return the case of a product."""
    if phase is Phase.BACKWARD_WEIGHT:
        return Case(group, setting, phase, writes_dz(group, setting))
    stores = phase is Phase.BACKWARD_INPUT and separate_epilogue(group) is not None
    return Case(group, setting, phase, stores)


def choose(case: Case) -> Choice[Case]:
    """Return the algorithm of a product and its configuration.

    The lowest estimate decides, unless `measured_name` names another configuration, or the plan's
    selection does. Whether the gradient before pooling is stored follows from the algorithm of the
    input gradient, and other products depend on it. So the plan's selection is limited to the
    configurations of this algorithm.
    """
    found = candidates(case)
    keeps = case.phase is Phase.BACKWARD_INPUT and case.pools
    table = (found[0].algorithm,) if keeps else CONVOLUTION
    ranked = partial(_ranked, table, case)
    return pick(found, ranked, case.setting.selection, case.group.stage(case.phase))


def candidates(case: Case) -> list[Choice[Case]]:
    """Return the fastest configuration of each algorithm that supports a case, the best first."""
    if measured_name(case.label, case.limits) is None:
        return fastest(CONVOLUTION, case.phase, case)
    found: dict[str, Choice[Case]] = {}
    for choice in _ranked(CONVOLUTION, case):
        found.setdefault(choice.algorithm.name, choice)
    return list(found.values())


def _ranked(table: Sequence[Algorithm[Case]], case: Case) -> list[Choice[Case]]:
    """Return all configurations, the measured one before the one with the lowest estimate."""
    found = ((each.estimate, each) for each in rank(table, case.phase, case))
    ordered = measured_first(found, case.label, case.limits)
    return [replace(choice, estimate=estimate) for estimate, choice in ordered]


def note(case: Case, choice: Choice[Case]) -> str:
    """Return the reason of a choice if it was measured or the only one; else an empty string."""
    if case.is_dilated:
        return "dilation {}×{}: {} only".format(*case.layer.dilations, choice.algorithm.name)
    return MEASURED if str(choice) == measured_name(case.label, case.limits) else ""
