"""The commands that repeat a run which was resumed with other settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from dptrain.runs.names import CONFIG
from dptrain.runs.spans import Span, Spans
from dptrain.training.settings import put_layer, settings

NEW = "NEW"
"""Stands for the directory of the repeated run in the commands."""


def repeating_commands(spans: Spans) -> list[str]:
    """Return the commands that repeat a run which was resumed with other settings.

    Returns:
        One for each span with other settings than the one before; none if there is no such span.
    """
    starts = [spans.items[0]]
    for span in spans.items[1:]:
        if (_config(span), _ranks(span)) != (_config(starts[-1]), _ranks(starts[-1])):
            starts.append(span)
    if len(starts) == 1:
        return []
    commands = []
    for span, before, after in zip(starts, [None, *starts], [*starts[1:], None], strict=False):
        words = ["dptrain", "train"]
        if before is None:
            words += ["--config", CONFIG, "--run-dir", NEW]
        else:
            words += ["--resume", NEW, *changing_flags(_config(before), _config(span))]
        if after is not None and span.settings.get("steps") != after.first_step - 1:
            words += ["--stop-after", str(after.first_step - 1)]
        launcher = [] if _ranks(span) == 1 else ["mpirun", "-n", str(_ranks(span))]
        commands.append(shlex.join([*launcher, *words]))
    return commands


def _config(span: Span) -> dict[str, Any]:
    """Return the settings of a span that a file has, without those of its machine."""
    return {name: value for name, value in span.config.items() if name != "threads"}


def _ranks(span: Span) -> int:
    return int(span.settings.get("ranks") or 1)


def changing_flags(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the flags that change settings; ``--NAME none`` stands for a number that is removed.

    Args:
        before, now: settings as configuration files have them.
    """
    by_name, words = {setting.name: setting for setting in settings()}, list[str]()
    layer = {k: v for k, v in now.items() if k not in before or before[k] != v}
    left = dict(before)
    put_layer(left, {}, layer, {})
    for name, value in layer.items():
        flag = by_name[name].flag
        if by_name[name].type is bool:
            words.append(flag if value else flag.replace("--", "--no-"))
        else:
            words += [flag, str(value)]
    for name in sorted(left.keys() - now.keys()):
        if by_name[name].type in (int, float):
            words += [by_name[name].flag, "none"]
    return words
