"""Markdown of the reference pages, generated from the code of dptrain.

A page contains a line such as ``<!-- generate: settings -->``, which the site replaces with the
result of `GENERATORS["settings"]`.
"""

from __future__ import annotations

import html
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

import dptrain
from dptrain.cli.main import EXIT_CODES, cli
from dptrain.cli.options import SettingOption
from dptrain.data import SOURCES
from dptrain.network.activations import ACTIVATIONS
from dptrain.network.elementwise import expressions_of
from dptrain.network.expressions import names
from dptrain.setting_groups import HEADINGS
from dptrain.toml import read_toml
from dptrain.training.presets import presets
from dptrain.training.schedules import SCHEDULES
from dptrain.training.settings import OTHER_VARIABLES, settings
from dptrain.vocabulary import SECTIONS, vocabulary_table

ROOT = Path(__file__).parents[2]

MARKER = re.compile(r"^<!-- generate: (\w+) -->$", re.MULTILINE)

GROUPS_OF_NAMES = {
    "Training": ("training", "runs", "errors"),
    "A training loop of your own": ("api", "backends", "data", "plan"),
    "Networks": ("network.network", "network.functional", "network.files", "network.zoo",
                 "network.get_network", "network.__init__"),
    "Layers": ("network.layers", "network.activations", "network.own_functions",
               "network.normalization", "network.combining",
               "network.maps.channels", "network.maps.resampling"),
    "Losses": ("network.losses",),
    "Initial values": ("network.initializers",),
}  # fmt: skip
"""Heading of the public names by the module that defines them."""


FIRST_NAMES = ("Trainer", "load", "TrainedModel", "make_replica", "Network", "get_network")
"""Public names that come first below their headings; the others follow by the alphabet."""


def expand(text: str) -> str:
    """Replace every marker in the text of a page with what its generator returns."""
    return MARKER.sub(lambda match: GENERATORS[match[1]](), text)


def command_line() -> str:
    """Describe every command: usage, description, flags, examples."""
    return "\n\n".join(_command(command, path) for path, command in list_commands())


def list_commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its full name, groups before their members."""

    def visit(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
        yield path, command
        if isinstance(command, click.Group):
            for name in sorted(command.commands):
                yield from visit(command.commands[name], f"{path} {name}")

    yield from visit(cli, "dptrain")


def setting_table() -> str:
    """Describe every setting of a training job, by group."""
    return "\n\n".join(
        f"## {group.capitalize()}\n\n"
        + _table(
            ("flag and variable", "meaning"),
            (
                (
                    f"`{s.flag}`<br>`{s.variable}`",
                    f"{_meaning(s)} Default: {_cell(s.default_text)}.",
                )
                for s in settings()
                if s.group == group
            ),
        )
        for group in HEADINGS
    )


def other_variables() -> str:
    """Describe the environment variables that are no settings."""
    rows = ((f"`{name}`", _cell(meaning)) for name, meaning in OTHER_VARIABLES.items())
    return _table(("variable", "meaning"), rows)


def preset_table() -> str:
    """List the presets."""
    return _table(("preset", "purpose"), ((f"`{p.name}`", _cell(p.description)) for p in presets()))


def schedules() -> str:
    """Describe every kind of schedule, and which depend on the length of the run."""
    rows = ((f"`{name}`", _cell(kind.summary)) for name, kind in SCHEDULES.items())
    totals = ", ".join(f"`{name}`" for name, kind in SCHEDULES.items() if kind.uses_total)
    rises = ", ".join(f"`{name}`" for name, kind in SCHEDULES.items() if not kind.warms_up)
    return f"""{_table(("`--schedule`", "learning rate"), rows)}

