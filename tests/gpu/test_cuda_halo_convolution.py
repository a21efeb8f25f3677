"""Run the tile configurations that small batches do not select, on a GPU."""

import pytest

from tests.unit.backends.cuda.test_cuda_halo_convolution import (  # noqa: F401
    test_every_tile_configuration_computes_the_same,
    test_lanes_that_share_random_numbers_drop_the_right_elements,
    without_patches,
)


@pytest.fixture
def in_random_order() -> None:
    """A GPU needs no emulated order of blocks and threads."""
