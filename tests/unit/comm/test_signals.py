"""Signals that set a flag instead of ending the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dptrain.comm import signals
from dptrain.comm.signals import SIGNALS, StopRequest, open_launcher_output, stop_advice


@pytest.fixture(autouse=True)
def default_sighup() -> Iterator[None]:
    """Give SIGHUP its default action: `nohup` lets its command ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_flag(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        assert stop.signal_name == ""
        signal.raise_signal(number)
        assert stop.requested
        assert stop.signal_name == number.name


def test_the_same_signal_twice_is_one_wish() -> None:
    with StopRequest() as stop:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.signal_name == "SIGINT"


def test_a_second_press_later_is_impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_SAME_PRESS_S", -1.0)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_more_signals_can_be_listened_to_later() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest(signal.SIGUSR1) as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not stop.requested
        stop.listen(*SIGNALS)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_name == "SIGINT"
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_outside_the_main_thread_nothing_changes() -> None:
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((stop.requested, [signal.getsignal(number) for number in SIGNALS]))

    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_a_signal_before_training_is_followed_once() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        signals.remember_early_signals()
        signal.raise_signal(signal.SIGTERM)
        with StopRequest(*signals.EARLY_SIGNALS) as stop:
            assert stop.signal_name == "SIGTERM"
        with StopRequest() as stop:
            assert not stop.requested
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals.remember_early_signals()
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        for number in signals.EARLY_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", signals.EARLY_SIGNALS)
def test_a_signal_that_python_receives_ends_the_process_as_by_default(
    number: signal.Signals,
) -> None:
    program = (
        "import os, time; from dptrain.comm.signals import receive_early_signals; "
        f"receive_early_signals(); os.kill(os.getpid(), {int(number)}); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -number


def process(proc: Path, pid: int, name: str, parent: int, blocked: int = 0) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1 4194304\n")
    (folder / "status").write_text(f"Name:\t{name}\nSigBlk:\t{blocked:016x}\n")


@pytest.mark.parametrize(
    ("name", "blocked", "target"),
    [
        ("prterun", 0, "20"),
        ("mpirun.openmpi", 1 << 9, "20"),  # Blocks SIGUSR1 only.
        ("prterun", 1 << 14, None),  # Blocks SIGTERM.
        ("prted", 0, "the process of mpirun"),  # A rank of another node.
    ],
)
def test_under_open_mpi_the_line_names_the_signal_and_the_process(
    tmp_path: Path, name: str, blocked: int, target: str | None
) -> None:
    process(tmp_path, 40, "python) (3", 30)  # Any character may be in a name.
    process(tmp_path, 30, "time", 20)
    process(tmp_path, 20, name, 1, blocked)
    found = stop_advice({"OMPI_COMM_WORLD_SIZE": "2"}, tmp_path, 40)
    if target is None:
        assert found == ""
    else:
        assert found.startswith(f"to stop with a checkpoint: kill -USR1 {target}; ")


@pytest.mark.parametrize("variable", ["PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_RANK"])
def test_other_launchers_need_no_advice(variable: str) -> None:
    assert stop_advice({variable: "2"}) == ""


def test_a_line_reaches_the_standard_error_of_open_mpis_launcher(tmp_path: Path) -> None:
    process(tmp_path, 40, "python", 20)
    process(tmp_path, 20, "prterun", 1)
    (tmp_path / "20" / "fd").mkdir()
    output = tmp_path / "20" / "fd" / "2"
    assert open_launcher_output({"OMPI_COMM_WORLD_SIZE": "2"}, tmp_path, 40) is None
    output.write_text("before\n")
    assert open_launcher_output({"PMI_SIZE": "2"}, tmp_path, 40) is None
    file = open_launcher_output({"OMPI_COMM_WORLD_SIZE": "2"}, tmp_path, 40)
    assert file is not None
    os.write(file, b"line\n")
    os.close(file)
    assert output.read_text() == "before\nline\n"