`--warmup-steps N` lets the rate rise linearly in the first N steps, except for schedules with a
rise of their own: {rises}. The rates of {totals} and of `step` with `--step-at` depend on the
length of the run: if `--resume` changes it, they begin anew with the first step that follows."""


def data_sources() -> str:
    """Describe every kind of data specification."""
    parts = []
    for name, source in SOURCES.items():
        summary = source.summary[0].upper() + source.summary[1:]
        parts.append(f"## {name}\n\n`{source.form(name)}`: {_cell(summary)}.")
        if source.details:
            parts.append(" ".join(map(_cell, source.details)))
        parts.append(f"```sh\ndptrain data describe {shlex.quote(source.example)}\n```")
    return "\n\n".join(parts)


def fields() -> str:
    """Define every field that the vocabulary contains."""
    return "\n\n".join(f"### {title}\n\n{vocabulary_table(title)}" for title in SECTIONS)


def exit_codes() -> str:
    """List the exit codes."""
    rows = re.findall(r"^ +(\d+) +(.*)$", EXIT_CODES, re.MULTILINE)
    return _table(("code", "meaning"), rows)


def launcher_table() -> str:
    """Show what happens to a job after an event, by launcher; tests read the same file."""
    table = read_toml(ROOT / "tests" / "launchers" / "table.toml")
    launchers = table["launchers"]
    run = [key for key, launcher in launchers.items() if "observed" in launcher]
    rows = []
    for event in table["events"]:
        cells = event["cells"]
        texts = [f"`{text.strip()}`" for text in event["printed"] if text]
        found = [f"{cells[key][0]}, {cells[key][1]}" if key in cells else "–" for key in run]
        rows.append((event["title"], " … ".join(texts) or "nothing", *found))
    titles = [launchers[key]["title"] for key in run]
    notes = [
        f"- *{launcher['title']}*: {launcher.get('observed') or launcher['reason']}."
        for launcher in launchers.values()
    ]
    return _table(("event", "dptrain prints", *titles), rows) + "\n\n" + "\n".join(notes)


def python_api() -> str:
    """Return directives of mkdocstrings for every public name."""
    found: dict[str, list[str]] = {title: [] for title in GROUPS_OF_NAMES}
    order = {name: place for place, name in enumerate(FIRST_NAMES)}
    for name in sorted(dptrain.__all__, key=lambda name: (order.get(name, 99), name.lower())):
        found[_group_of(name)].append(name)
    return "\n\n".join(
        f"## {title}\n\n" + "\n\n".join(f"::: dptrain.{name}" for name in names)
        for title, names in found.items()
    )


def functions() -> str:
    """Return the table of functions of single elements, with their derivatives."""
    rows = ["| layer | y | dx / dy | backward reads |", "|---|---|---|---|"]
    for kind, cls in ACTIVATIONS.items():
        forward, slope = expressions_of(cls)
        reads = "x" if "x" in names(slope) else "y"
        rows.append(f"| `{kind}` | `{forward}` | `{slope}` | {reads} |")
    return "\n".join(rows)


GENERATORS: dict[str, Callable[[], str]] = {
    "command_line": command_line,
    "data_sources": data_sources,
    "exit_codes": exit_codes,
    "fields": fields,
    "launcher_table": launcher_table,
    "functions": functions,
    "other_variables": other_variables,
    "presets": preset_table,
    "python_api": python_api,
    "schedules": schedules,
    "settings": setting_table,
}


def _group_of(name: str) -> str:
    value = getattr(dptrain, name)
    module = getattr(value, "__module__", "").removeprefix("dptrain.")
    if module == "dptrain":  # An error, whose public name tracebacks show.
        module = "errors"
    if not module:  # A union of types, such as Callback.
        module = "training"
    for title, prefixes in GROUPS_OF_NAMES.items():
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes):
            return title
    if module == "network":
        return "Networks"
    raise LookupError(f"dptrain.{name} of module {module} belongs to no heading of the reference")


def _command(command: click.Command, path: str) -> str:
    # The help option is kept by the command, so it must have the names that it inherits.
    context = click.Context(command, info_name=path, **cli.context_settings)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"## {path}", f"```text\n{path} {usage}\n```"]
    parts += _paragraphs(command.help or "")
    flags = [option for option in command.params if isinstance(option, click.Option)]
    own = [option for option in flags if not isinstance(option, SettingOption)]
    records = [record for option in own if (record := option.get_help_record(context))]
    if records:
        rows = ((_flag(names), _cell(text)) for names, text in records)
        parts.append(_table(("flag", "meaning"), rows))
    shared = [option.opts[0] for option in flags if isinstance(option, SettingOption)]
    if shared:
        names = ", ".join(f"`{name}`" for name in shared)
        parts.append(f"[Settings](settings.md) that are flags of this command: {names}.")
    if path != "dptrain":
        parts += _paragraphs(command.epilog or "")
    return "\n\n".join(parts)


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a help text; those that click does not wrap are code."""
    found = []
    for paragraph in re.split(r"\n\s*\n", _dedent(text)):
        if paragraph.startswith("\b"):
            lines = _dedent(paragraph.removeprefix("\b").strip("\n"))
            title, _, code = lines.partition("\n")
            found.append(f"{title}\n\n```sh\n{_dedent(code)}\n```")
        elif paragraph.strip():
            found.append(_cell(" ".join(paragraph.split())))
    return found


def _dedent(text: str) -> str:
    import inspect

    return inspect.cleandoc(text) if not text.startswith(" ") else inspect.cleandoc("\n" + text)


def _flag(names: str) -> str:
    """Return the names of a flag as code. In `code`, Markdown would show the escape of a "|"."""
    if "|" not in names:
        return f"`{names}`"
    return f"<code>{html.escape(names).replace('|', '&#124;')}</code>"


def _meaning(setting: Any) -> str:
    if setting.type in (int, float):
        return _cell(f"{setting.help} {setting.expected.capitalize()}.")
    if setting.limits.choices is None:
        return _cell(setting.help)
    choices = ", ".join(f"`{choice}`" for choice in setting.limits.choices)
    return f"{_cell(setting.help)} One of {choices}."


def _cell(text: str) -> str:
    """Escape what Markdown would read as markup outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    escaped = (
        part if part.startswith("`") else re.sub(r"([*_<>\[\]])", r"\\\1", part) for part in parts
    )
    return "".join(escaped).replace("|", "\\|").replace("\n", " ")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = tuple(head)
    lines = [names, ("---",) * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(GENERATORS[sys.argv[1]]())
