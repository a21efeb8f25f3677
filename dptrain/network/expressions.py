"""Functions of one number as expressions: trees over a closed set of operators.

An expression is written as text, ``x * clip(x + 3, 0, 6) / 6``, or results from calling a Python
function with a variable. Reading text evaluates nothing: `parse` accepts numbers, the names that it
is given, and the functions of `VOCABULARY`. Backends and exporters write code from the tree.

The functions below accept expressions. NumPy's functions of the same names accept them, too.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dptrain.bounds import as_number
from dptrain.errors import UserError, shown, suggest
from dptrain.network.outputs import sigmoid as stable_sigmoid

SQRT_HALF = math.sqrt(0.5)
"""Φ(x) = ½ (1 + erf(x · SQRT_HALF))."""

NORMAL_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
"""φ(0), the derivative of Φ at 0; φ(x) is this times exp(−x² / 2)."""

LONGEST_TEXT = 2000
"""Characters of the text of an expression."""
MOST_NODES = 500
"""Nodes of an expression, and of its derivative."""
DEEPEST = 100
"""Operators within each other in an expression."""
MOST_NODES_BETWEEN, DEEPEST_BETWEEN = 20_000, 300
"""Likewise for expressions that result from others, such as derivatives before they are simplified.
Equal parts count each time, so that work on the tree is bounded."""
LARGEST_POWER = 8

CONSTANT, NAME = "constant", "name"
COMPARISONS = ("<", "<=", ">", ">=")
_INFIX = {"+": 2, "-": 2, "*": 3, "/": 3, **dict.fromkeys(COMPARISONS, 1)}
"""Precedence of the operators between two operands."""
_UNARY, _ATOM = 4, 5

_erf = np.vectorize(math.erf, otypes=[np.float64])
"""The error function, which NumPy does not have."""


@dataclass(frozen=True)
class Operator:
    """A function of `VOCABULARY`.

    Attributes:
        compute: evaluates it on arrays and numbers.
        operands: number of operands.
        flops: number of operations that it counts for; a function such as exp is one.
    """

    compute: Callable[..., Any]
    operands: int = 1
    flops: int = 1


VOCABULARY: Mapping[str, Operator] = {
    "abs": Operator(np.abs),
    "exp": Operator(np.exp),
    "expm1": Operator(np.expm1),
    "log": Operator(np.log),
    "log1p": Operator(np.log1p),
    "sqrt": Operator(np.sqrt),
    "sin": Operator(np.sin),
    "cos": Operator(np.cos),
    "tanh": Operator(np.tanh, flops=3),
    "erf": Operator(_erf),
    "sigmoid": Operator(lambda x: stable_sigmoid(np.asarray(x)), flops=3),
    "softplus": Operator(lambda x: np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x))), flops=4),
    "normal_cdf": Operator(lambda x: 0.5 * (1.0 + _erf(x * SQRT_HALF)), flops=4),
    "normal_pdf": Operator(lambda x: NORMAL_DENSITY * np.exp(-0.5 * x * x), flops=4),
    "min": Operator(np.minimum, 2),
    "max": Operator(np.maximum, 2),
    "where": Operator(np.where, 3, flops=0),
}
"""Functions by name. In terms of exp, erf and log,

- ``sigmoid(x)`` is 1 / (1 + exp(−x)) and ``softplus(x)`` log(1 + exp(x)), without overflow;
- ``normal_cdf(x)`` is Φ(x), the distribution function of the standard normal distribution, and
  ``normal_pdf(x)`` its density φ(x);
