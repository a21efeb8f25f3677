"""Compilation by NVRTC: every kernel and architecture, the cache, and error messages.

The wheel ``nvidia-cuda-nvrtc-cu12`` of the extra ``test`` contains the compiler.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dptrain.backends.cuda.convolution.few_channels.few_channel_tiles import few_channel_candidates
from dptrain.backends.cuda.convolution.few_channels.few_channel_wgrad_tiles import (
    rank_few_channel_wgrad_tiles,
)
from dptrain.backends.cuda.convolution.grouped.grouped_tiles import GroupedShape, choose_tile
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.convolution.halo.implicit_gemm_cost import rank_implicit_gemm_tiles
from dptrain.backends.cuda.convolution.halo.wgrad_tiles import rank_wgrad_tiles
from dptrain.backends.cuda.dense import skinny_gemm, wgmma_gemm_tiles
from dptrain.backends.cuda.dense.gemm_tiles import TENSOR_TILES, THREAD_TILES, GemmTile
from dptrain.backends.cuda.dense.wgmma_gemm_tiles import WgmmaTile
from dptrain.backends.cuda.device import nvrtc, tensor_maps
from dptrain.backends.cuda.device.cupy_runtime import best_architecture
from dptrain.backends.cuda.device.gpu import GPU
from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS
from dptrain.backends.cuda.device.nvrtc import (
    SERIALIZED,
    CompileError,
    Compiler,
    compile_cached,
    find_compiler,
)
from dptrain.backends.cuda.device.sources import KERNELS, kernel_files, source_path
from dptrain.backends.cuda.geometry import GEOMETRY_MACROS
from dptrain.errors import UserError
from dptrain.plan.lowering import Phase
from tests.emulator import libraries
from tests.tiers import tiered
from tests.unit.backends.cuda.gpu_algorithms import best

SOURCES = sorted(name for name in kernel_files() if name.endswith(".cu"))
VECTORED = ["dropout.cu", "elementwise.cu", "normalization.cu", "pooling.cu", "optimizers.cu"]
COMPILED = {90: 13, 100: 12, 80: 12, 70: 12}
"""Architectures and versions of CUDA. CUDA 13 treats functions without annotations as host
functions; CUDA 12 does not."""

FEATURES = "__CUDA_ARCH_FEAT_SM90_ALL"
"""Macro of sm_90a only."""


@functools.cache
def source(file: str) -> str:
    """Return the text of a source and of the files that it includes."""
    return "\n".join(libraries.translated_sources(KERNELS, file).values())


def boundaries(text: str) -> list[int]:
    """Return the architectures from which on a source differs."""
    compared = re.findall(r"__CUDA_ARCH__\s*([<>=!]=?)\s*(\d+)", text)
    assert {operator for operator, _ in compared} <= {">="}
    return sorted({int(number) // 10 for _, number in compared})


def variant(text: str, architecture: int) -> tuple[bool, ...]:
    """Return what a source distinguishes about an architecture."""
    above = (architecture >= boundary for boundary in boundaries(text))
    return (*above, FEATURES in text and architecture == 90)


def architectures(file: str) -> list[int]:
    """Return one architecture for each variant of a source, the first of `COMPILED`."""
    text = source(file)
    return list({variant(text, number): number for number in reversed(COMPILED)}.values())


def test_the_compiled_architectures_are_all_that_sources_distinguish() -> None:
    text = "\n".join(map(source, SOURCES))
    known = boundaries(text)
    assert len(known) > 1
    intervals = [sum(number >= boundary for boundary in known) for number in COMPILED]
    assert set(intervals) == set(range(len(known) + 1))
    assert [number for number in COMPILED if variant(text, number)[-1]] == [90]
    assert intervals.count(intervals[0]) == 2  # With the features of sm_90a and without.
    for file in SOURCES:
        found = {variant(source(file), number) for number in architectures(file)}
        assert found == {variant(source(file), number) for number in COMPILED}


def machine_code(
    file: str, architecture: int, defines: Mapping[str, int] | None = None, version: int = 12
) -> bytes:
    """Return the machine code of a kernel, from the tests' cache if it was compiled before."""
    compiler, defines = find_compiler([version]), defines or {}
    assert compiler.version[0] == version

    def build(folder: Path) -> None:
        code = compiler.compile(source_path(file), architecture, defines)
        assert SERIALIZED not in compiler.log
        (folder / "result").write_bytes(code)

    digest = nvrtc.source_digest(compiler, file, architecture, defines)
    code = libraries.cached("{}.cubin", build, digest).read_bytes()
    assert code.startswith(b"\x7fELF")
    return code


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return find_compiler([12])


