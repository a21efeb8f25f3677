"""Run the unit tests of the cuda backend on a GPU instead of the emulator."""

from tests.unit.backends.cuda.test_cuda_backend import *  # noqa: F403
