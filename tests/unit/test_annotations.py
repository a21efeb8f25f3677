"""Functions without annotations are those that Numba compiles for the types of each call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dptrain

PACKAGE = Path(dptrain.__file__).parent
COMPILED = frozenset(
    {"expanded", "inlined", "intrinsic", "kernel", "native", "operation", "overload"}
)
"""Decorators of functions that Numba compiles, or calls with types."""
SELECTS = "select"
"""Part of the names of functions that let Numba select one of several functions by type."""
FOLDERS = "native", "backends/numba"


def name_of(expression: ast.expr) -> str:
    """Return the name of a decorator or of a called function."""
    if isinstance(expression, ast.Call):
        return name_of(expression.func)
    return expression.attr if isinstance(expression, ast.Attribute) else ast.unparse(expression)


def is_annotated(function: ast.FunctionDef) -> bool:
    taken = function.args
    arguments = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
    own = [each for each in arguments if each is not None and each.arg not in ("self", "cls")]
    return function.returns is not None and all(each.annotation is not None for each in own)


def selected_functions(tree: ast.Module) -> set[str]:
    """Return the names that are passed to functions which let Numba compile them."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    passes = [c for c in calls if SELECTS in name_of(c.func) or name_of(c.func) in COMPILED]
    return {name_of(item) for call in passes for item in call.args}


def partials(tree: ast.Module) -> dict[str, str]:
    """Return the function of each name that a module defines as a `partial` of one."""
    return {
        ast.unparse(node.targets[0]): name_of(node.value.args[0])
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if name_of(node.value) == "partial"
    }


def unexplained(tree: ast.Module) -> Iterator[str]:
    """Yield the functions that have no annotations, and that Numba does not compile."""
    selected, functions = selected_functions(tree), partials(tree)

    def visit(node: ast.AST, *, compiled: bool) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = compiled
            if isinstance(child, ast.FunctionDef):
                decorators = map(name_of, child.decorator_list)
                names = {functions.get(name, name) for name in decorators}
                inside = compiled or bool(names & COMPILED) or child.name in selected
                inside = inside or SELECTS in child.name
                if not (inside or is_annotated(child)):
                    yield child.name
            yield from visit(child, compiled=inside)

    return visit(tree, compiled=False)


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_that_numba_does_not_compile_have_annotations(folder: str) -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in (PACKAGE / folder).rglob("*.py")
        for name in unexplained(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not found


def test_a_function_without_annotations_is_found() -> None:
    text = "@kernel\ndef f(x): pass\ndef g(x): pass\nselect_by(g)\ndef h(x) -> int: pass\n"
    text += "short = partial(inlined, always=True)\n@short\ndef i(x): pass\n"
    text += "other = partial(print)\n@other\ndef j(x): pass"
    assert list(unexplained(ast.parse(text))) == ["h", "j"]