@pytest.mark.parametrize(
    ("file", "architecture"),
    tiered([(f, n) for f in SOURCES for n in architectures(f)], [(f, 90) for f in SOURCES]),
)
def test_every_kernel_compiles(file: str, architecture: int) -> None:
    machine_code(file, architecture, version=COMPILED[architecture])


@pytest.mark.more
@pytest.mark.parametrize("file", VECTORED)
def test_kernels_compile_for_vectors(file: str) -> None:
    """Architectures differ in bfloat16 only."""
    variants = {}, {"VECTOR": 4}, {"VECTOR": 8, "PRECISION": 2}
    codes = {machine_code(file, 90, defines) for defines in variants}
    assert len(codes | {machine_code(file, 70, variants[-1])}) == 4


@pytest.mark.more
@pytest.mark.parametrize("resizes", [False, True])
def test_images_with_maps_and_mixed_images_compile_for_a_size(resizes: bool) -> None:
    sizes = dict(zip(("CHANNELS", "HEIGHT", "WIDTH", "ROWS", "COLUMNS"), (3, 32, 32, 40, 40),
                     strict=True))  # fmt: skip
    taps = {"ROW_TAPS": 4, "COLUMN_TAPS": 4, "STORED_ROWS": 80, "STORED_COLUMNS": 80}
    macros = {**sizes, **(taps if resizes else {}), "BYTES": 1, "PRECISION": 2}
    codes = {
        (general, mixes): machine_code(
            "unpack_batch.cu", 90, {**macros, "GENERAL": general, "MIXES": mixes}
        )
        for general in (0, 1)
        for mixes in (0, 1)
    }
    assert len(set(codes.values())) == len(codes)
    for mixes in (0, 1):
        assert len(codes[0, mixes]) < len(codes[1, mixes])


@pytest.mark.more
@pytest.mark.parametrize("kernel", ["normalization.cu", "pooling.cu"])
def test_pooling_compiles_for_a_layer(kernel: str) -> None:
    layer = dict(
        zip(GEOMETRY_MACROS, (24, 24, 64, 12, 12, 64, 3, 3, 2, 2, 0, 0, 1, 1), strict=True)
    )
    assert machine_code(kernel, 90, {"VECTOR": 8, "PRECISION": 2, **layer})


@pytest.mark.more
def test_all_reduce_compiles_for_every_number_of_ranks() -> None:
    codes = {machine_code("all_reduce.cu", 90, {"RANKS": n}) for n in (2, 3, 8)}
    assert len(codes) == 3


@pytest.mark.more
@pytest.mark.parametrize("file", ["batch_norm_statistics.cu", "batch_norm_backward_statistics.cu"])
def test_statistics_compile_for_several_ranks(file: str) -> None:
    codes = {machine_code(file, 90, {"ACROSS_RANKS": n}) for n in (0, 1)}
    assert len(codes) == 2


PRODUCTS = [(0, 90, tile) for tile in THREAD_TILES] + [
    (precision, architecture, tile)
    for precision in (1, 2)
    for architecture, tiles in ((90, TENSOR_TILES), (75, TENSOR_TILES[:1]), (80, TENSOR_TILES[:1]))
    for tile in tiles
]


