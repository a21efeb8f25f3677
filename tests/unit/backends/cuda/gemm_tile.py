"""One tile of each kind for general matrix products, for tests of something else.

The emulator compiles each kernel for each tile, vector width and epilogue, which takes 0.3 s.
`test_cuda_gemm_tiles` tests every tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dptrain.backends.cuda.convolution import gather_convolution
from dptrain.backends.cuda.convolution.algorithms import Product
from dptrain.backends.cuda.dense import dense, gemm_tiles
from dptrain.backends.cuda.dense.gemm_tiles import (
    TENSOR_TILES,
    TF32X3_TILES,
    THREAD_TILES,
    GemmConfig,
)
from dptrain.backends.cuda.weighted import WeightedOperation
from tests.unit.backends.cuda.gpu_algorithms import HALO, HALO_GRADIENT, WGMMA, change

SMALL_TILES = THREAD_TILES[2], TENSOR_TILES[3], TF32X3_TILES[0]
"""Tiles of about the size that is selected for small products."""


def use_one_gemm_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the tiles that are selected; the kind of multiplication and split-K are kept."""

    def rank(*product: Any, split: bool = False) -> list[tuple[float, GemmConfig]]:
        ranked = gemm_tiles.rank_gemm_configs(*product, split=split)
        cost, config = min(ranked, key=lambda pair: pair[0])
        kind = config.tile.tensor_cores, config.tile.tf32x3  # type: ignore[attr-defined]
        tile = next(tile for tile in SMALL_TILES if (tile.tensor_cores, tile.tf32x3) == kind)
        return [(cost, replace(config, tile=tile))]

    for module in (gather_convolution, dense):
        monkeypatch.setattr(module, "rank_gemm_configs", rank)


def gather_first_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the first layer by kernels that gather its operands one by one.

    In the shared cases, it only shows the input and the gradient of the second layer. The macros of
    kernels with halo tiles and of vectors depend on the number of pixels, so that up to four
    kernels would be compiled for the first layer of each case.
    """
    defines = WeightedOperation.defines.fget
    assert defines is not None

    def later_layers(row: Product) -> Product:
        if row.name not in (HALO, HALO_GRADIENT, WGMMA):
            return row
        supports = row.supports
        return replace(row, supports=lambda case: case.group.head.index > 0 and supports(case))

    def select_defines(self: WeightedOperation) -> dict[str, int]:
        scalar = {"IN_VECTOR": 1} if self.group.head.index == 0 else {}
        return defines(self) | scalar

    change(monkeypatch, later_layers)
    monkeypatch.setattr(WeightedOperation, "defines", property(select_defines))
