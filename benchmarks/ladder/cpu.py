"""The forward convolution of the ladder on one CPU core: direct loops, and im2col with a product.

    OPENBLAS_NUM_THREADS=1 python3 -m benchmarks.ladder.cpu [--batch N] [--json] [LAYER ...]

A layer is that of a network, such as cifar:conv2. Each version is compared with float64, and then
timed in alternating rounds by the CPU time of the process, in which OpenBLAS should have one
thread. All versions are float32 in N, C, H, W. One im2col matrix serves all images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import click
import numba
import numpy as np
from numpy.typing import NDArray

from benchmarks.coarse_check import WrongResultError
from benchmarks.ladder.layer import Layer, Numbers, bound, error, exact, layer_of
from benchmarks.ladder.rungs import Rung
from benchmarks.timing import HostProgram, measure
from dptrain.errors import UserError

LAYERS = ("model0:conv2", "study-a-larger:conv2")
ROUNDS, BLOCK_S = 15, 0.05

Floats = NDArray[np.float32]
Loops = Callable[..., None]


@cache
def compiled(function: Loops) -> Loops:
    """Return the machine code of loops, which may reorder sums."""
    found: Loops = numba.njit(fastmath=True)(function)
    return found


def direct(padded: Floats, w: Floats, b: Floats, y: Floats, stride: int) -> None:
    """Convolve padded images (N, C, H + 2P, W + 2P) with w (K, C, R, S) to y (N, K, Ho, Wo).

    The innermost loop runs along a row of y, which the compiler vectorises at stride 1.
    """
    channels, r, s = w.shape[1:]
    for n in range(y.shape[0]):
        for k in range(y.shape[1]):
            for row in range(y.shape[2]):
                line = y[n, k, row]
                line[:] = b[k]
                for c in range(channels):
                    for i in range(r):
                        source = padded[n, c, row * stride + i]
                        for j in range(s):
                            factor = w[k, c, i, j]
                            if stride == 1:
                                for column in range(len(line)):
                                    line[column] += factor * source[column + j]
                            else:
                                for column in range(len(line)):
                                    line[column] += factor * source[column * stride + j]


def im2col(image: Floats, unrolled: Floats, size: int, out_width: int, stride: int) -> None:
    """Unroll a padded image (C, H + 2P, W + 2P) to (C R S, Ho Wo), with square kernels."""
    terms, pixels = unrolled.shape
    for term in range(terms):
        c, i, j = term // (size * size), term // size % size, term % size
        for row in range(pixels // out_width):
            source = image[c, row * stride + i]
            for column in range(out_width):
                unrolled[term, row * out_width + column] = source[column * stride + j]


def product(a: Floats, b: Floats, bias: Floats, c: Floats) -> None:
    """Compute c = a b + bias; the innermost loop runs along the rows of b and c."""
    for row in range(c.shape[0]):
        c[row] = bias[row]
        for k in range(a.shape[1]):
            for column in range(c.shape[1]):
                c[row, column] += a[row, k] * b[k, column]


def library_product(a: Floats, b: Floats, bias: Floats, c: Floats) -> None:
    """Compute c = a b + bias by the BLAS of NumPy."""
    np.matmul(a, b, out=c)
    c += bias[:, None]


def rungs(layer: Layer, numbers: Numbers) -> list[Rung]:
    """Return the versions of the forward pass, the simplest first.

    Args:
        layer, numbers: the layer and its arrays; images are padded once, before any version.
    """
    p, (out_height, out_width) = layer.padding, layer.out
    padded = np.pad(numbers.x, ((0, 0), (0, 0), (p, p), (p, p)))
    y = np.zeros((layer.samples, layer.filters, out_height, out_width), np.float32)
    unrolled = np.zeros((layer.terms, layer.pixels), np.float32)
    weights = numbers.w.reshape(layer.filters, -1)

    def by_product(multiply: Loops) -> None:
        for n in range(layer.samples):
            compiled(im2col)(padded[n], unrolled, layer.kernel, out_width, layer.stride)
            multiply(weights, unrolled, numbers.b, y[n].reshape(layer.filters, -1))

    loops = partial(compiled(direct), padded, numbers.w, numbers.b, y, layer.stride)
    products = {"im2col, own product": compiled(product), "im2col, BLAS": library_product}
    return [Rung("direct", loops, y.copy)] + [
        Rung(name, partial(by_product, multiply), y.copy, unrolled.nbytes)
        for name, multiply in products.items()
    ]


def measure_rungs(
    layer: Layer, rounds: int = ROUNDS, block_s: float = BLOCK_S
) -> list[dict[str, Any]]:
    """Check every version against float64, and time all in alternating rounds.

    Args:
        layer: the convolution.
        rounds: number of rounds.
        block_s: CPU time of a version in a round, in seconds.

    Returns:
        For each version its name (``rung``), milliseconds of each round (``rounds_ms``), their
        median (``median_ms``), GFLOP/s and bytes of the im2col matrix (``extra_bytes``).
    """
    numbers = Numbers.of(layer)
    wanted, found = exact(layer, numbers), rungs(layer, numbers)
    for rung in found:
        rung.start()
        off, most = error(rung.result(), wanted), bound(layer)
        if off > most:
            raise WrongResultError(f"{rung.name}: {off:.1e} from float64, more than {most:.1e}")
    programs = {rung.name: HostProgram(rung.start) for rung in found}
    times = measure(programs, rounds=rounds, block_s=block_s)
    return [
        {"rung": rung.name, "rounds_ms": list(own.medians), "median_ms": own.median,
         "gflops": layer.flops / own.median / 1e6, "extra_bytes": rung.extra_bytes}
        for rung, own in zip(found, times.values(), strict=True)
    ]  # fmt: skip


@click.command()
@click.option("--batch", default=32, show_default=True, help="Images.")
@click.option("--rounds", default=ROUNDS, show_default=True, help="Alternating rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print the rounds as JSON.")
@click.argument("names", nargs=-1, metavar="[LAYER]...")
def main(batch: int, rounds: int, as_json: bool, names: tuple[str, ...]) -> None:
    """Check and time a direct convolution and im2col with a product, on one core."""
    try:
        layers = {name: layer_of(name, batch) for name in names or LAYERS}
        rows = {name: measure_rungs(layer, rounds) for name, layer in layers.items()}
    except UserError as problem:
        print(f"benchmarks.ladder.cpu: {problem}", file=sys.stderr)
        sys.exit(2)
    except WrongResultError as problem:
        sys.exit(str(problem))
    if as_json:
        print(json.dumps(rows))
        return
    for name, found in rows.items():
        print(f"\n{name}, {batch} images, {rounds} rounds")
        print(f"{'rung':<22}{'ms':>10}{'fastest':>10}{'slowest':>10}{'GFLOP/s':>10}{'MB':>8}")
        for row in found:
            low, high = min(row["rounds_ms"]), max(row["rounds_ms"])
            print(f"{row['rung']:<22}{row['median_ms']:>10.3f}{low:>10.3f}{high:>10.3f}"
                  f"{row['gflops']:>10.1f}{row['extra_bytes'] / 1e6:>8.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