@pytest.mark.more
@pytest.mark.parametrize(("precision", "architecture", "tile"), PRODUCTS, ids=str)
@pytest.mark.parametrize("kernel", ["forward", "backward_weight", "backward_input"])
def test_every_tile_compiles_for_a_layer(
    kernel: str, precision: int, architecture: int, tile: GemmTile
) -> None:
    """From sm_80 on with tensor cores, before without."""
    layer = dict(zip(GEOMETRY_MACROS, (16, 16, 5, 8, 8, 32, 3, 3, 2, 2, 2, 2, 3, 2), strict=True))
    steps = {"IN_VECTOR": 1, "OUT_VECTOR": 8 if precision == 2 else 4}
    epilogue = {"PRECISION": precision, "EPILOGUE": 2 if kernel == "forward" else 1}
    defines = {**tile.defines, **layer, **steps, **epilogue}
    assert machine_code(f"conv2d_{kernel}.cu", architecture, defines)


@pytest.mark.more
@pytest.mark.parametrize(
    ("precision", "architecture"), [(0, 90), (1, 90), (2, 90), (0, 80), (1, 80), (2, 70)]
)
def test_skinny_gemm_compiles(precision: int, architecture: int) -> None:
    name = ("fp32", "tf32", "bf16")[precision]
    forward, backward = (
        best(skinny_gemm.rank_forward_configs(name, 32, 33856, 128, DEFAULT_LIMITS)).tile,
        skinny_gemm.SkinnyTile(16, 16, 112, name),
    )
    for defines in (forward.defines, replace(backward, k_contiguous=True).defines):
        steps = {
            "IN_VECTOR": 4,
            "OUT_VECTOR": 4,
            "EPILOGUE": 1,
            "EPILOGUE_DROPOUT": 1,
            "PREFETCH_WEIGHTS": 1,
        }
        defines = {"PRECISION": precision, **steps, **defines}
        assert machine_code("skinny_gemm.cu", architecture, defines)
    if name == "fp32":
        return  # The general kernel computes the weight gradient.
    gradient = skinny_gemm.wgrad_config(name, 64, 128).tile.defines
    steps = {"IN_VECTOR": 4, "OUT_VECTOR": 2, "EPILOGUE": 1, "PRECISION": precision}
    assert machine_code("skinny_gemm_backward_weight.cu", architecture, {**steps, **gradient})


@pytest.mark.parametrize(
    ("precision", "architecture"),
    tiered(itertools.product(["fp32", "tf32", "bf16"], [80, 90, 100]), [("bf16", 90)]),
)
def test_tiles_of_groups_compile_for_a_layer(precision: str, architecture: int) -> None:
    """A layer of ResNeXt with stride 2, and one whose units need several blocks."""
    size, macro = (2, 2) if precision == "bf16" else (4, int(precision == "tf32"))
    for channels, groups in ((8, 32), (120, 2)):
        shape = GroupedShape(
            channels, channels, groups, (3, 3), (2, 2), (1, 1), (1, 1), (28, 28), 64, size,
            precision == "fp32", DEFAULT_LIMITS,
        )  # fmt: skip
        layer = (56, 56, channels * groups, 28, 28, channels * groups, 3, 3, 2, 2, 1, 1, 1, 1)
        fixed = dict(zip(GEOMETRY_MACROS, layer, strict=True))
        for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT):
            wgrad = phase is Phase.BACKWARD_WEIGHT
            file = f"conv2d_grouped_{'backward_weight' if wgrad else 'tile'}.cu"
            defines = {**choose_tile(shape, phase).defines, **fixed, "PRECISION": macro}
            assert machine_code(file, architecture, defines, version=COMPILED[architecture])


# The second convolution of solar, and one with 32 filters that is not pooled.
WIDE = (48, 48, 32, 46, 46, 64, 3, 3, 1, 1, 0, 0), (12, 12, 64, 12, 12, 32, 5, 5, 1, 1, 2, 2)
WINDOWS = [(1, 90), (2, 90), (2, 80), (1, 80), (2, 70)]


