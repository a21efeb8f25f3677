"""One tile of each kind for general matrix products, for tests of something else.

The emulator compiles each kernel for each tile, vector width and epilogue, which takes 0.3 s.
`test_cuda_gemm_tiles` tests every tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dptrain.backends.cuda import gemm_tiles, weighted
from dptrain.backends.cuda.gemm_tiles import TENSOR_TILES, TF32X3_TILES, THREAD_TILES, GemmConfig

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
