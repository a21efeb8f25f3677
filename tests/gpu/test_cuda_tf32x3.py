"""Run the tests of fp32 on tensor cores on a GPU instead of the emulator."""

from tests.unit.backends.cuda.test_cuda_tf32x3 import *  # noqa: F403
