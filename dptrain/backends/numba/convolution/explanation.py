"""Explain which algorithm computes each stage of a layer with weights, and why."""

from __future__ import annotations

from dptrain.backends.numba.convolution import winograd_geometry
from dptrain.backends.numba.convolution.folded_rgb_convolution import FoldedRgbGeometry
from dptrain.backends.numba.convolution.folded_rgb_microkernels import WINDOWS
from dptrain.backends.numba.convolution.gathered_convolution import GatheredGeometry
from dptrain.backends.numba.convolution.im2col import GROUP, ConvGeometry
from dptrain.backends.numba.convolution.planning import Algorithm, Shape, Work
from dptrain.backends.numba.convolution.pointwise_convolution import PANEL, TILE, PointwiseGeometry
from dptrain.backends.numba.convolution.winograd_transforms import SIDES
from dptrain.backends.numba.dense.matmul import DenseKernel
from dptrain.backends.numba.vector import compiled_registers
from dptrain.plan.lowering import Explanation, Phase


def explain(
    shape: Shape, phase: Phase, work: Work, algorithm: Algorithm, *, winograd: bool
) -> Explanation:
    """Return the name, tile and division of a convolution's algorithm and the reason for it.

    Args:
        shape: the convolution.
        phase: the stage.
        work: the samples and threads.
        algorithm: what `select_algorithms` returned for them.
        winograd: False if the precision excludes the Winograd algorithms.
    """
    name = _name(algorithm, shape)
    return Explanation(
        name, _tile(algorithm, shape, phase), _units(algorithm, phase, work),
        _reason(name, shape, winograd),
    )  # fmt: skip


def _name(algorithm: Algorithm, shape: Shape) -> str:
    module = algorithm.kernel.py_func.__module__.rpartition(".")[2]
    if "winograd" in module:
        taps = shape.window[0]
        side = SIDES[taps]
        return f"Winograd F({side}×{side}, {taps}×{taps})"
    names = {"pointwise_convolution": "GEMM", "gathered_convolution": "GEMM of gathered pixels"}
    return names.get(module, "implicit GEMM")


def _tile(algorithm: Algorithm, shape: Shape, phase: Phase) -> str:
    """Describe the tile that stays in registers, and the rows in scratch."""
    if isinstance(algorithm.geometry, FoldedRgbGeometry):
        return "27×8" if phase is Phase.BACKWARD_WEIGHT else f"{WINDOWS} windows×8"
    if isinstance(algorithm.geometry, PointwiseGeometry | GatheredGeometry):
        return f"{TILE}×{PANEL}, {_counted(algorithm.geometry.rows, 'pixel')}"
    if not isinstance(algorithm.geometry, ConvGeometry):
        side = SIDES[shape.window[0]]
        return f"{side}×{side} outputs"
    registers = compiled_registers()
    columns = shape.maps[2] if phase is Phase.BACKWARD_INPUT else shape.out[2]
    run = shape.window[1] * shape.maps[2]  # adjacent rows of dw
    adjacent = phase is Phase.BACKWARD_WEIGHT and run % GROUP
    tiles = registers.adjacent if adjacent else registers.spaced
    vectors = 2 if columns >= 2 * registers.width else 1
    # Fewer columns than half a vector are computed in vectors of half the width.
    width = registers.width // (2 if 2 * columns <= registers.width else 1)
    height, rows = tiles[vectors - 1][0], algorithm.geometry.rows
    return f"{height}×{vectors * width}, {_counted(rows, 'row')}"


def _units(algorithm: Algorithm, phase: Phase, work: Work) -> str:
    item, unit = ("sum", "block") if phase is Phase.BACKWARD_WEIGHT else ("sample", "band")
    return f"{_counted(work.items(phase), item)} × {_counted(algorithm.units, unit)}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _reason(name: str, shape: Shape, winograd: bool) -> str:
    if name.startswith("Winograd"):
        return f"{'×'.join(map(str, shape.window))}, stride {shape.strides[0]}"
    return _why_not_winograd(shape, winograd) or "too few tiles in a batch for Winograd"


def _why_not_winograd(shape: Shape, winograd: bool) -> str:
    """Return why Winograd cannot be used for any batch size; the empty string if it can."""
    c, k, size = shape.maps[2], shape.out[2], "×".join(map(str, shape.window))
    if shape.window == (1, 1) and shape.pads == (0, 0):
        return "1×1 filters"
    if not winograd:
        return "fp32-direct excludes Winograd"
    if shape.strides != (1, 1):
        return "stride {}×{}: no Winograd".format(*shape.strides)
    if shape.window not in ((3, 3), (5, 5)):
        return f"{size}: no Winograd"
    if not shape.is_plain:
        return "padding exceeds the filters"
    if not winograd_geometry.supports(shape.window, shape.strides, c, k):
        return f"{c} channels, {k} filters: no Winograd"
    return ""


def explain_dense(
    stage: DenseKernel, phase: Phase, work: Work, inputs: int, outputs: int
) -> Explanation:
    """Return the name, blocks and reason of a dense layer's kernel.

    Args:
        stage: the kernel and its blocks.
        phase: the stage.
        work: the samples and threads.
        inputs, outputs: shape of the weights.
    """
    reason = "micro-shards: sums follow from the shape" if work.by_shape else "the only algorithm"
    blocks = stage.blocks
    if blocks is None:
        return Explanation("GEMM", "", f"{inputs} rows of dw", reason)
    features = outputs if phase is Phase.FORWARD else inputs
    down, across = -(-work.batch_size // blocks.samples), -(-features // blocks.features)
    tile = f"{blocks.samples}×{blocks.features}"
    return Explanation("GEMM", tile, f"{down} × {across} blocks", reason)