@pytest.mark.more
@pytest.mark.parametrize("layer", WIDE, ids=["pooled", "plain"])
@pytest.mark.parametrize(("precision", "architecture"), WINDOWS)
def test_halo_kernels_compile_for_a_layer(
    precision: int, architecture: int, layer: tuple[int, ...]
) -> None:
    """sm_90 uses wgmma and TMA, GPUs from sm_80 on mma.sync, older ones neither.

    Dropout comes epilogue pooling.
    """
    name, size = ("tf32", 4) if precision == 1 else ("bf16", 2)
    height, width, channels, out_height, out_width, filters, r, s, *_, top, left = layer
    view = InputView(height, width, channels, top, left, out_height, out_width, filters, r, s)
    pooled, step = filters == 64, 16 // size
    common = {"PRECISION": precision, "EPILOGUE": 1 + pooled, "IN_VECTOR": step, "OUT_VECTOR": step}
    common |= dict(zip(GEOMETRY_MACROS, (*layer, 1, 1), strict=True))
    limits = DEFAULT_LIMITS
    forward = best(rank_implicit_gemm_tiles(view, name, 2048, limits, pooled=pooled))
    backward = best(
        rank_implicit_gemm_tiles(view.backward, name, 2048, limits, epilogue=1 + pooled)
    )
    weight = best(rank_wgrad_tiles(view, name, (1, 1), 1 + pooled, 2048, limits))
    assert forward is not None
    assert backward is not None
    assert weight is not None
    mapped = architecture == tensor_maps.ARCHITECTURE
    back = {
        "BACKWARD_LINES_IN_M": backward.lines_in_m,
        "BACKWARD_PERSISTENT": int(backward.persistent),
    }
    kernels = {
        "conv2d_forward_halo.cu": {
            **forward.defines,
            "EPILOGUE_DROPOUT": int(pooled),
            "TENSOR_MAPS": forward.num_tensor_maps * mapped,
        },
        "pack_weights.cu": {**forward.defines, **back},
        "conv2d_backward_input_halo.cu": {
            **backward.defines,
            "TENSOR_MAPS": backward.num_tensor_maps * mapped,
        },
        "conv2d_backward_weight_halo.cu": weight.defines,
    }
    for file, defines in kernels.items():
        assert machine_code(file, architecture, {**common, **defines})


# The first convolutions of cifar and of model0.
NARROW = (24, 24, 3, 24, 24, 64, 5, 5, 1, 1, 2, 2), (32, 32, 3, 32, 32, 16, 3, 3, 1, 1, 1, 1)


