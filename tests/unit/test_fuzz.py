"""The fuzzer: some trials of each kind, and what it reports."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import onnx_models
from tests.fuzz.__main__ import main
from tests.fuzz.kinds import KINDS, find_trial
from tests.fuzz.outcome import COMPARED, Outcome, Verdict, expect, refused
from tests.fuzz.workers import run_trial, run_trials
from tests.tiers import tiered

SEEDS = {
    "images": (22, 23, 34, 36, 37, 38),
    "tables": range(8),
    "arrays": range(12),
    "network-files": range(10),
    "onnx": range(12),
    "runs": range(4),
    "flags": (100_000, 100_001, 100_002, 100_003, 100_004, 100_005),
}
"""Seeds with which valid and wrong inputs are tried."""


@pytest.mark.parametrize("kind", tiered(SEEDS, [kind for kind in SEEDS if kind != "flags"]))
def test_some_trials_of_each_kind(kind: str, tmp_path: Path) -> None:
    trial, verdicts = find_trial(kind), set()
    for seed in SEEDS[kind]:
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = run_trial(trial, seed, folder)
        assert outcome.verdict is not Verdict.FAILED, f"seed {seed}: {outcome.text}"
        verdicts.add(outcome.verdict)
    assert {Verdict.COMPARED, Verdict.REFUSED} <= verdicts


def _trial(random: np.random.Generator, folder: Path) -> Outcome:
    """Compare, refuse, differ, raise, end, or hang: one after the other by the random number."""
    (folder / "input").write_text("7", encoding="utf-8")
    number = int(random.integers(6))
    if number == 0:
        return refused("a line")
    expect(number != 1, "wrong value")
    if number == 2:
        raise KeyError("absent")
    if number == 3:
        os._exit(5)
    if number == 4:
        time.sleep(60)
    return COMPARED


def test_failures_of_all_kinds_are_reported() -> None:
    """A wrong value, an exception, a process that ends and one that hangs; the others go on."""
    numbers = {seed: int(np.random.default_rng(seed).integers(6)) for seed in range(17, 25)}
    assert set(numbers.values()) == set(range(6))
    texts = {0: "a line", 1: "wrong value", 2: "KeyError", 3: "ended with 5", 4: "Timeout", 5: ""}
    found = {}
    for finished in run_trials(_trial, iter(numbers), workers=4, limit_s=0.5):
        found[finished.seed] = finished.outcome
        if finished.outcome.verdict is Verdict.FAILED:
            assert finished.folder is not None
            assert (finished.folder / "input").read_text(encoding="utf-8") == "7"
    assert found.keys() == numbers.keys()
    for seed, number in numbers.items():
        assert texts[number] in found[seed].text
        is_failure = found[seed].verdict is Verdict.FAILED
        assert is_failure == (number in (1, 2, 3, 4))


def test_the_command_prints_seeds_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tests.fuzz.__main__.find_trial", lambda *options: _trial)
    seeds = [seed for seed in range(100) if np.random.default_rng(seed).integers(6) in (0, 1, 5)]
    first = next(seed for seed in seeds if {seed + 1, seed + 2} <= set(seeds))
    arguments = ["arrays", "--seed", str(first), "--workers", "1"]
    code = main([*arguments, "--trials", "3"])
    output = capsys.readouterr().out
    failures = output.count("wrong value")
    assert f"arrays: seeds from {first}" in output
    assert "arrays: 3 trials in" in output
    assert code == (failures > 0)
    assert f"{failures} failed" in output
    for seed in (first, first + 1, first + 2):
        failed = np.random.default_rng(seed).integers(6) == 1
        assert main(["arrays", "--seed", str(seed)]) == failed
        assert len(list(tmp_path.glob(f"fuzz-arrays-*/{seed}"))) == failed


def test_every_kind_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(KINDS)


def test_damaged_onnx_files_that_end_the_runtime_end_no_trial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It runs in another process, whose output, error and end are known."""
    x = np.ones((2, 3), np.float32)
    path = tmp_path / "model.onnx"
    monkeypatch.setattr(onnx_models, "run_onnx", lambda path, x: 2 * x)
    assert (onnx_models._run_apart(path, x) == 2).all()
    for end in (os.abort, lambda: os.kill(os.getpid(), signal.SIGSEGV), lambda: 1 / 0):
        monkeypatch.setattr(onnx_models, "run_onnx", lambda path, x, end=end: end())
        with pytest.raises(RuntimeError, match="ONNX Runtime ended with"):
            onnx_models._run_apart(path, x)
