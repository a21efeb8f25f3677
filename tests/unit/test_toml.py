"""Files that are no TOML, or cost too much to read, are one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dptrain.errors import UserError
from dptrain.toml import MOST_PARTS, read_toml

START = [("", ""), ("[", "]"), ("[[", "]]"), ("x = {", " = 1}"), ("x = {y = 1, ", " = 1}")]


@pytest.mark.parametrize(("before", "after"), START)
def test_keys_of_thousands_of_parts_are_refused(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    end = after if after else " = 1"
    for part in ("a", '"a b"', "'.'", "a-1"):
        path.write_text(f"{before}{'.'.join([part] * 26_000)}{end}\n", encoding="utf-8")
        with pytest.raises(UserError, match=f"a key has more than {MOST_PARTS} parts"):
            read_toml(path)


def test_texts_and_numbers_with_dots_are_read(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    path = tmp_path / "file.toml"
    for _ in range(200):
        depth = int(random.integers(1, MOST_PARTS + 1))
        text = ".".join(["word"] * int(random.integers(1, 300)))
        numbers = random.standard_normal(int(random.integers(0, 100))).round(3).tolist()
        key = ".".join(["k"] * depth)
        path.write_text(f'text = "{text}"\nnumbers = {numbers}\n{key} = 1\n', encoding="utf-8")
        found = read_toml(path)
        assert found["text"] == text
        assert found["numbers"] == numbers
        value = found["k"]
        for _ in range(depth - 1):
            value = value["k"]
        assert value == 1