@pytest.mark.more
@pytest.mark.parametrize("layer", NARROW, ids=["plain", "pooled"])
@pytest.mark.parametrize(("precision", "architecture"), WINDOWS)
def test_few_channel_kernels_compile_for_a_layer(
    precision: int, architecture: int, layer: tuple[int, ...]
) -> None:
    name, size = ("tf32", 4) if precision == 1 else ("bf16", 2)
    height, width, channels, out_height, out_width, filters, r, s, *_, top, left = layer
    view = InputView(height, width, channels, top, left, out_height, out_width, filters, r, s)
    pooled = filters == 16
    common = {
        "PRECISION": precision,
        "EPILOGUE": 1 + pooled,
        "OUT_VECTOR": 16 // size,
        "IN_VECTOR": 1,
    }
    common |= dict(zip(GEOMETRY_MACROS, (*layer, 1, 1), strict=True))
    tiles = list(few_channel_candidates(view, (1, 1), name, DEFAULT_LIMITS, pooled=pooled))
    for tile in tiles[:: len(tiles) // 3]:
        defines = {**common, **tile.defines}
        assert machine_code("conv2d_forward_few_channels.cu", architecture, defines)


@pytest.mark.parametrize(
    ("precision", "layer"),
    tiered(itertools.product([1, 2], WIDE + NARROW), [(2, WIDE[1])]),
    ids=str,
)
def test_wgmma_instructions_are_not_serialized(precision: int, layer: tuple[int, ...]) -> None:
    """Weight gradients, whose fragments compilers tend to compute between the products."""
    name, step = ("tf32", 4) if precision == 1 else ("bf16", 8)
    height, width, channels, out_height, out_width, filters, r, s, *_, top, left = layer
    view = InputView(height, width, channels, top, left, out_height, out_width, filters, r, s)
    epilogue = 2 if layer in (WIDE[0], NARROW[1]) else 1
    tile = best(rank_wgrad_tiles(view, name, (1, 1), epilogue, 2048, DEFAULT_LIMITS))
    assert tile is not None
    steps = {"IN_VECTOR": step if channels > 3 else 1, "OUT_VECTOR": step}
    common = {"PRECISION": precision, "EPILOGUE": epilogue, **steps}
    common |= dict(zip(GEOMETRY_MACROS, (*layer, 1, 1), strict=True))
    defines = {**tile.defines, **common}
    assert machine_code("conv2d_backward_weight_halo.cu", 90, defines, version=13)


@pytest.mark.more
@pytest.mark.parametrize("shape", wgmma_gemm_tiles.TILES, ids=str)
@pytest.mark.parametrize("precision", [1, 2])
def test_large_dense_kernels_compile_without_serialized_instructions(
    precision: int, shape: tuple[int, int, int, int]
) -> None:
    tile, step = WgmmaTile(*shape, transposed=precision == 1), 4 * precision
    common = {"PRECISION": precision, "EPILOGUE": 1, "IN_VECTOR": step, "OUT_VECTOR": step}
    defines = {**tile.defines, **common, "EPILOGUE_DROPOUT": 1, "TENSOR_MAPS": 2}
    assert machine_code("dense_wgmma.cu", 90, defines, version=13)


@pytest.mark.more
@pytest.mark.parametrize(("precision", "architecture"), [(1, 90), (2, 90), (2, 80), (1, 80)])
def test_the_weight_gradient_of_a_first_layer_compiles(precision: int, architecture: int) -> None:
    name, layer = "tf32" if precision == 1 else "bf16", NARROW[1]
    height, width, channels, out_height, out_width, filters, r, s, *_, top, left = layer
    view = InputView(height, width, channels, top, left, out_height, out_width, filters, r, s)
    tile = rank_few_channel_wgrad_tiles(view, name, 2048, DEFAULT_LIMITS)[0]
    common = {"PRECISION": precision, "EPILOGUE": 2, "IN_VECTOR": 1, "OUT_VECTOR": 4 * precision}
    defines = {**tile.defines, **common, **dict(zip(GEOMETRY_MACROS, (*layer, 1, 1), strict=True))}
    assert machine_code("conv2d_backward_weight_few_channels.cu", architecture, defines)


def test_a_serialized_kernel_is_compiled_with_a_scheduling_barrier(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler
) -> None:
    compiled_with: list[Mapping[str, int]] = []

    def compile_once(
        path: Path, architecture: int, defines: Mapping[str, int], options: Sequence[str]
    ) -> tuple[bytes, str]:
        compiled_with.append(defines)
        log = "" if "SCHEDULING_BARRIER" in defines else f"ptxas info : {SERIALIZED} due to it"
        return str(defines).encode(), log

    monkeypatch.setattr(compiler, "_compile", compile_once)
    code = compiler.compile(source_path("conv2d_backward_weight_halo.cu"), 90, {"STRIP_LINES": 2})
    assert compiled_with == [{"STRIP_LINES": 2}, {"STRIP_LINES": 2, "SCHEDULING_BARRIER": 1}]
    assert code == str(compiled_with[1]).encode()
    # Other kernels have no scheduling barrier.
    compiler.compile(source_path("conv2d_forward_halo.cu"), 90)
    assert compiled_with[2:] == [{}]


def test_compute_capability_9_0_compiles_for_sm_90a(tmp_path: Path, compiler: Compiler) -> None:
    """``wgmma`` exists for ``sm_90a`` only."""
    path = tmp_path / "own.cu"
    path.write_text("#ifndef __CUDA_ARCH_FEAT_SM90_ALL\n#error without\n#endif\n")
    assert compiler.compile(path, 90).startswith(b"\x7fELF")
    with pytest.raises(CompileError, match="without"):
        compiler.compile(path, 89)


def test_compile_errors_name_file_and_line(tmp_path: Path, compiler: Compiler) -> None:
    path = tmp_path / "wrong.cu"
    path.write_text("\n\n__global__ void f(float* y) { y[0] = nothing; }\n")
    with pytest.raises(CompileError, match=r'wrong.cu\(3\): error: identifier "nothing"'):
        compiler.compile(path, 90)


def test_machine_code_is_cached_and_a_damaged_file_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Compiler
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "one.cu").write_text('#include "one.cuh"\n__global__ void f(int* y) { *y = ONE; }')
    (kernels / "one.cuh").write_text("// empty\n")
    monkeypatch.setattr(nvrtc, "KERNELS", kernels)
    monkeypatch.setenv("DPTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    times = []
    original = Compiler.compile
    monkeypatch.setattr(
        Compiler, "compile", lambda *args: (times.append(args[3]), original(*args))[1]
    )

    def compiled(one: int) -> bytes:
        return compile_cached(compiler, "one.cu", 90, {"ONE": one})

    first = compiled(1)
    assert compiled(1) == first
    assert compiled(2) != first
    assert times == [{"ONE": 1}, {"ONE": 2}]
    for path in (tmp_path / "cache").rglob("*.cubin"):
        path.write_bytes(path.read_bytes()[:-1])
    assert compiled(1) == first
    assert compiled(1) == first
    assert len(times) == 3
    (kernels / "one.cuh").write_text("// another\n")
    nvrtc._read.cache_clear()  # A process assumes that sources do not change.
    compiled(1)
    assert len(times) == 4


def test_one_process_compiles_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Compiler
) -> None:
    monkeypatch.setenv("DPTRAIN_CACHE_DIR", str(tmp_path))
    found = []

    def compile_while_another_waits(*args: Any) -> bytes:
        found.append(compile_cached(compiler, SOURCES[0], 90, {}))
        return b"machine code"

    monkeypatch.setattr(Compiler, "compile", compile_while_another_waits)
    assert compile_cached(compiler, SOURCES[0], 90, {}) == b"machine code"
    assert found == [None]
    assert compile_cached(compiler, SOURCES[0], 90, {}) == b"machine code"
    assert len(found) == 1
    assert not list(tmp_path.rglob("*.lock"))


