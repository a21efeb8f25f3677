"""The table of mutants: every passage exists once, and the generated ones follow from the seed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.generate import FIRST, Candidate, candidates
from tests.mutants.table import GENERATED, GPU, GPU_KINDS, KINDS, ROOT, WRITTEN, Mutant, load

TABLES = {name: load(name) for name in (WRITTEN, GENERATED, GPU)}
ROWS = [row for rows in TABLES.values() for row in rows]


@pytest.mark.parametrize("table", TABLES)
def test_every_passage_occurs_once_and_the_tests_exist(table: str) -> None:
    for row in TABLES[table]:
        text = (ROOT / row.file).read_text(encoding="utf-8")
        assert row.apply(text) != text, row.id
        assert row.equivalent or all((ROOT / file).is_file() for file in row.test_files), row.id
        assert bool(row.equivalent) != bool(row.tests), row.id


def test_a_passage_that_has_changed_is_named() -> None:
    row = Mutant("fault", "sums", "sums.py", "a + b", "a - b", "sums")
    assert row.apply("y = a + b") == "y = a - b"
    with pytest.raises(ValueError, match=r"fault: sums\.py has the passage 2 times"):
        row.apply("y = a + b; z = a + b")


def test_names_are_unique() -> None:
    assert not [name for name, count in Counter(row.id for row in ROWS).items() if count > 1]


def test_every_kind_has_mutants_and_half_of_them_are_generated() -> None:
    written, generated, gpu = (
        [row for row in rows if not row.equivalent] for rows in TABLES.values()
    )
    assert len(written) + len(generated) >= 80
    assert len(generated) >= len(written)
    assert len(gpu) >= 20
    assert {row.kind for row in (*written, *generated)} == set(KINDS)
    assert {row.kind for row in gpu} == set(GPU_KINDS)


def test_generated_mutants_are_candidates_of_the_generator() -> None:
    """They were among the first `FIRST`; their order changes with the file."""
    for file in {row.file for row in TABLES[GENERATED]}:
        found = candidates(file)
        rows = [row for row in TABLES[GENERATED] if row.file == file]
        missing = [row.id for row in rows if Candidate(file, row.before, row.after) not in found]
        assert not missing
        assert len(rows) <= FIRST, file
