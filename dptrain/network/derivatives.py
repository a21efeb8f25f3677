"""Derivatives of expressions by the rules of calculus."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dptrain.network.expressions import (
    COMPARISONS,
    CONSTANT,
    NAME,
    Expression,
    apply,
    constant,
    number,
)

ZERO, ONE = constant(0.0), constant(1.0)

_RULES: Mapping[str, Callable[[Expression, Expression], Expression]] = {
    "abs": lambda u, y: apply("where", u > 0, ONE, apply("where", u < 0, constant(-1.0), ZERO)),
    "exp": lambda u, y: y,
    "expm1": lambda u, y: apply("exp", u),
    "log": lambda u, y: 1 / u,
    "log1p": lambda u, y: 1 / (1 + u),
    "sqrt": lambda u, y: 0.5 / y,
    "sin": lambda u, y: apply("cos", u),
    "cos": lambda u, y: -apply("sin", u),
    "tanh": lambda u, y: 1 - y * y,
    "erf": lambda u, y: 2.0 / math.sqrt(math.pi) * apply("exp", -(u * u)),
    "sigmoid": lambda u, y: y * (1 - y),
    "softplus": lambda u, y: apply("sigmoid", u),
    "normal_cdf": lambda u, y: apply("normal_pdf", u),
    "normal_pdf": lambda u, y: -(u * y),
}
"""dy/du of each function y of one operand u."""


def derivative(expression: Expression, name: str = "x") -> Expression:
    """Return the derivative of an expression by a name.

    At the kinks of ``min``, ``max`` and ``where`` it is that of one side, 0 for ``max(x, 0)`` at 0;
    for ``abs(x)`` it is 0 at 0.

    Examples:
        >>> from dptrain.network.expressions import parse
        >>> print(derivative(parse("x * sigmoid(2 * x)", ["x"])))
        sigmoid(2 * x) + x * (sigmoid(2 * x) * (1 - sigmoid(2 * x)) * 2)
    """
    found: dict[Expression, Expression] = {}

    def slope(node: Expression) -> Expression:
        if node.operator == CONSTANT:
            return ZERO
        if node.operator == NAME:
            return ONE if node.value == name else ZERO
        if node not in found:
            found[node] = _slope(node, slope)
        return found[node]

    return slope(expression)


def _slope(node: Expression, slope: Callable[[Expression], Expression]) -> Expression:
    operator, operands = node.operator, node.operands
    if operator == "where":
        condition, first, second = operands
        return select(condition, slope(first), slope(second))
    if len(operands) == 1:
        (u,) = operands
        du = slope(u)
        if operator == "neg":
            return negative(du)
        return du if du == ZERO else product(_RULES[operator](u, node), du)
    a, b = operands
    da, db = slope(a), slope(b)
    if operator in "+-":
        return total(da, db if operator == "+" else negative(db))
    if operator == "*":
        return total(product(da, b), product(a, db))
    if operator == "/":
        if db == ZERO:
            return quotient(da, b)
        return quotient(total(da, negative(product(node, db))), b)
    assert operator in ("min", "max"), operator
    return select(apply("<" if operator == "min" else ">", a, b), da, db)


# Arithmetic that leaves out what has no effect.


def total(a: Expression, b: Expression) -> Expression:
    """Return a + b."""
    if b == ZERO or a == ZERO:
        return a if b == ZERO else b
    if a.operator == b.operator == CONSTANT:
        return constant(number(a) + number(b))
    return a - b.operands[0] if b.operator == "neg" else a + b


def negative(a: Expression) -> Expression:
    """Return −a."""
    return a.operands[0] if a.operator == "neg" else ZERO if a == ZERO else -a


def product(a: Expression, b: Expression) -> Expression:
    """Return a · b; a factor 0 counts as exact."""
    if ZERO in (a, b):
        return ZERO
    if a == ONE:
        return b
    if a.operator == b.operator == CONSTANT:
        return constant(number(a) * number(b))
    return a if b == ONE else a * b


def quotient(a: Expression, b: Expression) -> Expression:
    """Return a / b."""
    return a if a == ZERO or b == ONE else a / b


def select(condition: Expression, a: Expression, b: Expression) -> Expression:
    """Return where(condition, a, b)."""
    assert condition.operator in COMPARISONS
    return a if a == b else apply("where", condition, a, b)


def times(factor: Expression, slope: Expression, *, first: bool) -> Expression:
    """Return factor · slope. In branches, the result is the factor for a slope 1, and 0 for 0.

    Args:
        factor: the gradient dy.
        slope: a derivative.
        first: True multiplies the first factor of products, so that dy · (a · b) is (dy · a) · b.
    """
    if slope.operator == "where":
        condition, a, b = slope.operands
        return select(condition, times(factor, a, first=first), times(factor, b, first=first))
    if first and slope.operator in "*/":
        a, b = slope.operands
        return apply(slope.operator, times(factor, a, first=first), b)
    return product(factor, slope)
