"""Kernels for processors with shorter vectors than those of this machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from dptrain.backends.numba.convolution.microkernels import (
    ROW_GROUP,
    multiply_adjacent,
    multiply_in_place,
    multiply_spaced,
    multiply_streaming,
)
from dptrain.backends.numba.vector import (
    AVX2,
    AVX512,
    PORTABLE,
    compiled_registers,
    registers,
    transpose,
)

HERE = Path(__file__).parent

PROCESSORS = {"portable": ("generic", "", "0")}
"""Names and features of processors, and LLVM's optimisation level.

The portable kernels are compiled without optimisations, which halves the time. Their source differs
from that of other processors; the tests with AVX2 and on this machine compile with optimisations.
"""
if platform.machine() in ("x86_64", "AMD64"):
    PROCESSORS["AVX2"] = ("haswell", "+avx,+avx2,+fma", "3")


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


@njit
def _transposed(source, start, row, target, target_start, target_row, rows, columns):
    transpose(source, start, row, target, target_start, target_row, rows, columns)


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 17, 40])
@pytest.mark.parametrize("columns", [1, 7, 15, 16, 33])
def test_transpose(rows, columns):
    """It transposes the block and writes nothing else."""
    source = np.arange(2 + rows * (columns + 3), dtype=np.float32)
    target = np.full(5 + columns * (rows + 1), -1, np.float32)
    expected, after = target.copy(), 5 + np.arange(columns)[:, np.newaxis] * (rows + 1)
    block = source[2:].reshape(rows, columns + 3)[:, :columns]
    expected[after + np.arange(rows)] = block.T
    # The source ends with the block.
    source = source[: source.size - 3].copy()
    _transposed(source, 2, columns + 3, target, 5, rows + 1, rows, columns)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.more
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_kernels_are_right_on(processor, tmp_path):
    """Tests of every vector operation pass if the kernels are compiled for another processor.

    All kernels are compiled, which takes minutes on a machine that is busy.
    """
    name, features, optimisation = PROCESSORS[processor]
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_OPT": optimisation,
        "DPTRAIN_CACHE_DIR": str(tmp_path),
    }
    parts = ("convolution", "winograd", "rgb", "algorithms", "matmul", "memory", "maps")
    files = [str(HERE / f"test_numba_{part}.py") for part in parts]
    # Winograd algorithms of several sizes differ by constants, and take long to compile.
    sizes = "not four and not five"
    chosen = (
        f"(pooled and 2/2 and {sizes}) or (pooled and 3/2 and wide) or (numba_winograd and vectors)"
        " or (input and 32 and 129) or (numba_rgb and winograd and odd) or memory"
        " or (numba_maps and (33 or 37 or alone))"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=600", "-k", chosen]
    command += ["-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 90, done.stdout


@njit
def _multiply_streaming(a, a_rows, a_steps, b, d, c, c_rows, shape, lower_bound, run):
    stream = (b[0], b[1], 64, 2)
    multiply_streaming(a, a_rows, a_steps, b, d, c, c_rows, shape, lower_bound, stream, run)


KINDS = {
    "spaced": multiply_spaced,
    "adjacent": multiply_adjacent,
    "streaming": _multiply_streaming,
}


@pytest.mark.more
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_a_tile_stay_in_registers(kind):
    """No vector is kept on the stack: one too many would cost a load and a store for each step."""
    multiply = KINDS[kind]

    @njit
    def product(a, ramp, c, rows, steps, columns):
        multiply(
            (a, 0),
            (ramp, 0, 1),
            (ramp, 0, 1),
            (a, 0, columns),
            (a, 0, 0),
            (c, 0),
            (ramp, 0, 1),
            (rows, steps, columns),
            np.float32(0),
            12,
        )

    a, ramp = np.ones(48 * 48, np.float32), np.arange(48, dtype=np.int32)
    product(a, ramp, np.ones(96, np.float32), 48, 3, 48)
    (assembly,) = product.inspect_asm().values()
    # Tiles with masks load the mask from the stack once.
    tiles = re.findall(rf"\ndptrain_{kind}\d_[\dx]+:\n(.*?)\tret", assembly, re.DOTALL)
    assert len(tiles) >= 2
    assert not re.search(r"[yz]mm.*\(%rsp\)|\(%rsp\).*[yz]mm", "".join(tiles))


@njit
def _multiply_in_place(a, a_start, pitch, b, b_start, columns, rows, steps):
    multiply_in_place(a, a_start, pitch, b, b_start, columns, rows, steps)


@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("rows", [1, 4, 13, 31, 48])
def test_products_replace_their_rows(vectors, rows):
    """They are written to whole groups of rows, and nothing else is."""
    random = np.random.default_rng(rows)
    columns = vectors * compiled_registers().width
    computed, steps = -(-rows // ROW_GROUP) * ROW_GROUP, columns - 3
    a = random.standard_normal((3, computed + 1, columns + 2), np.float32)
    b = random.standard_normal((3, steps + 1, columns), np.float32)
    expected = a.copy()
    expected[:, :computed, :columns] = a[:, :computed, :steps] @ b[:, :steps]
    for e in range(3):
        _multiply_in_place(
            a.reshape(-1), e * a[0].size, columns + 2, b.reshape(-1), e * b[0].size, columns, rows,
            steps,
        )  # fmt: skip
    # Sums of up to 29 products of about 1.
    np.testing.assert_allclose(a, expected, rtol=0, atol=1e-5)
    outside = np.ones(a.shape, bool)
    outside[:, :computed, :columns] = False
    np.testing.assert_array_equal(a[outside], expected[outside])


@pytest.mark.more
def test_sums_in_place_stay_in_registers():
    arrays = [np.ones(99, np.float32) for _ in range(2)]
    _multiply_in_place(arrays[0], 0, 16, arrays[1], 0, compiled_registers().width, 0, 0)
    (assembly,) = _multiply_in_place.inspect_asm().values()
    tiles = re.findall(r"\ndptrain_in_place\d_[\dx]+:\n(.*?)\tret", assembly, re.DOTALL)
    assert len(tiles) == sum(len(heights) for heights in compiled_registers().in_place)
    assert not re.search(r"[yz]mm.*\(%rsp\)|\(%rsp\).*[yz]mm", "".join(tiles))


@pytest.mark.more
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other instructions")
@pytest.mark.parametrize("name", ["haswell", "znver3"])
def test_sums_stay_in_registers_on_other_processors(name, tmp_path):
    """LLVM unrolls loops and orders instructions as is best for the processor."""
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma",
        "DPTRAIN_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "sums and registers and not processors"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
