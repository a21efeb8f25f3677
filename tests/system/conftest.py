"""Programs that a test starts may have to compile kernels, which takes long on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest

LIMIT_S = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests more time than those of one process."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
