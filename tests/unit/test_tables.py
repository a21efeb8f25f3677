"""Tables lose nothing, whatever they contain and however wide the output is."""

from __future__ import annotations

import ast
import io
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from dptrain.measure.console import make_console
from dptrain.tables import Table
from dptrain.tables.terminal import MARGIN
from dptrain.texts import width_of, wrap
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]
LETTERS = "abcdefghij0123456789.,%±–×+/_-=ü猫😀"


def cell(random_: random.Random) -> str:
    """Return words of random lengths; some are long, some have several lines."""
    words = ["".join(random_.choices(LETTERS, k=random_.choice((1, 4, 9, 30))))
             for _ in range(random_.choice((0, 1, 1, 1, 2, 12)))]  # fmt: skip
    return random_.choice((" ", " ", "\n")).join(words)


def random_table(random_: random.Random) -> Table:
    """Return a table of up to 12 columns and 8 rows, without title and caption."""
    columns = [f"{i} {cell(random_)}" for i in range(random_.randint(1, 12))]
    text = [name for name in columns if random_.random() < 0.4]
    rows = [[cell(random_) for _ in columns] for _ in range(random_.randint(0, 8))]
    kept = [row if random_.random() < 0.9 else [] for row in rows]
    keys = random_.randint(1, len(columns))
    return Table.of_rows("", columns, kept, text=text, keys=keys)


def letters(texts: list[str]) -> Counter[str]:
    """Return how often each character occurs that is no space and no line."""
    return Counter(letter for text in texts for letter in text if letter not in " \n─")


@pytest.mark.parametrize("first", tiered(range(0, 240, 60), [0]))
def test_every_character_of_every_cell_is_printed(first: int) -> None:
    for seed in range(first, first + 60):
        random_ = random.Random(seed)
        table, width = random_table(random_), random_.randint(20, 200)
        lines = table.lines(width)
        assert max(map(width_of, lines)) <= width, seed
        # The first columns are repeated in each block, and each block has the same lines.
        rules = sum(set(line.strip()) == {"─"} for line in lines)
        blocks, rest = divmod(rules, 1 + len(table.rules))
        assert not rest, seed
        contents = [[column.heading for column in table.columns], *table.texts]
        possible = [
            letters([text for row in contents for text in row[:keys] * blocks + row[keys:]])
            for keys in range(1, table.keys + 1)
        ]
        assert letters(lines) in possible, seed


def test_a_table_without_columns_is_its_title_and_caption() -> None:
    """Runs whose files are damaged have no settings to list."""
    assert "the title" in "\n".join(Table.of_rows("the title", [], [[], []]).lines(40))


def test_a_table_has_its_natural_width_if_it_may() -> None:
    for seed in range(200):
        table = random_table(random.Random(seed))
        natural = table.lines()
        assert table.lines(max(map(width_of, natural)) + 20) == natural, seed
        cells = [line for row in table.texts for text in row for line in text.split("\n")]
        assert all(any(cell.rstrip() in line for line in natural) for cell in cells), seed


def test_numbers_are_broken_only_if_two_do_not_fit_next_to_each_other() -> None:
    for seed in range(200):
        random_ = random.Random(seed)
        columns = ("run", *(f"column {i}" for i in range(random_.randint(1, 9))))
        rows = [
            ["a b c" * random_.randint(1, 9), *(f"{random_.random():.9f}" for _ in columns[1:])]
            for _ in range(5)
        ]
        table, width = Table.of_rows("", columns, rows, text=("run",)), random_.randint(28, 200)
        words = " ".join(table.lines(width)).split()
        assert all(number in words for row in rows for number in row[1:]), seed


def test_wrapping_keeps_words_and_widths() -> None:
    for seed in range(300):
        random_ = random.Random(seed)
        text, width = cell(random_).strip(), random_.randint(2, 40)
        lines = wrap(text, width)
        assert letters(lines) == letters([text]), seed
        assert all(width_of(line) <= width for line in lines), seed
        short = [word for word in text.split() if width_of(word) <= width]
        assert all(word in " ".join(lines).split() for word in short), seed


