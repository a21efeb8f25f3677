"""Kernels of functions of single elements, written from their expressions. Items are elements.

The kernels of a function are compiled and cached like those of a module: their key in the cache
contains their text. NaN passes through all kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.backends.numba import vector_functions
from dptrain.native.jit import Kernel
from dptrain.network.expression_code import Language, without_extrema, write
from dptrain.network.expressions import NORMAL_DENSITY, SQRT_HALF, Expression, nodes, parse

_TEMPLATES: Mapping[str, str] = {
    **{operator: f"({{0}} {operator} {{1}})" for operator in ("+", "-", "*", "/")},
    **{operator: f"({{0}} {operator} {{1}})" for operator in ("<", "<=", ">", ">=")},
    **{name: f"math.{name}({{0}})" for name in ("exp", "expm1", "log", "log1p", "sqrt", "sin")},
    "cos": "math.cos({0})",
    "neg": "(-{0})",
    "abs": "abs({0})",
    "tanh": "np.tanh({0})",
    "erf": "math.erf({0})",
    "where": "({1} if {0} else {2})",
    # At x < −88 the exponential overflows to infinity, and the result is 0.
    "sigmoid": "(ONE / (ONE + math.exp(-{0})))",
    "softplus": "(({0} if {0} > ZERO else ZERO) + math.log1p(math.exp(-abs({0}))))",
    # The complementary error function has no cancellation at x < 0.
    "normal_cdf": f"(0.5 * math.erfc({-SQRT_HALF!r} * {{0}}))",
    "normal_pdf": f"({NORMAL_DENSITY!r} * math.exp(-0.5 * {{0}} * {{0}}))",
}

_SINGLE = Language(_TEMPLATES, lambda value: f"np.float32({value!r})", "{0} = {1}")
DOUBLE = Language(_TEMPLATES, repr, "{0} = {1}")
"""Code in float64; it contains the names ONE, ZERO, math and np."""

_VECTORISED = ("exp", "expm1", "normal_cdf", "sigmoid", "softplus", "tanh")
_VECTORS = Language(
    {
        **_TEMPLATES,
        **{name: f"functions.{name}({{0}})" for name in _VECTORISED},
        "normal_pdf": f"({NORMAL_DENSITY!r} * functions.exp(-0.5 * {{0}} * {{0}}))",
    },
    repr,
    "{0} = {1}",
)
"""Code in float64 with `vector_functions`; it contains the names functions, math and np."""

_IN_DOUBLE = {"erf", "normal_pdf", *_VECTORISED}
"""Functions that are computed in float64."""


@functools.cache
def forward(kind: str, expression: str) -> Kernel:
    """Return the kernel ``y = f(x)`` with the arrays (x, y).

    Args:
        kind: name of the function.
        expression: f as text in terms of ``x``.
    """
    return _kernel("forward", f"{kind}_forward", parse(expression, ["x"]), ("x",), "y")


@functools.cache
def backward(kind: str, expression: str, reads: str) -> Kernel:
    """Return the kernel ``dx = dy f'`` with the arrays (dy, x or y, dx).

    Args:
        kind: name of the function.
        expression: dx as text in terms of ``dy``, and of ``x`` or ``y``.
        reads: ``x`` or ``y``.
    """
    found = parse(expression, ["dy", reads])
    return _kernel("backward", f"{kind}_backward", found, ("dy", reads), "dx", reads)


def _kernel(
    maker: str,
    name: str,
    expression: Expression,
    inputs: tuple[str, ...],
    result: str,
    *arguments: str,
) -> Kernel:
    kind = name.rpartition("_")[0]
    text = _source(name, expression, inputs, result)
    modules = {"np": np, "math": math, "functions": vector_functions}
    namespace: dict[str, Any] = {**modules, "__name__": __name__}
    # The text consists of the templates above, finite numbers and the names in `inputs`.
    exec(compile(text, f"{kind}.py", "exec"), namespace)
    return Kernel(namespace[name], text, (maker, kind, str(expression), *arguments))


def _source(name: str, expression: Expression, inputs: tuple[str, ...], result: str) -> str:
    """Return the Python source of a kernel."""
    is_wide = any(node.operator in _IN_DOUBLE for node in nodes(expression))
    code = write(without_extrema(expression), _VECTORS if is_wide else _SINGLE)
    number = "float64" if is_wide else "float32"
    arrays = [f"{each}_array" for each in (*inputs, result)]
    loads = [f"{each} = np.{number}({each}_array[i])" for each in inputs]
    body = [*loads, *code.statements, f"{result}_array[i] = {code.result}"]
    lines = [
        f"def {name}(items, {', '.join(arrays)}):",
        "    for i in range(np.uintp(items.start), np.uintp(items.stop)):",
        *(f"        {line}" for line in body),
    ]
    return "\n".join(lines) + "\n"
