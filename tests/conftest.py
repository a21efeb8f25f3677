"""Under mpirun, a test that fails on one rank ends the run: the other ranks would wait for ever."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

THRESHOLDS = 20_000, 20, 20
"""Of the garbage collector: with those of Python, it takes 7% of the time of the tests."""


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Restore the handlers of stop signals, which a command ignores when it has trained."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_configure() -> None:
    """Hear of Ctrl-C, which tests send, though a script that runs them behind `&` ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Search for no unreachable objects while thousands of tests are collected: all are kept."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave the collected tests out of each later search, of which there are few."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


@pytest.fixture(autouse=True)
def frozen_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Freeze what a test leaves, so that searches visit only the objects of the current test.

    A replica that is closed searches all objects that are not frozen. With those of PyTorch and of
    the tests before, this takes a second. Trainers would unfreeze them.
    """
    collector = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
    monkeypatch.setattr("dptrain.training.trainer.gc", collector)
    before = num_searches()
    yield
    # More than `THRESHOLDS` objects are new, or were before a replica was closed.
    if gc.get_count()[1] or num_searches() > before:
        gc.collect()
        gc.freeze()


def num_searches() -> int:
    """Return how often the collector has searched all objects that are not frozen."""
    return int(gc.get_stats()[2]["collections"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:  # fmt: skip
    """Print the failure with its rank and end all ranks."""
    report = yield
    if report.failed:
        _end_all_ranks(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """As for a test, for a module that cannot be imported on this rank."""
    report = yield
    if report.failed:
        _end_all_ranks(collector.config, report)
    return report


def _end_all_ranks(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if not config.getoption("--with-mpi", default=False):
        return
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.Get_size() == 1:
        return
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{report.nodeid} failed on rank {world.Get_rank()} of {world.Get_size()}")
        print(report.longreprtext)
        sys.stdout.flush()
    time.sleep(0.5)  # mpirun forgets what it has not read yet of a rank that aborts.
    world.Abort(1)
