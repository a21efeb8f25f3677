"""The table of tests/README.md is true, and no combination is missing."""

from __future__ import annotations

from tests import coverage_table
from tests.coverage_table import PAGE, cells, updated
from tests.unit.backends.selection import VARIANTS


def test_the_page_has_the_table_of_what_is_tested() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, f"run python -m {coverage_table.__name__}"


def test_everything_is_computed_by_each_backend_in_each_precision() -> None:
    for kind, row in cells().items():
        assert [
            variant for variant in VARIANTS if not row[variant].quick + row[variant].parts
        ] == []
        quick = {backend for (backend, _), cell in row.items() if cell.quick}
        assert quick >= {"reference", "numba", "cuda"}, kind
