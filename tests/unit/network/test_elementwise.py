"""Expressions, their derivatives, and functions of users."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dptrain
from dptrain.errors import UserError
from dptrain.network import ACTIVATIONS, Dense, Network, expressions
from dptrain.network.derivative_check import check_derivative, check_points
from dptrain.network.derivatives import derivative, times
from dptrain.network.elementwise import DY, Activation
from dptrain.network.expression_code import Language, without_extrema, write
from dptrain.network.expressions import Expression, evaluate, parse, text, variable
from dptrain.network.files import network_from_dict, network_to_dict, read_network, write_network
from dptrain.network.own_functions import activation, define
from tests.tiers import tiered

X = variable("x")
POINTS = np.array([-2.71, -1.37, -0.43, 0.19, 0.83, 1.93, 3.31])

PYTHON = Language(
    {
        **{each: f"({{0}} {each} {{1}})" for each in ("+", "-", "*", "/", "<", "<=", ">", ">=")},
        **{name: f"VOCABULARY['{name}'].compute({{0}})" for name in expressions.VOCABULARY},
        "neg": "(-{0})",
        "where": "np.where({0}, {1}, {2})",
    },
    repr,
    "{0} = {1}",
)

numbers = st.floats(-4, 4).map(lambda value: expressions.constant(round(value, 3)))
UNARY = ("sigmoid", "tanh", "softplus", "erf", "normal_cdf", "normal_pdf", "sin", "cos", "abs")


def _larger(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    def compared(parts: tuple[str, Expression, Expression, Expression]) -> Expression:
        operator, a, b, c = parts
        return expressions.apply("where", expressions.apply(operator, a, b), c, a)

    return st.one_of(
        st.tuples(st.sampled_from("+-*"), inner, inner).map(lambda t: expressions.apply(*t)),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda t: expressions.apply(*t)
        ),
        st.tuples(st.sampled_from(UNARY), inner).map(lambda t: expressions.apply(*t)),
        inner.map(lambda each: -each),
        inner.map(lambda each: each / (1 + each * each)),
        st.tuples(st.sampled_from(["<", "<=", ">", ">="]), inner, inner, inner).map(compared),
    )


trees = st.recursive(st.one_of(st.just(X), st.just(X), numbers), _larger, max_leaves=6)


@given(trees)
def test_text_of_an_expression_is_read_as_the_same_expression(tree: Expression) -> None:
    assert parse(text(tree), ["x"]) == tree


@given(trees)
def test_derivatives_equal_finite_differences(tree: Expression) -> None:
    slope, h = derivative(tree), 1e-6

    def value(x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(evaluate(tree, {"x": x}), x.shape).astype(float)

    left, right = (value(POINTS) - value(POINTS - h)) / h, (value(POINTS + h) - value(POINTS)) / h
    # At a kink the differences of both sides differ.
    is_smooth = np.abs(left - right) < 1e-3 * (1.0 + np.abs(left))
    found = np.broadcast_to(evaluate(slope, {"x": POINTS}), POINTS.shape)
    scale = 1.0 + np.abs(left) + 1e-3 * np.abs(value(POINTS))
    assert (np.abs(found - left)[is_smooth] <= 2e-3 * scale[is_smooth]).all()
    for first in (False, True):
        gradient = evaluate(times(DY, slope, first=first), {"x": POINTS, "dy": 3.0})
        np.testing.assert_allclose(
            np.broadcast_to(gradient, POINTS.shape), 3.0 * found, rtol=1e-12, atol=1e-12
        )


@given(trees)
def test_code_of_an_expression_computes_the_same(tree: Expression) -> None:
    """Also with NaN, which passes through minima and maxima."""
    x = np.array([*POINTS, np.nan])
    code = write(without_extrema(tree), PYTHON)
    names = {"np": np, "x": x, "VOCABULARY": expressions.VOCABULARY}
    with np.errstate(all="ignore"):
        for statement in code.statements:
            exec(statement, names)
        found = eval(code.result, names)
    np.testing.assert_allclose(found, evaluate(tree, {"x": x}), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", ["min", "max"])
@pytest.mark.parametrize("operands", ["2 * x, where(x < 1, 2, 3)", "where(x < 1, 2, 3), 2 * x",
                                      "x, 2", "2, x"])  # fmt: skip
def test_code_of_extrema_passes_nan_of_each_operand(operator: str, operands: str) -> None:
    code = write(without_extrema(parse(f"{operator}({operands})", ["x"])), PYTHON)
    names = {"np": np, "x": np.array([np.nan, 0.5]), "VOCABULARY": expressions.VOCABULARY}
    for statement in code.statements:
        exec(statement, names)
    assert np.isnan(eval(code.result, names)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__import__('os').system('ls')", "has call syntax"),
        ("open(x)", "calls open; expected abs"),
        ("x.real", "has attribute syntax"),
        ("[x]", "has list syntax"),
        ("(lambda: x)()", "has call syntax"),
        ("x if x else 1", "'x' is not a comparison"),
        ("x > 0", "is a comparison; expected a number"),
        ("1 < x < 2", "has compare syntax"),
        ("exp(x, x)", "exp has 2 operands; expected 1"),
        ("clip(x, 1)", "clip has 2 operands; expected 3"),
        ("exit('x')", "calls exit; expected abs"),
        ("exp(x=1)", "has call syntax"),
        ("z + 1", "has an unknown name z; expected x"),
        ("x ** 0.5", r"the power is 0.5; expected a whole number"),
        ("x ** x", "the power is x"),
        ("x +", "is no expression"),
        ("", "expected text of at most"),
        ("1e999 * x", "inf is in an expression"),
        ("True * x", "has constant syntax"),
        ("sigmiod(x)", "did you mean 'sigmoid'"),
        ("(" * 300 + "x" + ")" * 300, "is no expression"),
        ("-" * 1500 + "x", "operations and operands|is no expression"),
        ("+".join(["x"] * 400), "a part of the expression has 603 operations"),
        ("x" * 3000, "expected text of at most 2000"),
        ("x\0", "is no expression"),
    ],
)  # fmt: skip
def test_text_that_is_no_expression_is_one_line(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse(source, ["x"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cls", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_derivatives_of_the_functions_of_dptrain(cls: type[Activation]) -> None:
    layer = cls()
    check_derivative(layer.formula, layer.kind)
    for name, value in vars(layer).items():
        changed = dataclasses.replace(layer, **{name: 0.8 * value})
        check_derivative(changed.formula, layer.kind)
    derived = derivative(layer.formula.forward)
    x = check_points()
    y = evaluate(layer.formula.forward, {"x": x, **layer.formula.values})
    found, wanted = (
        np.broadcast_to(evaluate(tree, {"x": x, "y": y, **layer.formula.values}), x.shape)
        for tree in (derived, layer.formula.slope)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "wrong", ["1.001 * y * (1 - y)", "y", "x", "0", "where(x > 5, 0, y * (1 - y))"]
)
def test_a_wrong_derivative_is_refused(wrong: str) -> None:
    with pytest.raises(UserError, match=r"the derivative of f is .* finite differences of f are"):
        activation("f", "sigmoid(x)", derivative=wrong)


@pytest.mark.parametrize(
    ("name", "function", "options", "message"),
    [
        ("f", "exp(x) / (1 + exp(x))", {}, "f overflows to NaN in float32 at x = 104"),
        ("f", "x * log(x - 90)", {}, "is finite for"),
        ("relu", "x", {}, "a layer of dptrain is called relu"),
        ("Big", "x", {}, "the function is called 'Big'; expected small letters"),
        ("f", "x * a", {"a": "1"}, "parameter a of f is '1'"),
        ("f", "x * kind", {"kind": 1.0}, "a parameter of f is called kind"),
        ("f", lambda x, a: a * x, {}, "parameter a has no default value"),
        ("f", lambda x: "x", {}, "the function returns str"),
        ("f", lambda x: x if x > 0 else 0, {}, "neither true nor false"),
        ("f", lambda x: np.arctan(x), {}, "numpy.arctan has no expression"),
        ("f", lambda x: x**0.5, {}, "the power is 0.5"),
        ("f", lambda x: x * float("inf"), {}, "inf is in an expression"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_defined_is_one_line(
    name: str, function: object, options: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        activation(name, function, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_functions_of_python_and_numpy_give_the_same_expression() -> None:
    from dptrain.network.expressions import clip, where

    text_form = activation("hard", "x * clip(x + 3, 0, 6) / 6 + where(x > 1, x, 0)")
    own = activation("hard", lambda x: x * clip(x + 3, 0, 6) / 6 + where(x > 1, x, 0))
    numpy = activation("hard", lambda x: x * np.clip(x + 3, 0, 6) / 6 + np.where(x > 1, x, 0))
    forms = {str(cls().formula.forward) for cls in (text_form, own, numpy)}
    assert len(forms) == 1
    assert own is numpy
    squared = activation("squared", lambda x: np.square(np.tanh(x)) + abs(x))
    assert str(squared().formula.forward) == "tanh(x) * tanh(x) + abs(x)"


def own_network() -> Network:
    swish = activation("swish", "x * sigmoid(beta * x)", beta=1.0)
    logistic = activation("logistic", "1 / (1 + exp(-x))", derivative="y * (1 - y)")
    return Network((3,), [Dense(4), swish(1.5), Dense(4), swish(), logistic(), Dense(2)])


def test_files_contain_functions_of_users(tmp_path: Path) -> None:
    network = own_network()
    write_network(network, tmp_path / "own.toml")
    written = (tmp_path / "own.toml").read_text()
    assert written.count("expression = ") == 2
    assert 'expression = "x * sigmoid(beta * x)"' in written
    assert 'derivative = "y * (1 - y)"' in written
    assert read_network(tmp_path / "own.toml").layers == network.layers
    assert network_from_dict(network_to_dict(network)) == network
    found = network_from_dict(network_to_dict(network)).layers[1]
    assert isinstance(found, Activation)
    assert found.formula.values == {"beta": 1.5}
    assert found.formula.reads == "x"
    reads = [each.formula.reads for each in network.layers if isinstance(each, Activation)]
    assert reads == ["x", "x", "y"]


def test_two_functions_of_one_name_cannot_be_in_a_file() -> None:
    first, second = define("twin", "x"), define("twin", "2 * x")
    with pytest.raises(UserError, match=r"two functions of .* are called twin; rename one"):
        network_to_dict(Network((3,), [first(), second(), Dense(2)]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ('expression = "x"', "function 1: key 'name' is missing"),
        ('name = "f"', "function 1: key 'expression' is missing"),
        ('name = "f"\nexpression = 3', "function 1: expression is 3; expected text"),
        ('name = "relu"\nexpression = "x"', "function 1: a layer of dptrain is called relu"),
        ('name = "f"\nexpression = "exit()"', "function 1: 'exit\\(\\)' calls exit"),
        ('name = "f"\nexpression = "x"\nslope = "1"', "function 1: unknown key 'slope'"),
        ('name = "f"\nexpression = "x"\nderivative = "2"', "function 1: the derivative of f is 2"),
        ('name = "f"\nexpression = "x"\nparameters = 1', "function 1: parameters is 1; expected"),
        ('name = "f"\nexpression = "x"\nparameters = {a = "1"}', "parameter a of f is '1'"),
        ('name = "f"\nexpression = "x"\nparameters = {a = [1]}', "function 1: parameter"),
        ('name = "f"\nexpression = "x"\n[[function]]\nname = "f"\nexpression = "x"',
         "function 2: a function f exists already"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_function_of_a_file_is_one_line(
    tmp_path: Path, function: str, message: str
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'input = [3]\n[[function]]\n{function}\n[[layer]]\ntype = "f"\n')
    with pytest.raises(UserError, match=message) as caught:
        read_network(path)
    assert "\n" not in str(caught.value)


def test_a_function_of_this_process_is_a_type_in_files(tmp_path: Path) -> None:
    cls = activation("local", "tanh(x) * scale", scale=2.0)
    path = tmp_path / "own.toml"
    path.write_text(
        'input = [3]\n[[layer]]\ntype = "local"\n[[layer]]\ntype = "dense"\nunits = 2\n'
    )
    assert read_network(path).layers[0] == cls()


def test_public_names_have_all_functions() -> None:
    for cls in ACTIVATIONS.values():
        assert getattr(dptrain, cls.__name__) is getattr(dptrain.network, cls.__name__) is cls
        assert cls.__name__ in dptrain.__all__


NESTED = (
    "-{0}", "{0} + x", "{0} / 2", "x * ({0})", "sigmoid({0})", "normal_pdf({0})", "abs({0})",
    "softplus(0.3 * {0})", "where(x > 0, {0}, x)", "{0} if x > 1 else x", "({0}) ** 8",
    "(0.9 * {0}) ** 2", "max({0}, 0.1 * x)", "exp({0})", "1e30 * {0}", "expm1(0.1 * {0})",
)  # fmt: skip


@pytest.mark.parametrize("form", tiered(NESTED, NESTED[:2]))
def test_nested_expressions_are_functions_or_one_line(
    form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever their depth and size, without warnings of NumPy."""
    for depth in (2, 5, 9, 30, 99, 101, 160, 240, 490):
        source = "x"
        for _ in range(depth):
            source = form.format(source)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                tree = define("nested", source)().formula.forward
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert (tree.size, tree.depth) == _counted(tree)
            assert tree.depth <= expressions.DEEPEST
    assert capfd.readouterr() == ("", "")


def _counted(tree: Expression) -> tuple[int, int]:
    parts = [_counted(each) for each in tree.operands]
    return 1 + sum(size for size, _ in parts), max((1 + depth for _, depth in parts), default=0)


@pytest.mark.parametrize("source", ["1e39 * x", "exp(x * x)", "x / 1e-42", "x ** 8 * 1e30 + x"])
def test_checks_of_values_beyond_float32_print_nothing(source: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with suppress(UserError):
            define("large", source)
