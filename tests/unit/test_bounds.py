"""Bounds of numbers: every flag, variable, key of a file and option of data has some."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from dptrain.bounds import MAX_LAYERS, MAX_REAL, MAX_WHOLE, Limits, as_number, parse_number
from dptrain.cli.main import cli
from dptrain.cli.parsing import Number, parse_bytes, parse_numbers, parse_part, parse_seconds
from dptrain.data import open_data
from dptrain.data.spec import Request
from dptrain.errors import LONGEST_MESSAGE, UserError
from dptrain.network import Conv2d, Dense, Dropout, Flatten, Network
from dptrain.network.files import get_network, network_from_dict
from dptrain.training.parallelism import parse_balance
from dptrain.training.schedules import parse_fractions
from dptrain.training.settings import load_settings, settings

NUMERIC = [setting for setting in settings() if setting.type in (int, float)]
DIGITS = ("0", "1", "9", "9" * 25, "9" * 400, "9" * 5000, "٣", "²", "_", " ", "x", "")
MARKS = ("", "-", "+", ".", "e", "e-", "E+", "/", ",", "0x", "inf", "nan", "%", "\x1b", "\udcff")


def number_texts(count: int = 300) -> Iterator[str]:
    """Yield texts that are numbers, or look like them."""
    source = random.Random(7)
    for _ in range(count):
        parts = range(source.randint(1, 4))
        yield "".join(source.choice(source.choice((DIGITS, MARKS))) for _ in parts)


def test_a_text_is_a_number_within_the_limits_or_none() -> None:
    found = [(kind, parse_number(text, kind)) for text in number_texts() for kind in (int, float)]
    numbers = [(kind, value) for kind, value in found if value is not None]
    assert 20 < len(numbers) < len(found) - 20
    for kind, value in numbers:
        assert type(value) is kind
        assert abs(value) <= (MAX_WHOLE if kind is int else MAX_REAL)


@pytest.mark.parametrize("setting", NUMERIC, ids=lambda setting: setting.name)
def test_every_setting_has_bounds_in_each_layer(setting: Any, tmp_path: Path) -> None:
    limits = setting.limits
    assert limits.at_most is not None or limits.below is not None
    assert limits.at_least is not None or limits.above is not None
    file = tmp_path / "job.toml"
    for text in ("9" * 400, "-" + "9" * 400, "1e400", "nan", "inf", "-inf"):
        for value in (text, float(text)) if "9" not in text else (text, int(text)):
            with pytest.raises(UserError, match="expected a"):
                setting.check(setting.parse(value, "x") if isinstance(value, str) else value, "x")
        file.write_text(f"{setting.name} = {text}\n", encoding="utf-8")
        for flags, variables, path in (
            ({setting.name: text}, {}, None), ({}, {setting.variable: text}, None), ({}, {}, file),
        ):  # fmt: skip
            with pytest.raises(UserError) as caught:
                load_settings(flags, variables, path)
            assert len(str(caught.value)) < 500


def options() -> Iterator[tuple[str, click.Parameter]]:
    """Yield all parameters of all commands with the name of the command."""

    def of(command: click.Command, name: str) -> Iterator[tuple[str, click.Parameter]]:
        yield from ((name, parameter) for parameter in command.params)
        if isinstance(command, click.Group):
            for child, each in command.commands.items():
                yield from of(each, f"{name} {child}")

    return of(cli, "dptrain")


def test_every_number_of_a_flag_has_bounds() -> None:
    numbers = 0
    for name, parameter in options():
        kind = parameter.type
        unbounded = (click.types.IntParamType, click.types.FloatParamType)
        assert not isinstance(kind, unbounded), f"{name} {parameter.opts}: use Number"
        if isinstance(kind, Number):
            numbers += 1
            for text in ("9" * 400, "9" * 5000, "1e400", "nan", "-inf", "x"):
                with pytest.raises(click.BadParameter, match="expected a"):
                    kind.convert(text, parameter, None)
    assert numbers > 20


def outcome(parse: Callable[[str], Any], text: str) -> tuple[tuple[Any, ...], str | None]:
    """Return the numbers of a text, or the message of the refusal."""
    try:
        found = parse(text)
    except UserError as error:
        return (), str(error)
    return found if isinstance(found, tuple) else (found,), None


def test_lists_times_sizes_and_shares_end_in_one_line() -> None:
    parsers = (
        lambda text: parse_numbers(text, "--ranks"), lambda text: parse_seconds(text, "--within"),
        lambda text: parse_bytes(text, "--memory"), parse_part, parse_balance, parse_fractions,
    )  # fmt: skip
    accepted = refused = 0
    for text in (*number_texts(200), "1e-999999999", "1e999999999", f"1/{'9' * 5000}", "1/2"):
        for parse in parsers:
            found, message = outcome(parse, text)
            refused += message is not None
            accepted += message is None
            assert message is None or len(message) < 500
            assert all(map(math.isfinite, found))
    assert accepted > 20
    assert refused > 200


def test_options_of_data_have_bounds() -> None:
    for text in ("9" * 400, "9" * 5000, "2147483648", "0", "-1", "x", "1.5"):
        network = get_network("model0")
        request = Request("synthetic", "", {"samples": text}, network, 0)
        with pytest.raises(UserError, match="expected a whole number of at least 1 and up to"):
            request.number("samples", 1)


def test_numbers_of_layers_have_bounds() -> None:
    assert as_number(10**400, float) == 10**400
    with pytest.raises(UserError, match="expected a number"):
        Dropout(10**400)
    values = {"input": [2], "layer": [{"type": "dropout", "rate": 10**400}]}
    with pytest.raises(UserError, match="expected a number"):
        network_from_dict(values)


def test_a_network_has_a_largest_number_of_layers() -> None:
    relu = {"type": "relu"}
    values = {"input": [2], "layer": [relu] * (MAX_LAYERS + 1)}
    with pytest.raises(UserError, match=r"3,501 layers; expected at most 3,500"):
        network_from_dict(values)


def test_the_middle_of_a_long_message_is_cut() -> None:
    text = str(UserError("start " + "x" * 200_000 + " end"))
    assert text.startswith("start x")
    assert text.endswith("x end")
    assert len(text) < LONGEST_MESSAGE + 50
    assert str(UserError("x" * LONGEST_MESSAGE)) == "x" * LONGEST_MESSAGE


def test_limits_of_a_type_keep_what_is_declared() -> None:
    assert Limits(above=0, below=1).of(float) == Limits(above=0, below=1)
    assert Limits(at_least=0).of(int) == Limits(at_least=0, at_most=MAX_WHOLE)
    assert Limits(choices=("a",)).of(str) == Limits(choices=("a",))


# Generated data.


@pytest.mark.parametrize("source", ["shapes", "irradiance"])
def test_too_many_samples_are_refused(source: str) -> None:
    network = get_network("model0" if source == "shapes" else "mlp-5")
    with pytest.raises(UserError, match=f"{source}: samples=2,147,483,647 needs"):
        open_data(f"{source}?samples=2147483647", network)


def test_samples_of_a_huge_network_are_refused() -> None:
    side = 2_000_000_000
    network = Network((3, side, side), [Conv2d(3), Flatten(), Dense(10)])
    with pytest.raises(UserError, match=r"synthetic: 1 samples needs .* EiB of memory"):
        open_data("synthetic", network)


def test_a_network_that_does_not_fit_is_refused_before_images_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "dptrain.data.sources.shapes.generate", lambda *arguments: pytest.fail("made")
    )
    with pytest.raises(UserError, match="shapes has classes"):
        open_data("shapes", get_network("mlp-5"))
