"""A training step of each precision under compute-sanitizer.

The emulator runs only the scalar branches of kernels. These tests check the others (wgmma, TMA,
mbarrier, cp.async, ldmatrix, dependent launch) for invalid accesses, races in shared memory and
invalid synchronisation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("sanitizer_step.py")
TIMEOUT_S = 900
FOUND = 99
"""Exit status of compute-sanitizer if it reports an error."""


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, which is part of the CUDA toolkit, or None."""
    folders = [Path(os.environ[name], "bin") for name in ("CUDA_PATH", "CUDA_HOME")
               if name in os.environ]  # fmt: skip
    folders.append(Path("/usr/local/cuda/bin"))
    search = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    return shutil.which("compute-sanitizer", path=search)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_a_training_step_is_clean(tool: str, precision: str) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed; it is part of the CUDA toolkit")
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20",
        sys.executable, str(SCRIPT), precision,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
