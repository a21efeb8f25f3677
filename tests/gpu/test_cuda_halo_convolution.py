"""Every way to cut convolutions by windows, which few samples do not choose, on a GPU."""

import pytest
from tests.unit.backends.test_cuda_windows import (  # noqa: F401
    test_every_way_gives_the_same,
    test_lanes_that_share_random_numbers_drop_what_is_to_be_dropped,
)


@pytest.fixture
def in_random_order() -> None:
    """They are."""