def test_an_unwritable_cache_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Compiler
) -> None:
    monkeypatch.setattr(nvrtc, "writable_folder", lambda name: None)
    assert compile_cached(compiler, SOURCES[0], 90, {}).startswith(b"\x7fELF")
    monkeypatch.setattr(nvrtc, "writable_folder", lambda name: tmp_path / "absent")
    assert compile_cached(compiler, SOURCES[0], 90, {}).startswith(b"\x7fELF")


def test_a_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda major: ["libabsent.so"])
    with pytest.raises(
        UserError, match=r"libnvrtc.* was not found.*pip install '\.\[cuda12\]'"
    ) as e:
        find_compiler([12])
    assert "\n" not in str(e.value)


def test_missing_cupy_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UserError, match=r"needs CuPy.*pip install '\.\[cuda13\]'") as e:
        GPU()
    assert "\n" not in str(e.value)


def test_a_missing_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    def fail() -> int:
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    cupy = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(getDeviceCount=fail, CUDARuntimeError=CUDARuntimeError)
    cupy.cuda = types.SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(
        UserError, match=r"no GPU was found \(cudaErrorNoDevice.*--backend numba"
    ) as e:
        GPU()
    assert "\n" not in str(e.value)
    runtime.getDeviceCount = lambda: 2
    with pytest.raises(UserError, match="GPU 2 does not exist: this node has 2"):
        GPU(2)


def test_a_gpu_runs_code_of_its_own_generation() -> None:
    known = (75, 80, 86, 89, 90, 100, 120)
    assert best_architecture(90, known) == 90
    assert best_architecture(87, known) == 86
    assert best_architecture(103, known) == 100
    with pytest.raises(UserError, match=r"for sm_75.*GPU is sm_70; use CUDA 12: pip install"):
        best_architecture(70, known)
    with pytest.raises(UserError, match=r"GPU is sm_130; install libnvrtc of a CUDA version"):
        best_architecture(130, known)
