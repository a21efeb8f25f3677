"""Options of small programs from their defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Function = Callable[..., Any]


def flags(**defaults: Any) -> Callable[[Function], Function]:
    """Return a decorator that adds an option for each default, with the type of the default.

    A default may be a pair with a help text; a boolean one is a flag, and None one of a text.
    """

    def decorate(function: Function) -> Function:
        for name, given in reversed(defaults.items()):
            default, text = given if isinstance(given, tuple) else (given, None)
            function = click.option(
                f"--{name.replace('_', '-')}", default=default, help=text,
                is_flag=isinstance(default, bool), show_default=default not in (None, False),
            )(function)  # fmt: skip
        return function

    return decorate
