"""Help texts: groups, defaults, widths, and suggestions for synonyms."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from dptrain.cli.main import cli, run
from dptrain.cli.options import SYNONYMS
from dptrain.setting_groups import HEADINGS
from dptrain.training.settings import settings

COMMANDS = sorted(name for name in cli.commands if name != "study")


def help_of(*command: str) -> str:
    return CliRunner().invoke(cli, [*command, "--help"], terminal_width=100).output


@pytest.mark.parametrize(
    "command", [("train",), ("profile",), ("scale",), ("study", "variants")], ids=" ".join
)
def test_settings_are_listed_by_group_with_their_defaults(command: tuple[str, ...]) -> None:
    text = help_of(*command)
    headings = [group.capitalize() for group in HEADINGS]
    listed = [line[:-1] for line in text.splitlines() if line[:-1] in headings]
    assert listed == [heading for heading in headings if heading in listed]
    assert len(listed) >= 4
    words = " ".join(text.split())
    for setting in settings():
        if command == ("train",):
            assert setting.flag in text
            assert f"[default: {setting.default_text}]" in words


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_100_columns(command: str) -> None:
    text = help_of(command)
    assert max(map(len, text.splitlines())) <= 100
    assert "where left out" not in text


@pytest.mark.parametrize(
    ("word", "flag"),
    [("--lr", "--learning-rate"), ("--epoch", "--epochs"), ("--bs", "--batch-size"),
     ("--batchsize", "--batch-size"), ("--num-workers", "--workers"),
     ("--batch_size", "--batch-size")],
)  # fmt: skip
def test_a_synonym_suggests_the_flag(
    word: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", word, "1"], is_rank_zero=True) == 2
    line = capsys.readouterr().err
    assert f"'{word}'" in line
    assert re.search(rf"Did you mean .*{flag}", line)
    assert "--crop" not in line


def test_synonyms_stand_for_flags_that_exist() -> None:
    known = {name for command in cli.commands.values() for p in command.params for name in p.opts}
    for flags in SYNONYMS.values():
        assert all(f"--{flag}" in known for flag in flags)


def test_the_network_is_an_argument_or_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", "model0", "--json"], is_rank_zero=True) == 0
    first = capsys.readouterr().out
    assert run(["describe", "--network", "model0", "--json"], is_rank_zero=True) == 0
    assert capsys.readouterr().out == first
    assert run(["describe", "model0", "--network", "model1"], is_rank_zero=True) == 2
    assert "set only one" in capsys.readouterr().err
    assert run(["layers"], is_rank_zero=True) == 2
    assert "dptrain layers NETWORK" in capsys.readouterr().err
