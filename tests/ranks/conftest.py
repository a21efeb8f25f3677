"""The worlds that rank tests run in."""

from __future__ import annotations

import tempfile

import pytest

from dptrain.comm.world import World


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give each rank temporary folders of its own.

    Ranks that removed the folders of earlier runs together would be in each other's way.
    """
    if config.option.basetemp is None:
        folder = tempfile.TemporaryDirectory(prefix="dptrain-rank-")
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = folder.name


@pytest.fixture(scope="session")
def connected() -> World:
    """All ranks of this run."""
    return World.connect(timeout=100.0)


@pytest.fixture(scope="session")
def two_per_node(connected: World) -> World:
    """All ranks; every two count as a node, and the last one is alone if their number is odd."""
    comm = connected.comm
    if comm is None or connected.size == 1:
        return connected
    ranks = 2 if connected.size > 2 else 1
    return World(comm, comm.Split(connected.rank // ranks), connected.timeout)


@pytest.fixture(params=["single", "connected", "two_per_node"])
def world(request: pytest.FixtureRequest, connected: World) -> World:
    """Without MPI, and all ranks: what holds for one must hold for the other."""
    return World.single() if request.param == "single" else request.getfixturevalue(request.param)
