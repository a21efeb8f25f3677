"""Text from input files appears in error messages escaped, shortened and on one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import UserError, shown, suggest
from dptrain.training.settings import settings as all_settings


@given(st.text(max_size=300), st.integers(1, 120))
def test_shown_text_is_printable_and_short(text: str, limit: int) -> None:
    assert shown(text, limit).isprintable()
    assert len(shown(text, limit)) <= limit + len("… (300 characters)")


@pytest.mark.parametrize("plain", ["naïve Größe 汉字 😀.csv", "a\\b", "", "x" * 80])
def test_plain_text_is_unchanged(plain: str) -> None:
    assert shown(plain) == plain


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2028", r"\u2028"),
        ("\udcff", r"\udcff"),
        ("\x00", r"\x00"),
    ],
)
def test_control_characters_are_escaped(text: str, expected: str) -> None:
    assert shown(text) == expected
    assert str(UserError(f"found {text}")) == f"found {expected}"


def test_a_long_field_is_cut_and_its_length_stated() -> None:
    assert shown("9" * 100_000) == "9" * 80 + "… (100,000 characters)"


def test_a_number_of_5000_digits_can_be_shown() -> None:
    assert "digits" in shown(10**5000)
    assert "digits" in shown([10**5000])


def test_other_values_are_converted() -> None:
    assert shown([1, "a\n"]) == r"[1, 'a\n']"


@pytest.mark.more
def test_a_suggestion_for_a_huge_name_takes_no_time() -> None:
    assert suggest("batch_sice", ["batch_size"]) == "; did you mean 'batch_size'?"
    assert suggest("b" * 10_000_000, ["batch_size"] * 100) == ""


NAMES = sorted(setting.name for setting in all_settings())


@given(
    name=st.sampled_from(NAMES),
    position=st.integers(0, 30),
    letter=st.sampled_from("abcxyz_"),
    edit=st.sampled_from(["insert", "delete", "replace", "swap", "first half"]),
)
def test_a_name_with_an_error_suggests_a_name_as_long(name, position, letter, edit) -> None:
    """One error suggests a name; a name of quite another length is never suggested."""
    i = position % len(name)
    typed = {
        "insert": name[:i] + letter + name[i:],
        "delete": name[:i] + name[i + 1 :],
        "replace": name[:i] + letter + name[i + 1 :],
        "swap": name[:i] + name[i : i + 2][::-1] + name[i + 2 :],
        "first half": name[: (len(name) + 1) // 2],
    }[edit]
    found = suggest(typed, NAMES)
    if edit != "first half" and len(name) > 4:
        assert found.startswith("; did you mean '")
    for other in ("warning", "step", "replica", "facts", "preprocessing"):
        hint = suggest(typed, [other])
        is_part = typed in other or other in typed
        assert (
            not hint
            or is_part
            or 5 * abs(len(other) - len(typed)) <= 2 * max(3, len(other), len(typed))
        )


def test_a_name_of_another_length_is_not_suggested() -> None:
    assert suggest("learning_rate", ["warning", "predict"]) == ""
    assert suggest("batch", ["batch_size"]) == "; did you mean 'batch_size'?"
