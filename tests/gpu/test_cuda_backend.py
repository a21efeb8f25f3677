"""What the unit tests show of the cuda backend on the emulator, on a GPU."""

from tests.unit.backends.test_cuda_backend import *  # noqa: F403
