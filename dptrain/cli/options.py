"""Flags made from the settings of `Settings`, so that they cannot drift from them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from dptrain.errors import UserError
from dptrain.training.settings import CONFIG_FILE, Setting, settings

Command = TypeVar("Command", bound=Callable[..., Any])


def setting_flags(leave_out: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command one flag for each setting; what the user leaves out arrives as None.

    Args:
        leave_out: names of settings that mean nothing to the command.
    """

    def decorate(command: Command) -> Command:
        for setting in reversed(settings()):
            if setting.name not in leave_out:
                command = _option(setting)(command)
        return command

    return decorate


RUN_DIR = "the one of --run-dir"
"""What ``--resume`` stands for where no directory follows it."""


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The flags that the user gave.

    ``--run-dir DIR --resume`` means ``--resume DIR`` where there is a run in DIR, and otherwise
    ``--run-dir DIR``: so a batch job can be the same command as often as it starts.

    Raises:
        UserError: ``--resume`` names no directory, and neither does ``--run-dir``.
    """
    flags = {name: value for name, value in values.items() if value is not None}
    if flags.get("resume") == RUN_DIR:
        if "run_dir" not in flags:
            raise UserError("--resume names no run; expected --resume DIR, or --run-dir DIR too")
        del flags["resume"]
        with suppress(OSError):  # Whoever makes the directory says what the system refuses.
            if (Path(flags["run_dir"]) / CONFIG_FILE).is_file():
                flags["resume"] = flags["run_dir"]
    return flags


def _option(setting: Setting) -> Callable[[Command], Command]:
    help = f"{setting.help}  [default: {setting.default_text}]"
    if setting.type is bool:
        negative = setting.flag.replace("--", "--no-")
        return click.option(f"{setting.flag}/{negative}", setting.name, default=None, help=help)
    # Text goes to the configuration as it is: file, environment and flags are checked by the same
    # code and complain in the same words.
    optional = {"is_flag": False, "flag_value": RUN_DIR} if setting.name == "resume" else {}
    return click.option(
        setting.flag,
        setting.name,
        type=str,
        default=None,
        metavar=_metavar(setting),
        help=help,
        **optional,  # type: ignore[arg-type]
    )


def _metavar(setting: Setting) -> str:
    if setting.limits.choices is not None:
        return f"[{'|'.join(setting.limits.choices)}]"
    return {int: "N", float: "X", Path: "DIR"}.get(setting.type, "NAME")
