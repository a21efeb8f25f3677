"""Tests on a GPU; elsewhere each is skipped and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptrain.backends import load_backend
from dptrain.errors import UserError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where the backend finds no GPU."""
    folder = Path(__file__).parent
    here = [item for item in items if folder in item.path.parents]
    if not here:
        return
    try:
        load_backend("cuda").place(0)
    except UserError as error:
        for item in here:
            item.add_marker(pytest.mark.skip(reason=str(error)))
