"""PyTorch code of expressions."""

from __future__ import annotations

from dptrain.network.expression_code import Language, write
from dptrain.network.expressions import CONSTANT, NORMAL_DENSITY, Expression, variable

_NAMES = ["abs", "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tanh", "erf", "sigmoid"]

_TORCH = Language(
    {
        **{each: f"({{0}} {each} {{1}})" for each in ("+", "-", "*", "/", "<", "<=", ">", ">=")},
        **{name: f"torch.{name}({{0}})" for name in _NAMES},
        "neg": "(-{0})",
        "softplus": "F.softplus({0})",
        "normal_cdf": "torch.special.ndtr({0})",
        "normal_pdf": f"({NORMAL_DENSITY!r} * torch.exp(-0.5 * {{0}} ** 2))",
        "where": "torch.where({0}, {1}, {2})",
        "min": "torch.clamp({0}, max={1})",
        "max": "torch.clamp({0}, min={1})",
    },
    repr,
    "",
)


def torch_code(expression: Expression) -> str:
    """Return code that computes an expression of ``{0}``, a tensor."""
    whole = write(_in_order(expression), _TORCH, shares=False).result
    return whole[1:-1] if expression.operator in ("+", "-", "*", "/", "neg") else whole


def _in_order(expression: Expression) -> Expression:
    """Let the first operand of ``min`` and ``max`` be a tensor."""
    if expression == variable("x"):
        return variable("{0}")
    operands = tuple(map(_in_order, expression.operands))
    if expression.operator in ("min", "max") and operands[0].operator == CONSTANT:
        operands = operands[::-1]
    return Expression(expression.operator, operands, expression.value)
