"""Run the convolutions by TMA and wgmma on a GPU."""

import pytest

from tests.unit.backends.test_cuda_wgmma_convolution import (  # noqa: F401
    always,
    test_every_phase_computes_what_the_gathering_kernels_do,
)


@pytest.fixture
def in_random_order() -> None:
    """A GPU needs no emulated order of blocks and threads."""
