"""Flags made from `Settings`, and help texts that list flags under headings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from dptrain.errors import UserError
from dptrain.runs.names import CONFIG
from dptrain.setting_groups import HEADINGS, Setting
from dptrain.training.settings import settings

Command = TypeVar("Command", bound=Callable[..., Any])

SYNONYMS = {
    "lr": ("learning-rate",),
    "rate": ("learning-rate",),
    "epoch": ("epochs",),
    "step": ("steps",),
    "iterations": ("steps",),
    "bs": ("batch-size", "batch-sizes"),
    "batch": ("batch-size", "batch-sizes"),
    "batchsize": ("batch-size", "batch-sizes"),
    "minibatch": ("batch-size", "batch-sizes"),
    "num-workers": ("workers", "threads"),
    "jobs": ("threads",),
    "opt": ("optimizer",),
    "optim": ("optimizer",),
    "model": ("network",),
    "net": ("network",),
    "arch": ("network",),
    "dataset": ("data",),
    "device": ("backend", "backends"),
    "gpu": ("backend", "backends"),
    "gpus": ("backend", "backends"),
    "dtype": ("precision", "precisions"),
    "out": ("output", "run-dir"),
    "output-dir": ("output", "run-dir"),
    "logdir": ("run-dir", "output"),
    "checkpoint-dir": ("run-dir",),
    "scheduler": ("schedule",),
    "warmup": ("warmup-steps",),
    "continue": ("resume",),
    "amp": ("precision",),
}
"""Flags of other programs, with the flags of this one that have the same meaning."""


class GroupedCommand(click.Command):
    """A command that lists flags under headings and suggests flags for common synonyms."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse flags; the error for an unknown flag suggests flags with the same meaning."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            suggested = self._suggest(error.option_name)
            if suggested:
                flags = " or ".join(f"'{name}'" for name in suggested)
                raise click.UsageError(
                    f"No such option '{error.option_name}'. Did you mean {flags}?", ctx
                ) from None
            raise

    def _suggest(self, option: str) -> list[str]:
        name = option.lstrip("-").replace("_", "-").lower()
        known = {flag for parameter in self.params for flag in parameter.opts}
        candidates = (f"--{other}" for other in (name, *SYNONYMS.get(name, ())))
        return [flag for flag in candidates if flag in known]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own flags, then those of the settings by group."""
        sections: dict[str, list[tuple[str, str]]] = {"": [], **{group: [] for group in HEADINGS}}
        # The text of a command describes its arguments.
        flags = [found for found in self.get_params(ctx) if isinstance(found, click.Option)]
        for parameter in flags:
            record = parameter.get_help_record(ctx)
            if record is not None:
                group = parameter.group if isinstance(parameter, SettingOption) else ""
                sections[group].append(record)
        for group, records in sections.items():
            if records:
                with formatter.section(group.capitalize() or "Options"):
                    formatter.write_dl(records, col_max=28)


class SettingOption(click.Option):
    """The flag of a setting.

    Attributes:
        group: heading under which help texts list it.
    """

    def __init__(self, *declarations: Any, group: str = "", **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.group = group


def setting_flags(
    omit: Collection[str] = (), of: Sequence[Setting] | None = None
) -> Callable[[Command], Command]:
    """Add one flag for each setting to a command; a flag that is not used has the value None.

    Args:
        omit: names of the settings that have no meaning for the command.
        of: the settings; None: all.
    """

    def decorate(command: Command) -> Command:
        for setting in reversed(settings() if of is None else of):
            if setting.name not in omit:
                command = _option(setting)(command)
        return command

    return decorate


METAVARS = {
    "weights": "PATH", "step_at": "X,…", "tags": "TAG,…", "note": "TEXT", "data": "SPEC",
    "freeze": "PATTERN,…", "rate_factor": "PATTERN=X,…", "class_weights": "W,…",
}  # fmt: skip
"""What stands for a value in the help texts of settings whose type does not show it."""

RUN_DIR = "the one of --run-dir"
"""Value of ``--resume`` if no directory follows it."""


def set_flags(values: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that the user set.

    ``--run-dir DIR --resume`` means ``--resume DIR`` if there is a run in DIR, and otherwise
    ``--run-dir DIR``: a batch job can then be the same command each time that it starts.

    Raises:
        UserError: ``--resume`` names no directory, and ``--run-dir`` is not set.
    """
    flags = {name: value for name, value in values.items() if value is not None}
    if flags.get("resume") == RUN_DIR:
        if "run_dir" not in flags:
            raise UserError("--resume names no run; expected --resume DIR, or --run-dir DIR too")
        del flags["resume"]
        with suppress(OSError):  # Creating the directory reports what the system refuses.
            if (Path(flags["run_dir"]) / CONFIG).is_file():
                flags["resume"] = flags["run_dir"]
    return flags


def network_of(argument: str | None, option: str | None) -> str | None:
    """Return the network that a command's argument or its flag ``--network`` names.

    Raises:
        UserError: they name different networks.
    """
    if argument is not None and option is not None and argument != option:
        raise UserError(
            f"the network is {argument} and --network is {option}; set only one of the two"
        )
    return option if argument is None else argument


def _option(setting: Setting) -> Callable[[Command], Command]:
    text = setting.help.rstrip(".")
    common: dict[str, Any] = {
        "cls": SettingOption,
        "group": setting.group,
        "default": None,
        "help": f"{text}.  [default: {setting.default_text}]",
    }
    if setting.type is bool:
        negative = setting.flag.replace("--", "--no-")
        return click.option(f"{setting.flag}/{negative}", setting.name, **common)
    # The text is not converted here: file, environment and flags are checked by the same code,
    # with the same messages.
    optional: dict[str, Any] = (
        {"is_flag": False, "flag_value": RUN_DIR} if setting.name == "resume" else {}
    )
    return click.option(
        setting.flag, setting.name, type=str, metavar=_metavar(setting), **common, **optional
    )


def _metavar(setting: Setting) -> str:
    if setting.limits.choices is not None:
        return f"[{'|'.join(setting.limits.choices)}]"
    if setting.name in METAVARS:
        return METAVARS[setting.name]
    return {int: "N", float: "X", Path: "DIR"}.get(setting.type, "NAME")
