"""The time limit of system tests, and a browser.

Programs that a test starts may have to compile kernels, which takes long on a busy machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.browser import Browser, find_chromium

LIMIT_S = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests more time than those of one process."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that has no page open yet."""
    program = find_chromium()
    if program is None:
        # .ci/run installs one and sets CI, so that there the tests cannot go missing unseen.
        assert not os.environ.get("CI"), "CI has no Chromium; .ci/run installs it"
        pytest.skip("there is no Chromium to look at pages with; Debian's package is 'chromium'")
    with Browser(program, tmp_path_factory.mktemp("browser")) as started:
        yield started