- ``where(condition, a, b)`` is a if a comparison holds, else b.
"""

_ARITHMETIC: Mapping[str, Operator] = {
    "+": Operator(np.add, 2),
    "-": Operator(np.subtract, 2),
    "*": Operator(np.multiply, 2),
    "/": Operator(np.divide, 2),
    "neg": Operator(np.negative),
    "<": Operator(np.less, 2),
    "<=": Operator(np.less_equal, 2),
    ">": Operator(np.greater, 2),
    ">=": Operator(np.greater_equal, 2),
}
_OPERATORS = {**VOCABULARY, **_ARITHMETIC}


@dataclass(frozen=True)
class Expression:
    """A constant, a name, or an operator with its operands.

    Attributes:
        operator: the operator, `CONSTANT` or `NAME`.
        operands: of the operator.
        value: of a constant, or the name.
        size: number of nodes; equal parts count each time.
        depth: number of operators within each other.

    Raises:
        UserError: the expression is much larger, or deeper, than a function may be.

    Examples:
        >>> x = variable("x")
        >>> print(x * clip(x + 3, 0, 6) / 6)
        x * min(max(x + 3, 0), 6) / 6
    """

    operator: str
    operands: tuple[Expression, ...] = ()
    value: float | str = 0.0
    size: int = field(init=False, repr=False, compare=False)
    depth: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = 1 + sum(each.size for each in self.operands)
        depth = max((1 + each.depth for each in self.operands), default=0)
        if size > MOST_NODES_BETWEEN or depth > DEEPEST_BETWEEN:
            _require(size, depth, "a part of the expression")
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "depth", depth)

    # NumPy's functions, with Python's and NumPy's numbers as operands.
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Expression:
        if ufunc is np.square and not options:
            return power(self, 2)
        name = _UFUNCS.get(ufunc)
        if name is None or method != "__call__" or options:
            raise UserError(f"numpy.{ufunc.__name__} has no expression; {_expected()}")
        return apply(name, *inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Expression:
        if function is np.where and not kwargs:
            return apply("where", *args)
        if function is np.clip and not kwargs:
            return clip(*args)
        raise UserError(f"numpy.{function.__name__} has no expression; {_expected()}")

    def __add__(self, other: Operand) -> Expression:
        return apply("+", self, other)

    def __radd__(self, other: Operand) -> Expression:
        return apply("+", other, self)

    def __sub__(self, other: Operand) -> Expression:
        return apply("-", self, other)

    def __rsub__(self, other: Operand) -> Expression:
        return apply("-", other, self)

    def __mul__(self, other: Operand) -> Expression:
        return apply("*", self, other)

    def __rmul__(self, other: Operand) -> Expression:
        return apply("*", other, self)

    def __truediv__(self, other: Operand) -> Expression:
        return apply("/", self, other)

    def __rtruediv__(self, other: Operand) -> Expression:
        return apply("/", other, self)

    def __pow__(self, exponent: object) -> Expression:
        return power(self, exponent)

    def __neg__(self) -> Expression:
        return apply("neg", self)

    def __pos__(self) -> Expression:
        return self

    def __abs__(self) -> Expression:
        return apply("abs", self)

    def __lt__(self, other: Operand) -> Expression:
        return apply("<", self, other)

    def __le__(self, other: Operand) -> Expression:
        return apply("<=", self, other)

    def __gt__(self, other: Operand) -> Expression:
        return apply(">", self, other)

    def __ge__(self, other: Operand) -> Expression:
        return apply(">=", self, other)

    def __bool__(self) -> bool:
        raise UserError(
            "an expression is neither true nor false before x has a value; write "
            "where(x > 0, a, b) for a condition, and clip, min or max of "
            "dptrain.network.expressions"
        )

    def __float__(self) -> float:
        raise UserError(
            "an expression has no value before x has one; use exp, tanh and others of "
            "dptrain.network.expressions or of NumPy, not of math"
        )

    def __str__(self) -> str:
        return text(self)


Operand = Expression | float


def constant(value: float | np.number[Any]) -> Expression:
    """Return a number as an expression."""
    value = as_number(value, float)
    if type(value) is not float or not math.isfinite(value):
        raise UserError(f"{shown(value)} is in an expression; expected finite numbers")
    return Expression(CONSTANT, value=value)


def variable(name: str) -> Expression:
    """Return a name as an expression."""
    return Expression(NAME, value=name)


def apply(operator: str, *operands: Operand) -> Expression:
    """Return an operator with operands; the negative of a constant is a constant.

    Raises:
        UserError: the number of operands is wrong, or one is neither expression nor number.
    """
    known = _OPERATORS[operator]
    if len(operands) != known.operands:
        raise UserError(f"{operator} has {len(operands)} operands; expected {known.operands}")
    found = tuple(map(_expression, operands))
    for index, each in enumerate(found):
        is_condition = operator == "where" and index == 0
        if (each.operator in COMPARISONS) != is_condition:
            raise UserError(
                f"'{shown(text(each))}' is {'not ' * is_condition}a comparison; where(a < b, c, d) "
                "has one as its first operand, and comparisons stand nowhere else"
            )
    if operator == "neg" and found[0].operator == CONSTANT:
        return constant(-number(found[0]))
    return Expression(operator, found)


def _expression(value: Any) -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        return constant(value)
    raise UserError(f"{shown(repr(value))} is in an expression; expected numbers and expressions")


def number(expression: Expression) -> float:
    """Return the value of a constant."""
    assert expression.operator == CONSTANT
    return float(expression.value)


def power(base: Expression, exponent: object) -> Expression:
    """Return a product of equal factors."""
    is_constant = isinstance(exponent, Expression) and exponent.operator == CONSTANT
    value = exponent.value if isinstance(exponent, Expression) and is_constant else exponent
    if not isinstance(value, int | float) or value not in range(1, LARGEST_POWER + 1):
        raise UserError(
            f"the power is {shown(exponent)}; expected a whole number from 1 to {LARGEST_POWER}, "
            "or write exp(p * log(x))"
        )
    result = base
    for _ in range(int(value) - 1):
        result = apply("*", result, base)
    return result


def clip(x: Operand, low: Operand, high: Operand) -> Expression:
    """Return min(max(x, low), high)."""
    return apply("min", apply("max", x, low), high)


_UFUNCS: Mapping[Any, str] = {
    each.compute: name for name, each in _OPERATORS.items() if isinstance(each.compute, np.ufunc)
}


def _expected() -> str:
    return f"expected {', '.join((*VOCABULARY, 'clip'))}"


# Parts of an expression.


def nodes(expression: Expression) -> Iterator[Expression]:
    """Yield every node, those of equal parts each time; operands precede their operators."""
    for operand in expression.operands:
        yield from nodes(operand)
    yield expression


def names(expression: Expression) -> set[str]:
    """Return the names in an expression."""
    return {str(node.value) for node in nodes(expression) if node.operator == NAME}


def flops(expression: Expression) -> int:
    """Return the number of operations for one element; equal parts count each time."""
    return sum(_OPERATORS[each.operator].flops for each in nodes(expression) if each.operands)


def replace(expression: Expression, parts: Mapping[Expression, Expression]) -> Expression:
    """Return an expression in which parts are replaced by others."""
    if expression in parts:
        return parts[expression]
    if not expression.operands:
        return expression
    operands = tuple(replace(operand, parts) for operand in expression.operands)
    return Expression(expression.operator, operands)


def evaluate(expression: Expression, values: Mapping[str, Any]) -> Any:
    """Evaluate an expression on arrays or numbers by name, as NumPy does.

    Both branches of ``where`` are computed. Overflow results in infinity or NaN without a warning.
    """
    found: dict[Expression, Any] = {}

    def value_of(node: Expression) -> Any:
        if node.operator == NAME:
            return values[str(node.value)]
        if node.operator == CONSTANT:
            return number(node)
        if node not in found:
            found[node] = _OPERATORS[node.operator].compute(*map(value_of, node.operands))
        return found[node]

    with np.errstate(all="ignore"):
        return value_of(expression)


# Text.


def text(expression: Expression) -> str:
    """Return the text of an expression, from which `parse` makes an equal one."""
    return _text(expression)[0]


def _text(node: Expression) -> tuple[str, int]:
    """Return the text and its precedence."""
    if node.operator == NAME:
        return str(node.value), _ATOM
    if node.operator == CONSTANT:
        value = number(node)
        is_short = value.is_integer() and abs(value) < 1e15
        digits = str(int(abs(value))) if is_short else repr(abs(value))
        return (digits, _ATOM) if math.copysign(1.0, value) > 0 else (f"-{digits}", _UNARY)
    if node.operator == "neg":
        inner, level = _text(node.operands[0])
        return f"-{inner}" if level == _ATOM else f"-({inner})", _UNARY
    if node.operator not in _INFIX:
        return f"{node.operator}({', '.join(map(text, node.operands))})", _ATOM
    level = _INFIX[node.operator]
    left, right = map(_text, node.operands)
    first = left[0] if left[1] >= level else f"({left[0]})"
    second = right[0] if right[1] > level else f"({right[0]})"
    return f"{first} {node.operator} {second}", level


def parse(source: str, known: Collection[str]) -> Expression:
    """Read an expression. Nothing is evaluated.

    Args:
        source: text in Python's syntax.
        known: names that it may contain, such as ``x``.

    Raises:
        UserError: the text has anything else than numbers, known names, arithmetic, comparisons
            and the functions of `VOCABULARY`.

    Examples:
        >>> print(parse("x*sigmoid(1.5*x)", ["x"]))
        x * sigmoid(1.5 * x)
        >>> parse("open('file')", ["x"])
        Traceback (most recent call last):
        dptrain.UserError: 'open('file')' calls open; expected abs, exp, expm1, log, log1p, sqrt, \
