"""Kernels for processors with narrower vectors than this one's."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dptrain.backends.numba.vector import AVX2, AVX512, PORTABLE, registers

HERE = Path(__file__).parent

PROCESSORS = {"portable": ("generic", "")}
if platform.machine() in ("x86_64", "AMD64"):
    PROCESSORS["AVX2"] = ("haswell", "+avx,+avx2,+fma")


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("+sse2,+avx,+avx2,+fma,+avx512f", AVX512),
        ("+sse2,+avx,+avx2,+fma,-avx512f", AVX2),
        ("+sse2,+avx,+avx2,-fma", PORTABLE),
        ("+neon", PORTABLE),
        ("", PORTABLE),
    ],
)
def test_registers_follow_the_processor(features, expected):
    assert registers(features) == expected


@pytest.mark.parametrize("processor", PROCESSORS)
def test_kernels_are_right_on(processor, tmp_path):
    """The tests that meet every vector operation pass when compiled for another processor."""
    name, features = PROCESSORS[processor]
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "DPTRAIN_CACHE_DIR": str(tmp_path),
    }
    files = [str(HERE / f"test_numba_{part}.py") for part in ("convolution", "matmul")]
    chosen = "(pooled and 2/2) or (pooled and 3/2 and wide) or (input and 32 and 129)"
    command = [sys.executable, "-m", "pytest", "-q", "-k", chosen, "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout, done.stdout
