"""Flags made from the settings of `TrainConfig`, so that they cannot drift from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dptrain.config import Setting, settings

Command = TypeVar("Command", bound=Callable[..., Any])


def setting_flags(command: Command) -> Command:
    """Give a command one flag for each setting; what the user leaves out arrives as None."""
    for setting in reversed(settings()):
        command = _option(setting)(command)
    return command


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The flags that the user gave."""
    return {name: value for name, value in values.items() if value is not None}


def _option(setting: Setting) -> Callable[[Command], Command]:
    help = setting.help
    if setting.default is not None and setting.type is not bool:
        help = f"{help}  [default: {setting.default}]"
    if setting.type is bool:
        negative = setting.flag.replace("--", "--no-")
        return click.option(f"{setting.flag}/{negative}", setting.name, default=None, help=help)
    # Text goes to the configuration as it is: file, environment and flags are checked by the same
    # code and complain in the same words.
    return click.option(
        setting.flag, setting.name, type=str, default=None, metavar=_metavar(setting), help=help
    )


def _metavar(setting: Setting) -> str:
    if setting.limits.choices is not None:
        return f"[{'|'.join(setting.limits.choices)}]"
    return {int: "N", float: "X", Path: "DIR"}.get(setting.type, "NAME")
