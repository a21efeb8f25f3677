"""Code of expressions in other languages, from a template for each operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dptrain.network.expressions import (
    COMPARISONS,
    CONSTANT,
    NAME,
    Expression,
    apply,
    nodes,
    number,
)


class Language(NamedTuple):
    """How a language writes expressions.

    Attributes:
        templates: code of each operator, with ``{0}``, ``{1}``, ``{2}`` for the operands.
        constant: returns the code of a number.
        assignment: statement that assigns the value of a part to a name: ``{0} = {1}``.
    """

    templates: Mapping[str, str]
    constant: Callable[[float], str]
    assignment: str


class Code(NamedTuple):
    """Statements that compute parts of an expression, and the code of the whole."""

    statements: list[str]
    result: str


def write(expression: Expression, language: Language, *, shares: bool = True) -> Code:
    """Return the code of an expression.

    Args:
        expression: the expression.
        language: the language.
        shares: True computes parts that occur several times once, by statements.
    """
    uses = _uses(expression, language.templates) if shares else Counter[Expression]()
    statements: list[str] = []
    written: dict[Expression, str] = {}

    def code_of(node: Expression) -> str:
        if node.operator == NAME:
            return str(node.value)
        if node.operator == CONSTANT:
            return language.constant(number(node))
        if node not in written:
            code = language.templates[node.operator].format(*map(code_of, node.operands))
            if uses[node] > 1 and node.operator not in COMPARISONS:
                name = f"t{len(statements)}"
                statements.append(language.assignment.format(name, code))
                code = name
            written[node] = code
        return written[node]

    return Code(statements, code_of(expression))


def _uses(expression: Expression, templates: Mapping[str, str]) -> Counter[Expression]:
    """Return how often the code of each part would be written."""
    uses: Counter[Expression] = Counter()
    for node in set(nodes(expression)):
        for index, operand in enumerate(node.operands):
            uses[operand] += templates[node.operator].count(f"{{{index}}}")
    return uses


def without_extrema(expression: Expression) -> Expression:
    """Replace ``min`` and ``max`` by comparisons that pass NaN on, as those of NumPy do."""
    if not expression.operands:
        return expression
    operands = tuple(map(without_extrema, expression.operands))
    if expression.operator not in ("min", "max"):
        return Expression(expression.operator, operands)
    before = "<" if expression.operator == "max" else ">"
    a, b = operands if operands[1].operator == CONSTANT else reversed(operands)
    if b.operator == CONSTANT:
        return apply("where", apply(before, a, b), b, a)
    return apply(
        "where", apply(before, a, b), b, apply("where", apply(f"{before}=", b, a), a, a + b)
    )
