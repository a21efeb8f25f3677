"""Functions of single elements as ONNX operators, in both directions.

An export writes the operator of a function if the file's version of ONNX has it, and otherwise its
expression. An import makes an expression of the operators that compute a tensor from another one,
and finds the function that has it.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import onnx

from dptrain.errors import UserError, shown
from dptrain.interchange.canonical import Form, canonical, is_close
from dptrain.interchange.onnx_graph import OnnxGraph
from dptrain.interchange.onnx_reading import ReadGraph, attributes, number
from dptrain.network import expressions
from dptrain.network.activations import ACTIVATIONS
from dptrain.network.elementwise import Activation
from dptrain.network.expressions import (
    CONSTANT,
    NAME,
    NORMAL_DENSITY,
    SQRT_HALF,
    Expression,
    apply,
    constant,
    evaluate,
    parse,
    variable,
)
from dptrain.network.own_functions import OWN

MOST_OPERATORS = 32
"""Operators that are searched for a function of dptrain. Those of users may have more."""


SOFTPLUS_IS_ARGUMENT = 17.0
"""The softplus of larger numbers is the number in float32."""


class Operator(NamedTuple):
    """An operator of ONNX that computes a function of its first input.

    Attributes:
        name: of the operator.
        inputs: further inputs, in terms of the parameters of the function.
        attributes: likewise.
    """

    name: str
    inputs: tuple[Expression, ...]
    attributes: Mapping[str, Expression]


@functools.cache
def operator_of(cls: type[Activation]) -> Operator | None:
    """Return the operator that `Function.onnx` states; None if there is none."""
    if not cls.function.onnx:
        return None
    tree = ast.parse(cls.function.onnx, mode="eval").body
    parameters = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    if isinstance(tree, ast.Name):
        return Operator(tree.id, (), {})
    assert isinstance(tree, ast.Call)
    assert isinstance(tree.func, ast.Name)
    inputs = tuple(parse(ast.unparse(each), parameters) for each in tree.args)
    named = {str(each.arg): parse(ast.unparse(each.value), parameters) for each in tree.keywords}
    return Operator(tree.func.id, inputs, named)


# Export.


def add_function(graph: OnnxGraph, layer: Activation, x: str, version: int) -> str:
    """Add the operators of a function and return the name of its output.

    Args:
        graph: the graph.
        layer: the function.
        x: name of the input.
        version: of ONNX, which has some operators only.
    """
    operator, values = operator_of(type(layer)), layer.formula.values
    if operator is None or not onnx.defs.has(operator.name, max_inclusive_version=version):
        return _add_expression(graph, in_operators(layer.formula.output()), x)
    inputs = [graph.constant("bound", evaluate(each, values)) for each in operator.inputs]
    named = {name: evaluate(each, values) for name, each in operator.attributes.items()}
    return graph.add(operator.name, x, *inputs, **named)


_OPERATORS = {
    "+": "Add", "-": "Sub", "*": "Mul", "/": "Div", "neg": "Neg", "<": "Less",
    "<=": "LessOrEqual", ">": "Greater", ">=": "GreaterOrEqual", "where": "Where", "min": "Min",
    "max": "Max", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "sin": "Sin",
    "cos": "Cos", "tanh": "Tanh", "erf": "Erf", "sigmoid": "Sigmoid", "softplus": "Softplus",
}  # fmt: skip
"""Operators of ONNX by those of expressions."""


def in_operators(expression: Expression) -> Expression:
    """Replace functions that ONNX does not have."""
    operands = tuple(map(in_operators, expression.operands))
    if expression.operator in _OPERATORS or not operands:
        return Expression(expression.operator, operands, expression.value)
    (u,) = operands
    exp, erf, tanh = (functools.partial(apply, name) for name in ("exp", "erf", "tanh"))
    replaced = {
        # Without the cancellation of exp(u) − 1.
        "expm1": lambda: tanh(0.5 * u) * (exp(u) + 1),
        "log1p": lambda: apply("log", 1 + u),
        "normal_cdf": lambda: 0.5 * (1 + erf(u * SQRT_HALF)),
        "normal_pdf": lambda: NORMAL_DENSITY * exp(-0.5 * u * u),
    }
    return replaced[expression.operator]()


def _add_expression(graph: OnnxGraph, expression: Expression, x: str) -> str:
    tensors = {variable("x"): x}

    def add(node: Expression) -> str:
        if node not in tensors:
            if node.operator == CONSTANT:
                tensors[node] = graph.constant("number", expressions.number(node))
            else:
                inputs = [add(operand) for operand in node.operands]
                tensors[node] = graph.add(_OPERATORS[node.operator], *inputs)
        return tensors[node]

    return add(expression)


# Import.


def match_function(
    graph: ReadGraph, node: onnx.NodeProto, known: Iterable[Activation] = ()
) -> tuple[Activation, str] | None:
    """Return the function that ends with a node, and the tensor that it is computed from.

    Args:
        graph: the graph.
        node: the last operator of the function.
        known: functions that the file names. Those of dptrain, and then those that this process has
            defined, are searched in addition.

    Returns:
        None if there is no such function. Of several, that with the fewest operators.
    """
    alone = _read_operator(graph, node)
    if alone is not None:
        return (alone, str(node.input[0])) if node.input and node.input[0] else None
    known = tuple(known)
    own = [*known, *(cls() for cls in OWN.values())]
    candidates = [*known, *_without_parameters(), *own[len(known) :]]
    longest = max([MOST_OPERATORS, *map(_num_operators, own)])
    # Operators in another order have about as many nodes.
    largest = 2 * max(MOST_OPERATORS, *map(_num_operators, candidates))
    for found, tensor in _forms_before(graph, node, longest, largest):
        for layer in candidates:
            if any(is_close(found, form) for form in _forms(layer)):
                return layer, tensor
    return None


@functools.cache
def _without_parameters() -> tuple[Activation, ...]:
    return tuple(cls() for cls in ACTIVATIONS.values() if not fields(cls))  # type: ignore[arg-type]


@functools.lru_cache(256)
def _num_operators(layer: Activation) -> int:
    """Return a bound of the operators that compute a function in a file."""
    try:
        size = in_operators(layer.formula.output()).size
    except UserError:
        size = expressions.MOST_NODES
    return min(size, expressions.MOST_NODES)


@functools.lru_cache(256)
def _forms(layer: Activation) -> tuple[Any, ...]:
    """Return the forms of a function, as dptrain and as ONNX writes it; none if it has none."""
    expression = layer.formula.output()
    try:
        return canonical(expression), canonical(in_operators(expression))
    except (UserError, ArithmeticError):
        return ()


def _read_operator(graph: ReadGraph, node: onnx.NodeProto) -> Activation | None:
    """Return the function that an operator is alone; None if it is none.

    Of classes with the same operator, those with fewer parameters are preferred.
    """
    classes = sorted(ACTIVATIONS.values(), key=lambda cls: len(fields(cls)))  # type: ignore[arg-type]
    for cls in classes:
        operator = operator_of(cls)
        if operator is None or operator.name != node.op_type:
            continue
        values = _values(graph, node, operator)
        if values is not None:
            return cls(**values)
    return None


def _values(graph: ReadGraph, node: onnx.NodeProto, operator: Operator) -> dict[str, float] | None:
    """Return the parameters of a function with an operator; None if a constant differs."""
    found, given = dict[str, float](), attributes(node)
    schema = onnx.defs.get_schema(node.op_type)
    for name, value in given.items():
        if name in schema.attributes and name not in operator.attributes:
            expected = _default(schema, name)
            if value != expected:
                raise UserError(f"{name} is {shown(value)}; expected {expected}")
    pairs = [
        (expression, _scalar(graph, node.input[index]) if index < len(node.input) else None)
        for index, expression in enumerate(operator.inputs, 1)
    ]
    for name, expression in operator.attributes.items():
        pairs.append((expression, given.get(name, _default(schema, name))))
    for expression, value in pairs:
        if value is None:
            return None
        if expression.operator == NAME:
            found[str(expression.value)] = number(value)
        elif not math.isclose(evaluate(expression, {}), value, rel_tol=1e-5, abs_tol=1e-9):
            return None
    return found


def _default(schema: Any, name: str) -> Any:
    """Return the value of an attribute that a node leaves out."""
    value = onnx.helper.get_attribute_value(schema.attributes[name].default_value)
    return value.decode() if isinstance(value, bytes) else value


def _scalar(graph: ReadGraph, tensor: str) -> float | None:
    """Return the value of a constant with one element; None for other tensors."""
    values = graph.constant(tensor) if tensor else None
    return None if values is None or values.size != 1 else float(values.reshape(-1)[0])


def _forms_before(
    graph: ReadGraph, last: onnx.NodeProto, longest: int, largest: int
) -> Iterator[tuple[Form, str]]:
    """Yield the form of a node in terms of one tensor, for earlier and earlier tensors.

    Args:
        graph: the graph.
        last: the node.
        longest: most operators of a form.
        largest: most nodes of its expression, in which a tensor that is read twice counts twice.
    """
    inside = {last.output[0]}
    while len(inside) < longest:
        leaves = {
            name: None for tensor in inside for name in _inputs(graph, tensor) if name not in inside
        }
        if len(leaves) == 1:
            (leaf,) = leaves
            try:
                expression = _build(graph, last.output[0], leaf)
                if expression.size > largest:
                    return
                form = canonical(expression)
            except (UserError, ArithmeticError):
                return
            yield form, leaf
        inner = [name for name in leaves if _is_readable(graph, name)]
        if not inner:
            return
        inside.add(max(inner, key=graph.position))


def _inputs(graph: ReadGraph, tensor: str) -> list[str]:
    """Return the inputs of the node of a tensor that are no numbers."""
    node = graph.node(tensor)
    assert node is not None
    return [name for name in node.input if name and _scalar(graph, name) is None]


def _is_readable(graph: ReadGraph, tensor: str) -> bool:
    node = graph.node(tensor)
    return node is not None and (node.op_type in _READERS or node.op_type in operators())


@functools.cache
def operators() -> frozenset[str]:
    """Return the names of operators that are a function alone."""
    found = (operator_of(cls) for cls in ACTIVATIONS.values())
    return frozenset(operator.name for operator in found if operator is not None)


def ending_operators() -> frozenset[str]:
    """Return the names of all operators with which a function may end."""
    return operators() | frozenset(_READERS)


def _build(graph: ReadGraph, last: str, leaf: str) -> Expression:
    """Return the expression of a tensor in terms of another one, ``x``."""
    built, waiting, stack = {leaf: variable("x")}, set[str](), [last]
    while stack:
        tensor = stack[-1]
        if tensor in built:
            stack.pop()
            continue
        value = _scalar(graph, tensor)
        if value is not None:
            built[tensor] = constant(value)
            continue
        node = graph.node(tensor)
        assert node is not None
        missing = [name for name in node.input if name and name not in built]
        if not missing:
            built[tensor] = _read(graph, node, built)
        elif tensor in waiting:
            raise UserError(f"the graph has a cycle through '{shown(tensor)}'")
        waiting.add(tensor)
        stack += missing
    return built[last]


def _read(graph: ReadGraph, node: onnx.NodeProto, built: Mapping[str, Expression]) -> Expression:
    """Return the expression of a node whose inputs have one."""
    if node.op_type in ("Min", "Max") and len(node.input) != 2:
        raise UserError(f"{node.op_type} has {len(node.input)} inputs; expected 2")
    inputs = [built[name] if name else None for name in node.input]
    if not inputs or inputs[0] is None:
        raise UserError(f"{node.op_type} has no first input")
    alone = _read_operator(graph, node)
    if alone is not None:
        return expressions.replace(alone.formula.output(), {variable("x"): inputs[0]})
    if node.op_type not in _READERS or (attributes(node) and node.op_type != "Clip"):
        raise UserError(f"{node.op_type} has settings that are not read")
    try:
        return _READERS[node.op_type](*inputs)
    except TypeError:
        raise UserError(f"{node.op_type} has {len(inputs)} inputs") from None


def _clip(x: Expression, low: Expression | None = None, high: Expression | None = None) -> Any:
    bounded = x if low is None else apply("max", x, low)
    return bounded if high is None else apply("min", bounded, high)


def _where(condition: Expression, x: Expression, y: Expression) -> Expression:
    """Return a selection; PyTorch replaces a softplus by its argument above a threshold."""
    if condition.operator == ">" and condition.operands[1].operator == CONSTANT:
        is_equal = expressions.number(condition.operands[1]) >= SOFTPLUS_IS_ARGUMENT
        if is_equal and is_close(canonical(y), canonical(apply("softplus", x))):
            return y
    return apply("where", condition, x, y)


def _power(base: Expression, exponent: Expression) -> Expression:
    return expressions.power(base, exponent)


_READERS: Mapping[str, Callable[..., Expression]] = {
    **{name: functools.partial(apply, operator) for operator, name in _OPERATORS.items()},
    "Clip": _clip,
    "Pow": _power,
    "Where": _where,
    "Reciprocal": lambda x: 1 / x,
}
"""Functions that make an expression of an operator's inputs."""