def test_long_titles_and_captions_are_wrapped() -> None:
    table = Table.of_rows("title " * 40, ("a",), [], note="caption " * 40)
    for width in (None, 20, 80, 500):
        lines = table.lines(width)
        assert max(map(len, lines)) <= min(width or 100, 100)
        words = " ".join(lines).split()
        assert (words.count("title"), words.count("caption")) == (40, 40)


def test_a_pipe_receives_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [f"column{i}" for i in range(60)]
    table = Table.of_rows("", columns, [[str(i) * 9 for i in range(60)]])
    make_console().print(table)
    header, rule, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == columns
    assert row.split() == table.texts[0]
    assert len(rule) == len(row) > 600
    assert rule == " " * MARGIN + "─" * (len(row) - MARGIN)


@pytest.mark.parametrize("width", [10, 20, 40, 80])
def test_a_terminal_receives_lines_that_fit(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dptrain.measure.console.terminal_width", lambda descriptor: width)
    console = make_console()
    console.file = io.StringIO()
    console.print(Table.of_rows("a title", [f"column{i}" for i in range(9)], [["12345678"] * 9]))
    text = console.file.getvalue()
    plain = [line.rstrip() for line in text.replace("\x1b[1m", "").split("\n")]
    assert max(len(line.replace("\x1b[0m", "")) for line in plain) <= max(width, 20)
    assert text.count("12345678") >= 9


NAMES = [
    "[a]",
    "*b",
    "a_b",
    "`a_b|c`",
    "a`b",
    "&lt;",
    "[x](y)",
    "\x1b[31m",
    "\u202ea",
    "$1$",
    "# a",
]


def test_names_are_no_markup() -> None:
    """A reader of each form sees the characters of a name, whatever they mean in that form."""
    table = Table.of_rows("", ("name", "n"), [(name, "1") for name in NAMES], text=("name",))
    # LaTeX reads [ and * after the end of a row as an argument.
    assert not re.search(r"^[\[*]", table.to_latex(), re.MULTILINE)
    rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in table.to_markdown().splitlines()[2:]]
    assert all(len(row) == 2 for row in rows)
    shown = [row[0].strip() for row in rows]
    assert shown[:7] == [r"\[a]", r"\*b", r"a\_b", r"`a_b\|c`", r"a\`b", r"\&lt;", r"\[x](y)"]
    printed = "\n".join(table.lines(80))
    assert printed.replace("\n", "").isprintable()
    assert r"\x1b[31m" in printed


def test_lines_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("runs/:fire: [bold]a[/bold] \x1b[31m\x07")
    assert capsys.readouterr().out == "runs/:fire: [bold]a[/bold] \\x1b[31m\\x07\n"


def test_commands_in_messages_quote_paths() -> None:
    """A path in a command that a message shows is quoted, so that the command can be copied."""
    command = re.compile(r"dptrain (train|report|paper|profile|evaluate|scale|study|describe)"
                         r"( (?!reads)[a-z-]+)?( --[a-z-]+)? $")  # fmt: skip
    found = []
    for path in (ROOT / "dptrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for text, value in pairwise(parts):
                if not isinstance(text, ast.Constant) or not isinstance(value, ast.FormattedValue):
                    continue
                is_quoted = ast.unparse(value.value).startswith(("shlex.quote(", "CONFIG"))
                if command.search(str(text.value)) and not is_quoted:
                    found.append(f"{path}: {node.lineno}")
    assert not found


def test_no_module_prints_tables_of_another_kind() -> None:
    """`dptrain.tables` is the only mechanism: Rich's own tables cut what does not fit."""
    paths = [path for folder in ("dptrain", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 400
    found = [
        f"{path}: {node.lineno}"
        for path in paths
        if "rich" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module in ("rich.table", "rich.columns")
    ]
    assert not found
