"""Functions of single elements on every backend: code of generated expressions, and all numbers."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dptrain
from dptrain.backends.cuda.elementwise import activations as cuda_activations
from dptrain.backends.memory import as_numbers
from dptrain.backends.numba import activations as numba_activations
from dptrain.native.jit import Items
from dptrain.network import ACTIVATIONS, Dense, MeanSquaredError, Network
from dptrain.network.derivatives import derivative, times
from dptrain.network.elementwise import DY, Activation
from dptrain.network.expressions import Expression, apply, constant, evaluate, variable
from dptrain.network.own_functions import activation
from tests.unit.backends.numba.test_numba_functions import FUNCTIONS
from tests.unit.backends.selection import QUICK_VARIANTS, marked
from tests.unit.cuda.launching import BF16

X = variable("x")
POINTS = np.array([-3.3, -1.7, -0.4, 0.2, 0.9, 2.1], np.float32)
ROUNDINGS = 2e-5
COUNT = 200


def expressions(seed: int) -> Iterator[Expression]:
    """Yield random expressions of moderate size, whose values are moderate, too."""
    random_ = random.Random(seed)
    bounded = (
        "sigmoid",
        "tanh",
        "softplus",
        "erf",
        "normal_cdf",
        "normal_pdf",
        "sin",
        "cos",
        "abs",
    )

    def tree(depth: int) -> Expression:
        kind = random_.random()
        if depth == 0 or kind < 0.15:
            return X if random_.random() < 0.7 else constant(round(random_.uniform(-2, 2), 2))
        if kind < 0.45:
            return apply(random_.choice(bounded), tree(depth - 1))
        if kind < 0.75:
            operator = random_.choice(("+", "-", "*", "min", "max"))
            return apply(operator, tree(depth - 1), tree(depth - 1))
        if kind < 0.85:
            u = tree(depth - 1)
            return random_.choice((-u, u / (1 + u * u), apply("expm1", -abs(u))))
        if kind < 0.9:
            u = abs(tree(depth - 1))
            return random_.choice((apply("log", 1.5 + u), apply("log1p", u), apply("sqrt", 1 + u)))
        condition = apply(random_.choice(("<", "<=", ">", ">=")), tree(1), tree(1))
        return apply("where", condition, tree(depth - 1), tree(depth - 1))

    for _ in range(COUNT):
        yield tree(3)


def close_to_exact(found: Any, tree: Expression, points: NDArray[Any]) -> None:
    """Compare with float64; a comparison of the tree may fall on the other side at a tie."""
    values = {"x": points.astype(np.float64), "dy": np.full(len(points), 1.5)}
    exact = np.broadcast_to(evaluate(tree, values), points.shape)
    near = [np.broadcast_to(evaluate(tree, {**values, "x": values["x"] + h}), points.shape)
            for h in (-1e-6, 1e-6)]  # fmt: skip
    is_tie = np.abs(near[0] - near[1]) > 1e-3 * (1.0 + np.abs(exact))
    error = np.abs(np.asarray(found, np.float64) - exact)
    assert ((error <= ROUNDINGS * (1.0 + np.abs(exact))) | is_tie).all(), tree


def test_numba_kernels_of_generated_expressions() -> None:
    """The Python functions that Numba compiles, run by the interpreter.

    Those that they call exist in compiled code only.
    """
    items, exact = Items(0, len(POINTS), 0), SimpleNamespace(**FUNCTIONS)
    for tree in expressions(1):
        results = np.zeros(len(POINTS), np.float32)
        kernel = numba_activations.forward("generated", str(tree))
        kernel.py_func.__globals__["functions"] = exact
        kernel.py_func(items, POINTS, results)
        close_to_exact(results, tree, POINTS)
        gradient = times(DY, derivative(tree), first=True)
        kernel = numba_activations.backward("generated", str(gradient), "x")
        dy = np.full(len(POINTS), 1.5, np.float32)
        kernel.py_func.__globals__["functions"] = exact
        kernel.py_func(items, dy, POINTS, results)
        close_to_exact(results, gradient, POINTS)


def test_cuda_code_of_generated_expressions(tmp_path: Path) -> None:
    """The statements of ``activations.cu``, compiled as C++ of the host."""
    trees = [*expressions(2)]
    pairs = [(tree, times(DY, derivative(tree), first=False)) for tree in trees]
    functions = [
        f'extern "C" float f{i}(float x) {{ {cuda_activations.statements(tree)} }}\n'
        f'extern "C" float g{i}(float dy, float x) {{ {cuda_activations.statements(slope)} }}'
        for i, (tree, slope) in enumerate(pairs)
    ]
    source, library = tmp_path / "f.cpp", tmp_path / "f.so"
    source.write_text("#include <cmath>\nusing namespace std;\n" + "\n".join(functions))
    subprocess.run(["g++", "-O0", "-w", "-shared", "-fPIC", source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    for i, (tree, slope) in enumerate(pairs):
        forward, backward = getattr(loaded, f"f{i}"), getattr(loaded, f"g{i}")
        forward.restype = backward.restype = ctypes.c_float
        forward.argtypes, backward.argtypes = [ctypes.c_float], [ctypes.c_float] * 2
        close_to_exact([forward(x) for x in POINTS.tolist()], tree, POINTS)
        close_to_exact([backward(1.5, x) for x in POINTS.tolist()], slope, POINTS)


# All numbers: far from 0, and at kinks.

WIDTH = 48
EDGES = [
    0.0,
    -0.0,
    3.0,
    -3.0,
    6.0,
    -6.0,
    1.0,
    -1.0,
    88.0,
    -88.0,
    104.0,
    -104.0,
    3e4,
    -3e4,
    1e-6,
    -1e-6,
]

OWN = {
    "swish": (("x * sigmoid(beta * x)",), {"beta": 1.5}),
    "snake": (("x + sin(x) * sin(x)",), {}),
    "logistic": (("1 / (1 + exp(-x))", "y * (1 - y)"), {}),
}
"""Functions that a program defines: arguments of `activation`."""


def functions() -> dict[str, Activation]:
    own = {name: activation(name, *texts, **values)() for name, (texts, values) in OWN.items()}
    return {**{kind: cls() for kind, cls in ACTIVATIONS.items()}, **own}


def numbers() -> NDArray[np.float32]:
    """Return numbers (WIDTH, WIDTH) that bfloat16 represents, so that every precision has them."""
    rng = np.random.default_rng(0)
    count = WIDTH * WIDTH - len(EDGES)
    scales = 10.0 ** rng.uniform(-3.0, 1.5, count)
    values = np.concatenate([rng.standard_normal(count) * scales, EDGES]).astype(np.float32)
    return np.asarray(as_numbers(BF16.store(values)), np.float32).reshape(WIDTH, WIDTH)


VARIANTS = [
    ("reference", "fp64"), ("reference", "fp32"), ("numba", "fp32"), ("cuda", "fp32"),
    ("cuda", "bf16"), ("cudnn", "fp32"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "backend", "precision"),
    [
        marked(kind, *variant, name="-".join((kind, *variant)),
               is_quick=variant in QUICK_VARIANTS and kind in (*OWN, "hardswish", "elu"))
        for kind in (*ACTIVATIONS, *OWN)
        for variant in VARIANTS
    ],
)  # fmt: skip
def test_all_numbers_equal_the_expression_in_float64(
    kind: str, backend: str, precision: str
) -> None:
    if backend == "cudnn" and kind == "sigmoid":
        pytest.skip("cuDNN computes this layer")
    layer, x = functions()[kind], numbers()
    network = Network((WIDTH,), [Dense(WIDTH), layer], MeanSquaredError())
    replica = dptrain.make_replica(network, backend, WIDTH, precision=precision)
    # On a one-hot input, the output of the dense layer is its weight, and dx its gradient.
    replica.parameters["dense1.weight"] = x.T
    replica.parameters["dense1.bias"] = np.zeros(WIDTH)
    target = np.random.default_rng(1).standard_normal((WIDTH, WIDTH))
    replica.forward_backward(np.eye(WIDTH), target)
    wide = {"x": x.astype(np.float64), **layer.formula.values}
    found = np.asarray(replica.output(), np.float64)
    exact = np.asarray(evaluate(layer.formula.forward, wide))
    unit = {"fp64": 1e-15, "fp32": 1.2e-7, "bf16": 2.0**-8}[precision]
    # 1 + erf(x) has a cancellation, also in float64.
    cancels = "normal_cdf" in layer.function.expression
    near = 4 * min(unit, 1.2e-7) * np.abs(x) * cancels + 1e-30
    assert_close(x, found, exact, 8 * unit * np.abs(exact) + near)
    # Gradients follow from the output as it is stored.
    dy = 2.0 * (found - target) / x.size
    slope = evaluate(layer.formula.slope, {**wide, "y": found})
    dx = np.asarray(replica.gradients["dense1.weight"], np.float64).T
    single = min(unit, 1.2e-7)
    # Terms of a slope are at most about 1 + |x|, and dy is the difference of two numbers.
    terms = (1.0 + np.abs(x)) * np.abs(dy)
    parts = np.abs(slope) * 2.0 * (np.abs(found) + np.abs(target)) / x.size
    bound = 4 * unit * np.abs(dy * slope) + 16 * single * (terms + parts)
    assert_close(x, dx, dy * slope, bound + 1e-30)


def assert_close(x: Any, found: Any, exact: Any, bound: Any) -> None:
    """Check that results are within a bound; an error names the x with the largest excess."""
    excess = np.abs(found - exact) - bound
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0.0, (
        f"at x = {x[worst]}: found {found[worst]}, expected {exact[worst]}; if nearly equal terms "
        "of the expression cancel, write it in another form (docs/developers/adding-a-layer.md)"
    )
