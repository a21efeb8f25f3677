"""The worlds that rank tests run in."""

from __future__ import annotations

import pytest

from dptrain.comm.world import World


@pytest.fixture(scope="session")
def connected() -> World:
    """All ranks of this run."""
    return World.connect(timeout=30.0)


@pytest.fixture(params=["single", "connected"])
def world(request: pytest.FixtureRequest, connected: World) -> World:
    """Without MPI, and all ranks: what holds for one must hold for the other."""
    return World.single() if request.param == "single" else connected
