"""Run the kernels of large dense layers and of pooled first layers on a GPU."""

import pytest

from tests.unit.backends.cuda.test_cuda_dense_wgmma import (  # noqa: F401
    small,
    test_every_phase_computes_what_the_general_kernels_do,
)
from tests.unit.backends.cuda.test_cuda_few_channel_wgrad import (  # noqa: F401
    test_the_gradient_is_that_of_the_other_kernels,
)


@pytest.fixture
def in_random_order() -> None:
    """A GPU needs no emulated order of blocks and threads."""
