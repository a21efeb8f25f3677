"""Convolutions as implicit GEMMs over halo tiles in shared memory.

Halo tiles load each pixel once and unpool dy while it is loaded. The forward stage packs the
weights in the order in which the kernels of both phases read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dptrain.backends.cuda.convolution.bound_convolution import BoundConvolution, Case, Extra
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView, supports_halo_tiles
from dptrain.backends.cuda.convolution.halo.implicit_gemm_cost import rank_implicit_gemm_tiles
from dptrain.backends.cuda.convolution.halo.implicit_gemm_tiles import ImplicitGemmTile
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK, ceil_div
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.device.hardware import ELEMENT_BYTES
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.weighted import fused_epilogue
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Dropout
from dptrain.plan.lowering import BufferSpec, Phase

PACKED: Mapping[Phase, str] = {Phase.FORWARD: "packed", Phase.BACKWARD_INPUT: "packed_back"}
"""Buffers of the weights in the order in which the kernel of a phase reads them."""


def supports(case: Case) -> bool:
    """Return whether the kernels exist for a case."""
    if case.is_dilated:
        return False
    # Lanes share the random numbers of four filters.
    drops = case.phase is Phase.FORWARD and case.group.kinds[-1] is Dropout
    uneven = drops and case.group.head.output_maps[0] % 4
    return not uneven and supports_halo_tiles(case.view, case.precision, case.strides, case.limits)


def view_of(case: Case) -> InputView:
    """Return the view of the input of a product, padded to whole steps."""
    view = case.view.folded(case.strides)
    if case.phase is Phase.BACKWARD_INPUT:
        view = view.backward
    return view.padded(ELEMENT_BYTES.get(case.precision, 4))


def estimate(case: Case) -> Sequence[tuple[float, ImplicitGemmTile]]:
    """Return the estimated µs of the tile configurations."""
    backward = case.phase is Phase.BACKWARD_INPUT
    ranked = rank_implicit_gemm_tiles(
        view_of(case), case.precision, case.samples, case.limits,
        pooled=case.pools and not backward, epilogue=case.epilogue if backward else 0,
    )  # fmt: skip
    return [(case.corrected_us(time), tile) for time, tile in ranked]


def config_of(case: Case, tile: ImplicitGemmTile) -> GemmConfig:
    """Return the configuration of a product, which is not split."""
    return GemmConfig(tile, SplitK(1, 1))


def sum_rows(case: Case, tile: ImplicitGemmTile) -> int:
    """Return the rows of sums of the result that forward can write."""
    # Every pixel must be stored once, by a kernel that needs no sums by scalar instructions.
    if case.phase is not Phase.FORWARD or not tile.stores_once:
        return 0
    samples = ceil_div(case.samples, tile.view.row_samples)
    blocks, *_ = tile.grid(samples * tile.tiles_per_sample, tile.view.filters)
    return blocks * tile.block_groups


def buffers(case: Case, tile: ImplicitGemmTile) -> Extra:
    """Return the buffer of the packed weights."""
    spec = BufferSpec((tile.packed_elements,), case.setting.activations)
    return Extra(prepared={PACKED[case.phase]: spec})


def bind(operation: BoundConvolution, phase: Phase, tile: ImplicitGemmTile) -> Kernel:
    """Return the stage of a product."""
    a, config = operation.arrays, GemmConfig(tile, SplitK(1, 1))
    if phase is Phase.FORWARD:
        return operation.product(
            "conv2d_forward_halo.cu", "conv2d_forward_halo", config, tile.tiles_per_sample,
            tile.view.filters, (a["x"], a["packed"], a["bias"], *operation.outputs),
            operation.geometry, epilogue=fused_epilogue(operation.group), fuses_dropout=True,
            tensor_maps=_tensor_maps(operation, tile, a["x"]),
            row_samples=tile.view.row_samples, summed=operation.output_sums,
        )  # fmt: skip
    dz = operation.dz
    return operation.product(
        "conv2d_backward_input_halo.cu", "conv2d_backward_input_halo", config,
        tile.tiles_per_sample, tile.view.filters, (*dz, a["packed_back"], a["dx"]),
        operation.geometry, epilogue=operation.undone_epilogue,
        tensor_maps=_tensor_maps(operation, tile, *dz[:2]), adds="dx" in operation.group.adds,
        row_samples=tile.view.row_samples,
    )  # fmt: skip


def _tensor_maps(
    operation: BoundConvolution, tile: ImplicitGemmTile, values: Array, argmax: Array | None = None
) -> Sequence[np.void]:
    """Return TMA descriptors of the arrays that the halo tile is loaded from, if any."""
    view, unit = tile.view, 2 if tile.unpools else 1
    shape = operation.batch_size, view.height // unit, view.width // unit, view.memory_channels
    arrays = (values, operation.setting.precision), (argmax, "marks")
    found = [
        operation.device.tensor_map(array, shape, tile.box, kind, as_factors=not tile.unpools)
        for array, kind in arrays[: tile.num_tensor_maps]
    ]
    return [tensor_map for tensor_map in found if tensor_map is not None]


def prepare(operation: BoundConvolution, tiles: Mapping[Phase, ImplicitGemmTile]) -> Kernel:
    """Return the kernel that packs the weights for one or both phases."""
    forward, backward = (tiles.get(phase) for phase in PACKED)
    first = next(iter(tiles.values()))
    defines = {
        **first.defines, **operation.defines,
        "PREFETCH_WEIGHTS": int(operation.prefetches_weights),
    }  # fmt: skip
    if any(tile.view.channels != tile.view.memory_channels for tile in tiles.values()):
        defines["PADDED_WEIGHTS"] = 1
    if backward is not None:
        defines |= {
            "BACKWARD_LINES_IN_M": backward.lines_in_m,
            "BACKWARD_PERSISTENT": int(backward.persistent),
        }
    function = operation.device.function("pack_weights.cu", "pack_weights", **defines)
    # A phase without packed weights passes the other buffer, which its threads do not write.
    a = operation.arrays
    weight, unused = a["weight"], a[PACKED[next(iter(tiles))]]
    packed = [a[name] if phase in tiles else unused for phase, name in PACKED.items()]
    vectors = forward.packed_vectors if forward is not None else 0
    all_vectors = vectors + (backward.packed_vectors if backward is not None else 0)
    sizes = vectors, all_vectors, *weight.shape, *operation.layer.strides
    args = weight, *packed, *map(np.int32, sizes)

    def run(context: Context) -> None:
        if context.n:
            launch(function, all_vectors, *args)

    return run
