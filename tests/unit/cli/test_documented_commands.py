"""Commands in the documentation have flags that exist; quoted messages are those of the code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dptrain.cli.main import cli

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SCRIPTS = {
    "launch/node.sh": "train", "launch/nodes.sh": "train", "launch/gpus.sh": "train",
    "slurm/node.sh": "train", "slurm/nodes.sh": "train", "slurm/gpus.sh": "train",
    "slurm/requeue.sh": "train", "slurm/scaling.sh": "scale",
    "slurm/survive.sh": "train", "slurm/sweep.sh": "study sweep",
}  # fmt: skip
"""Scripts whose arguments are flags of a command."""


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every `dptrain` in the shell blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^ *```(?:sh|bash)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.partition(" | ")[0].partition(" > ")[0]
            # mpirun starts several programs, with " : " between them.
            for program in command.split(" : "):
                words = shlex.split(program, comments=True)
                for number, word in enumerate(words):
                    if word == "dptrain":
                        yield words[number + 1 :]
                    elif word in SCRIPTS:
                        yield [*SCRIPTS[word].split(), *words[number + 1 :]]


def check(arguments: list[str]) -> None:
    """Parse the arguments of a command; a wrong one is an error of click."""
    if not arguments or arguments == ["COMMAND", "--help"]:
        return
    command: click.Command = cli
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        assert name in command.commands, name
        command = command.commands[name]
    # Commands keep the names of the option for help, which they inherit.
    parser = command.make_parser(click.Context(command, parent=cli.make_context("dptrain", [])))
    parser.parse_args(list(arguments))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_known_flags(page: Path) -> None:
    for arguments in commands(page):
        if arguments[-1:] == ["--help"] or arguments[:1] == ["--version"]:
            continue
        check(arguments)


def test_wrong_flags_are_found() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) > 100
    with pytest.raises(click.NoSuchOption):
        check(["train", "--learning-rat", "1"])
    with pytest.raises(AssertionError):
        check(["trian"])


def test_messages_of_troubleshooting_are_in_the_code() -> None:
    text = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert headings == sorted(headings, key=str.lower)
    package = (path.read_text(encoding="utf-8") for path in (ROOT / "dptrain").rglob("*.py"))
    # Strings that continue on another line are joined.
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(package))
    for heading in headings:
        for part in filter(None, (part.strip() for part in heading.split("…"))):
            assert part in code or part == "No such option", heading
