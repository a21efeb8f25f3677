"""Random values of flags, from the declarations of click and of the settings."""

from __future__ import annotations

from typing import Any

import click
import numpy as np

from dptrain.setting_groups import Setting
from dptrain.training.settings import settings

Random = np.random.Generator

NUMBERS = (
    "-1", "0", "-0", "1", "2", "0.5", "1e-30", "1e30", "1e300", "1e400", "-1e400", "nan", "inf",
    "-inf", "2147483647", "2147483648", "-2147483648", "9223372036854775807",
    "9223372036854775808", "18446744073709551616", "9" * 400, "-" + "9" * 400, "9" * 5000,
    "0." + "0" * 400 + "1", "1_000", "٣", "²", "0x10", "1e3", "+1", " 1", "1 ", "1,5", "1/2",
    "0/0", "1/0", "5/3", "9999999999/9999999999", "none",
)  # fmt: skip
"""Texts that are numbers, or look like them."""

TEXTS = (
    "", " ", "-", "--", "=", ",", ",,", "a,,b", "a=b", "a=", "=b", "None", "true", "auto", "é猫",
    "e\u0301", "\x1b[31m", "a\nb", "\t", "\udcff", "%s%n", "{}", "{0}", "*", "[", "'", '"', "?",
    "x" * 300, "x" * 5000, "x" * 100_000, "npz:", "csv:?", "folder:", "\u202e", "1" + "\u0300" * 50,
)  # fmt: skip
"""Texts that are no numbers."""

PATHS = (
    "absent", "absent/deeper", "folder", "file.txt", "file.txt/below", "empty", "loop",
    "folder/../file.txt", "pipe", "/proc/dptrain", "/sys/dptrain", "n" * 300, "d/" * 3000 + "x",
    "n" * 300 + ".toml", "n" * 300 + ".npz", "broken.npz", "broken.toml", "bomb.toml", "é猫.toml",
    ".", "",
)  # fmt: skip
"""Paths relative to the folder of a trial, where `flag_commands.write_files` makes some of them.
Nothing is written below /proc and /sys, and no path is above the folder."""

INPUTS = ("/dev/null", "/dev/zero", "/proc/self/mem", "/etc/hostname")
"""Paths for parameters that are only read."""

COSTLY = {
    "steps", "epochs", "skip", "launches", "most_launches", "seeds", "samples", "batch_sizes",
    "ranks", "threads", "workers", "seconds_per_case", "epoch_samples", "until", "delay",
    "prefetch", "set",
}  # fmt: skip
"""Parameters for which a large number is valid, and takes long."""

NOT_COSTLY = [text for text in NUMBERS if text not in ("2147483647",)]


def wrong_value(random: Random, name: str, *, is_path: bool = False) -> str:
    """Return a text that is rarely valid.

    Args:
        random: random numbers.
        name: of the parameter.
        is_path: True if the parameter is one.
    """
    if is_path and random.random() < 0.8:
        return pick(random, PATHS)
    numbers = NOT_COSTLY if name in COSTLY else NUMBERS
    return pick(random, (*numbers, *TEXTS))


def valid_value(random: Random, parameter: click.Parameter, texts: dict[str, Any]) -> str:
    """Return a text that is mostly valid and makes a short command.

    Args:
        random: random numbers.
        parameter: the declaration of the flag.
        texts: possible values by the name of the parameter.
    """
    name = parameter.name or ""
    if name in texts:
        return pick(random, texts[name])
    kind, setting = parameter.type, _settings().get(name)
    if isinstance(kind, click.Choice):
        return pick(random, kind.choices)
    if setting is not None:
        return valid_setting(random, setting)
    least = getattr(kind, "min", getattr(getattr(kind, "limits", None), "at_least", None)) or 0
    if kind.name.startswith("float"):
        return f"{least + random.random():.3g}"
    return str(int(least) + int(random.integers(1, 3)))


def valid_setting(random: Random, setting: Setting) -> str:
    """Return a valid value of a setting: small, or at a limit."""
    limits = setting.limits
    if limits.choices is not None:
        return pick(random, limits.choices)
    if setting.type is bool:
        return pick(random, ("true", "false", "1", "no"))
    if setting.type is int:
        least = int(limits.at_least or 0)
        edges = [] if setting.name in COSTLY or limits.at_most is None else [str(limits.at_most)]
        return pick(random, [str(least), str(least + 1), str(least + 2), *edges])
    if setting.type is float:
        low = limits.at_least or 0.0
        high = min(value for value in (limits.at_most, limits.below, low + 1) if value is not None)
        return f"{low + (high - low) * random.uniform(0.01, 0.99):.4g}"
    return "text"


def _settings() -> dict[str, Setting]:
    return {setting.name: setting for setting in settings()}


def pick(random: Random, values: Any) -> Any:
    """Return one of some values."""
    values = list(values)
    return values[int(random.integers(len(values)))]
