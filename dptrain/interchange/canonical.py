"""One form for expressions that are equal by the rules of arithmetic, to compare them.

Sums and products are lists in one order, differences and quotients are sums and products, and
functions are written with exp, log and erf: x / (1 + exp(−x)) has the form of x · sigmoid(x).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dptrain.errors import UserError
from dptrain.network.expressions import (
    CONSTANT,
    MOST_NODES_BETWEEN,
    NAME,
    NORMAL_DENSITY,
    SQRT_HALF,
    Expression,
    apply,
    number,
)

Form = tuple[Any, ...]

TOLERANCE = 1e-4
"""Relative difference of constants that count as equal: files round them, or state few digits."""


def canonical(expression: Expression) -> Form:
    """Return the form of an expression.

    Raises:
        UserError: the form has much more parts than a function has.
        ZeroDivisionError: the expression has a division by 0.
    """
    if _size(expression) > MOST_NODES_BETWEEN:
        raise UserError(f"the expression has more than {MOST_NODES_BETWEEN} operations")
    return _form(expression)


def _size(node: Expression) -> int:
    """Return a bound of the number of parts; the density has its operand twice."""
    parts = sum(map(_size, node.operands))
    return 1 + (2 * parts if node.operator == "normal_pdf" else parts)


def _form(expression: Expression) -> Form:
    coefficient, form = _scaled(expression)
    return ("scaled", coefficient, form)


def is_close(a: Any, b: Any) -> bool:
    """Return True if two forms are equal but for the rounding of constants."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-9)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(is_close, a, b))
    return bool(a == b)


_ONE: Form = ("product",)


def _scaled(node: Expression) -> tuple[float, Form]:
    """Return a number and a form whose product is the expression."""
    operator, operands = node.operator, node.operands
    if operator == CONSTANT:
        return number(node), _ONE
    if operator == NAME:
        return 1.0, ("product", (str(node.value),))
    if operator in ("+", "-"):
        return _sum(node)
    if operator == "neg":
        coefficient, form = _scaled(operands[0])
        return -coefficient, form
    if operator in "*/":
        return _product(node)
    return _function(node)


def _terms(node: Expression, sign: float) -> Iterator[tuple[float, Form]]:
    if node.operator in ("+", "-"):
        yield from _terms(node.operands[0], sign)
        yield from _terms(node.operands[1], sign if node.operator == "+" else -sign)
    elif node.operator == "neg":
        yield from _terms(node.operands[0], -sign)
    else:
        coefficient, form = _scaled(node)
        yield sign * coefficient, form


def _sum(node: Expression) -> tuple[float, Form]:
    totals: list[tuple[Form, float]] = []
    for coefficient, form in _terms(node, 1.0):
        for index, (other, total) in enumerate(totals):
            if is_close(other, form):
                totals[index] = other, total + coefficient
                break
        else:
            totals.append((form, coefficient))
    kept = sorted((pair for pair in totals if pair[1] != 0.0), key=_order)
    if not kept:
        return 0.0, _ONE
    if len(kept) == 1:
        return kept[0][1], kept[0][0]
    # The first coefficient is 1, so that 2 (a + b) equals 2 a + 2 b.
    first = kept[0][1]
    return first, ("product", ("sum", *((form, value / first) for form, value in kept)))


def _product(node: Expression) -> tuple[float, Form]:
    left, right = map(_scaled, node.operands)
    (a, first), (b, second) = left, right
    if node.operator == "/":
        if b == 0.0:
            raise ZeroDivisionError
        b = 1.0 / b
        second = ("product", *(_inverse(factor) for factor in second[1:]))
    factors = sorted((*first[1:], *second[1:]), key=_order)
    return a * b, ("product", *factors)


def _inverse(factor: Form) -> Form:
    return factor[1] if factor[0] == "inverse" else ("inverse", factor)


def _function(node: Expression) -> tuple[float, Form]:
    operator, operands = node.operator, node.operands
    exp, u = "exp", operands[0]
    lowered = {
        "sigmoid": lambda: 1 / (1 + apply(exp, -u)),
        "softplus": lambda: apply("log", 1 + apply(exp, u)),
        "expm1": lambda: apply(exp, u) - 1,
        "log1p": lambda: apply("log", 1 + u),
        "normal_cdf": lambda: 0.5 * (1 + apply("erf", u * SQRT_HALF)),
        "normal_pdf": lambda: NORMAL_DENSITY * apply(exp, -0.5 * u * u),
    }
    if operator in lowered:
        return _scaled(lowered[operator]())
    if operator == "where":
        return _selection(node)
    parts = [_form(operand) for operand in operands]
    if operator in ("min", "max"):
        parts.sort(key=_order)
    return 1.0, ("product", (operator, *parts))


def _selection(node: Expression) -> tuple[float, Form]:
    """Return where(a < b, c, d); it is a maximum or minimum if c and d are a and b."""
    condition, *branches = node.operands
    a, b = map(_form, condition.operands)
    c, d = map(_form, branches)
    if condition.operator in (">", ">="):
        a, b = b, a
    for name, first, second in (("max", b, a), ("min", a, b)):
        if is_close(c, first) and is_close(d, second):
            return 1.0, ("product", (name, *sorted((a, b), key=_order)))
    return 1.0, ("product", ("where", len(condition.operator), a, b, c, d))


def _order(form: Any) -> str:
    """Return a key that does not depend on the digits of constants."""
    if isinstance(form, float):
        return f"{form:.3g}"
    if isinstance(form, tuple):
        return f"({','.join(map(_order, form))})"
    return str(form)
