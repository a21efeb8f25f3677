"""One cluster for the suite; what its daemons say is shown with a test that fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        report.sections.append(("Slurm", cluster.logs()))
    return report