sin, cos, tanh, erf, sigmoid, softplus, normal_cdf, normal_pdf, min, max, where, clip
    """
    if not isinstance(source, str) or not 0 < len(source.strip()) <= LONGEST_TEXT:
        raise UserError(
            f"the expression is {shown(source)}; expected text of at most {LONGEST_TEXT} characters"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python warns of texts such as 1if.
            tree = ast.parse(source.strip(), mode="eval").body
        found = _Reader(source, known).read(tree)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"'{shown(source)}' is no expression; expected one such as x * sigmoid(1.5 * x)"
        ) from None
    require_size(found)
    if found.operator in COMPARISONS:
        raise UserError(f"'{shown(source)}' is a comparison; expected a number for each x")
    return found


def require_size(expression: Expression, what: str = "the expression") -> None:
    """Raise a `UserError` if an expression that somebody wrote has too many nodes, or is deep."""
    _require(expression.size, expression.depth, what)


def _require(size: int, depth: int, what: str = "the expression") -> None:
    if size > MOST_NODES:
        raise UserError(f"{what} has {size} operations and operands; expected at most {MOST_NODES}")
    if depth > DEEPEST:
        raise UserError(
            f"{what} has {depth} operations within each other; expected at most {DEEPEST}"
        )


class _Reader:
    """Makes an expression from Python's syntax tree, which it does not compile."""

    _OPERATORS: Mapping[type[ast.AST], str] = {
        ast.Add: "+",
        ast.Sub: "-",
        ast.Mult: "*",
        ast.Div: "/",
        ast.Lt: "<",
        ast.LtE: "<=",
        ast.Gt: ">",
        ast.GtE: ">=",
    }

    def __init__(self, source: str, known: Collection[str]) -> None:
        self._source, self._known = shown(source), known

    def read(self, node: ast.expr) -> Expression:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return constant(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            operand = self.read(node.operand)
            return -operand if isinstance(node.op, ast.USub) else operand
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return power(self.read(node.left), self.read(node.right))
        if isinstance(node, ast.BinOp) and type(node.op) in self._OPERATORS:
            return apply(
                self._OPERATORS[type(node.op)], self.read(node.left), self.read(node.right)
            )
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = self._OPERATORS.get(type(node.ops[0]))
            if operator is not None:
                return apply(operator, self.read(node.left), self.read(node.comparators[0]))
        if isinstance(node, ast.IfExp):
            return apply("where", *map(self.read, (node.test, node.body, node.orelse)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node.func.id, node.args)
        raise UserError(
            f"'{self._source}' has {type(node).__name__.lower()} syntax, which expressions do not "
            "have; expected numbers, + − * /, comparisons and functions such as exp(x)"
        )

    def _name(self, name: str) -> Expression:
        if name not in self._known:
            raise UserError(
                f"'{self._source}' has an unknown name {shown(name)}; expected "
                f"{', '.join(self._known)}{suggest(name, self._known)}"
            )
        return variable(name)

    def _call(self, name: str, arguments: list[ast.expr]) -> Expression:
        if name not in (*VOCABULARY, "clip"):
            raise UserError(
                f"'{self._source}' calls {shown(name)}; {_expected()}"
                f"{suggest(name, (*VOCABULARY, 'clip'))}"
            )
        operands = [self.read(each) for each in arguments]
        if name != "clip":
            return apply(name, *operands)
        if len(operands) != 3:
            raise UserError(f"clip has {len(operands)} operands; expected 3")
        return clip(*operands)


def __getattr__(name: str) -> Any:
    """Return a function of `VOCABULARY` for expressions: ``from … import exp, where``."""
    if name not in VOCABULARY:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return lambda *operands: apply(name, *operands)
