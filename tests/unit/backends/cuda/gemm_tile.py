"""One tile of each kind for general matrix products, for tests of something else.

The emulator compiles each kernel for each tile, vector width and epilogue, which takes 0.3 s.
`test_cuda_gemm_tiles` tests every tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dptrain.backends.cuda import weighted
from dptrain.backends.cuda.convolution.convolution import GatherConvolution
from dptrain.backends.cuda.convolution.halo.halo_convolution import HaloConvolution
from dptrain.backends.cuda.dense import gemm_tiles
from dptrain.backends.cuda.dense.gemm_tiles import (
    TENSOR_TILES,
    TF32X3_TILES,
    THREAD_TILES,
    GemmConfig,
)
from dptrain.backends.cuda.weighted import WeightedOperation
from dptrain.plan.lowering import Group, Setting

SMALL_TILES = THREAD_TILES[2], TENSOR_TILES[3], TF32X3_TILES[0]
"""Tiles of about the size that is selected for small products."""


def use_one_gemm_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the tiles that are selected; the kind of multiplication and split-K are kept."""

    def select(*product: Any, split: bool = False) -> GemmConfig:
        config = gemm_tiles.select_gemm_config(*product, split=split)
        kind = config.tile.tensor_cores, config.tile.tf32x3
        tile = next(tile for tile in SMALL_TILES if (tile.tensor_cores, tile.tf32x3) == kind)
        return replace(config, tile=tile)

    monkeypatch.setattr(weighted, "select_gemm_config", select)


def gather_first_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the first layer by kernels that gather its operands one by one.

    In the shared cases, it only shows the input and the gradient of the second layer. The macros of
    kernels with halo tiles and of vectors depend on the number of pixels, so that up to four
    kernels would be compiled for the first layer of each case.
    """
    supports, wgrad_tile = HaloConvolution.supports, GatherConvolution.wgrad_tile
    defines = WeightedOperation.defines.fget
    assert defines is not None

    def supports_group(group: Group, setting: Setting) -> bool:
        return group.head.index > 0 and supports(group, setting)

    def select_wgrad_tile(group: Group, setting: Setting) -> Any:
        return wgrad_tile(group, setting) if group.head.index > 0 else None

    def select_defines(self: WeightedOperation) -> dict[str, int]:
        scalar = {"IN_VECTOR": 1} if self.group.head.index == 0 else {}
        return defines(self) | scalar

    monkeypatch.setattr(HaloConvolution, "supports", supports_group)
    monkeypatch.setattr(GatherConvolution, "wgrad_tile", select_wgrad_tile)
    monkeypatch.setattr(WeightedOperation, "defines", property(select_defines))
