"""Run the convolutions by TMA and wgmma on a GPU, with every tile."""

import pytest

from dptrain.backends.cuda.convolution.wgmma.wgmma_convolution_tiles import TILES
from dptrain.network import Network
from tests.unit.backends.cuda.test_cuda_wgmma_convolution import (
    BLOCK,
    PLAIN,
    always,  # noqa: F401
    assert_gradients_are_summed,
    assert_results_of_tile,
)


@pytest.mark.parametrize("number", range(len(TILES)))
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("network", [BLOCK, PLAIN], ids=["block", "plain"])
def test_every_tile_computes_what_the_gathering_kernels_do(
    network: Network, precision: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for splits in (False, True):
        assert_results_of_tile(network, precision, number, monkeypatch, splits=splits)


@pytest.mark.parametrize("number", range(len(TILES)))
def test_slices_of_patches_begin_in_every_column(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block reads so many slices of positions that some begin with a row of the map."""
    # In tf32, the operands of the weight gradient are rearranged before, and have no such slices.
    assert_results_of_tile(
        BLOCK, "bf16", number, monkeypatch, batch=12, samples=(12, 9), roundoffs=16.0
    )


@pytest.mark.parametrize("number", range(len(TILES)))
def test_gradients_are_summed_where_they_are_computed(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_gradients_are_summed(number, monkeypatch)
