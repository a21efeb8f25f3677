"""Programmatic dependent launch: where kernels wait, and the arguments for the driver."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest

from dptrain.backends.cuda.device import dependent_launch
from dptrain.backends.cuda.device.sources import kernel_files, source_path

KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\([^{]*?\)\s*\{(.*?)^}',
    re.DOTALL | re.MULTILINE,
)


def test_every_kernel_waits_for_its_predecessor() -> None:
    sources = [path for path in kernel_files().values() if path.suffix == ".cu"]
    bodies = {
        (path.name, name): body
        for path in sources
        for name, body in KERNEL.findall(path.read_text())
    }
    assert len(bodies) == sum(p.read_text().count("__global__") for p in sources)
    # The exceptions are tested below; a kernel may write its own shared memory before it waits.
    wait = r"wait_for_previous_kernel\(\);"
    later = re.compile(
        rf"\b(multiply(<ADD_GRADIENT>)?|sum_inputs|update_with)\(|\bwgmma_gemm<"
        rf"|if \(PREFETCH_WEIGHTS\) {wait}"
        rf"|clear\(buffers\(i\)\);\s*__syncthreads\(\);\s*{wait}"
        rf"|\(memory\)\[i\] = \{{\}};\s*__syncthreads\(\);\s*{wait}"
        rf"|if \(PREFETCH_WEIGHTS\) weights\.read\(\{{w, b, g, filter\}}\);\s*{wait}"
        rf"|prefetch_tensor_maps\(TENSOR_MAPS_ARGUMENT\);\s*{wait}"
    )
    first = {
        key
        for key, body in bodies.items()
        if not body.lstrip().startswith("wait_for_previous_kernel();") and not later.search(body)
    }
    assert first == set()


def test_update_rules_wait_before_they_read() -> None:
    text = source_path("optimizers.cu").read_text()
    shared = text[text.index("void update_with(") :]
    before = shared[: shared.index("wait_for_previous_kernel();")]
    assert not re.search(r"load|\bat\b", before.partition("{")[2])
    # A rule is called afterwards; a kernel does nothing itself.
    for body in KERNEL.findall(text):
        assert re.match(r"\s*(const auto rule|wait_for_previous_kernel\(\);)", body[1]), body[0]


def test_kernels_prefetch_only_weights_before_they_wait() -> None:
    gemm, skinny = (source_path(name).read_text() for name in ("gemm.cuh", "skinny_gemm.cu"))
    body = gemm[gemm.index("void multiply(") :]
    before = body[: body.index("    wait_for_previous_kernel();")]
    assert (
        before.count("load_first") == before.count("if (PREFETCH_WEIGHTS) next_b.load_first(") == 1
    )
    # The gradient that sums begin with is written by an earlier kernel.
    assert "load_accumulators();" not in before
    assert "load_accumulators();" in body
    # This kernel waits at once unless it may prefetch weights.
    wait = r"wait_for_previous_kernel\(\);"
    between = rf"if \(!PREFETCH_WEIGHTS\) {wait}(.*?)if \(PREFETCH_WEIGHTS\) {wait}"
    for ahead in re.findall(between, skinny, re.S):
        assert re.fullmatch(r"\s*shared\.weights\.load_async\([^;]*\);\s*", ahead)
    assert skinny.count("if (PREFETCH_WEIGHTS) wait_for_previous_kernel();") == 2
    few_channels = source_path("conv2d_forward_few_channels.cu").read_text()
    before = few_channels[few_channels.index("    conv2d_forward_few_channels(") :]
    before = before[: before.index("    wait_for_previous_kernel();")]
    assert (
        before.count("read")
        == before.count("if (PREFETCH_WEIGHTS) weights.read({w, b, g, filter});")
        == 1
    )
    assert "load" not in before


def test_products_by_wgmma_wait_in_all_threads_before_they_read() -> None:
    text = source_path("wgmma_gemm.cuh").read_text()
    body = text[text.index("void wgmma_gemm(") :]
    wait = "    wait_for_previous_kernel();\n"
    tensor_maps, scalar = body.split("#if TENSOR_MAPS")[1].split("#endif")[0].split("#else")
    for branch, reads in (tensor_maps, ("produce", "consume")), (scalar, ("multiply_scalar",)):
        before, after = branch.split(wait)
        assert all(read not in before and read in after for read in reads)


def test_older_gpus_have_no_dependent_launch() -> None:
    assert dependent_launch.find_dependent_launch(89) is None


def test_the_driver_receives_the_kernel_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Array:
        class data:  # noqa: N801
            ptr = 0x7F00_0000_1000

    def start(config: Any, kernel: int, pointers_to_values: Any, extra: Any) -> int:
        config = ctypes.cast(config, ctypes.POINTER(dependent_launch._Config)).contents
        seen["extents"] = [*config.grid], [*config.block], config.shared_bytes, config.stream
        attribute = config.attributes[0]
        seen["attribute"] = config.count, attribute.id, attribute.value
        seen["kernel"] = kernel
        types = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float)
        pointers = ctypes.cast(pointers_to_values, ctypes.POINTER(ctypes.c_void_p))
        seen["args"] = [t.from_address(pointers[i]).value for i, t in enumerate(types)]
        return 0

    signature = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    )
    driver = type("Driver", (), {"cuLaunchKernelEx": signature(start)})()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    launch = dependent_launch.find_dependent_launch(90)
    assert launch is not None
    grid: Any = (np.int32(7), 1, 2)
    launch(99, grid, (256, 1, 1), [Array, np.int32(-5), np.float32(0.5)], 4096, 17)
    assert seen["extents"] == ([7, 1, 2], [256, 1, 1], 4096, 17)
    assert seen["attribute"] == (1, dependent_launch.PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    assert (seen["kernel"], seen["args"]) == (99, [0x7F00_0000_1000, -5, 0.5])


def test_structures_have_the_sizes_of_the_driver_api() -> None:
    # CUDA Driver API: CUlaunchAttribute is an id, its padding and a value of 64 bytes;
    # CUlaunchConfig is seven integers, a stream, a pointer and an integer, each aligned.
    assert ctypes.sizeof(dependent_launch._Attribute) == 72
    assert ctypes.sizeof(dependent_launch._Config) == 56
