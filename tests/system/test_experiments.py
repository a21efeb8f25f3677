"""Bench and study as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.system.launch import command, environment, launch

pytestmark = pytest.mark.more

BENCH = (
    "bench", "solar", "mlp-50-25", "--batch-sizes", "2,8", "--samples", "2,64", "--largest",
    "--memory", "150MB", "--seconds-per-case", "0.2", "--threads", "1", "--output",
)  # fmt: skip


def test_a_killed_benchmark_continues(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = subprocess.Popen(
        command(*BENCH, str(folder)), env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    kept = folder / "bench.jsonl"
    deadline = time.monotonic() + 300
    while not (kept.exists() and kept.read_text().count("\n") >= 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = [line for line in kept.read_text().splitlines(keepends=True) if line.endswith("\n")]
    done = launch(*BENCH, str(folder), "--json")
    assert done.returncode == 0, done.stderr
    assert kept.read_text().startswith("".join(lines))
    found = json.loads(done.stdout)
    assert len(found["results"]) == 12
    by_task = {(r["network"], r["task"]): r for r in found["results"]}
    largest = by_task["solar", "largest training"]
    assert largest["timing"] is None
    assert largest["needed_bytes"] <= 150e6 < largest["largest"]["next_bytes"]
    assert by_task["solar", "training"]["samples_per_s"] > 0
    other = launch(*BENCH, str(folder), "--threads", "2")
    assert other.returncode == 2
    assert other.stderr.count("\n") == 1
    assert "measured with threads 1, but this command has 2" in other.stderr


def test_bench_refuses_ranks() -> None:
    done = launch("bench", ranks=2)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.count("bench measures one replica") == 1


def test_a_study_on_two_ranks(tmp_path: Path) -> None:
    arguments = (
        "study", "variants", "--network", "model-small", "--stride", "1,2", "--filters", "4",
        "--steps", "6", "--threads", "1", "--output", str(tmp_path / "out"),
    )  # fmt: skip
    done = launch(*arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 runs to train; results: ") == 1
    assert "stride 2: network model-small, layer 1 (conv1)" in done.stdout
    again = launch(*arguments, "--json", ranks=2)
    assert again.returncode == 0, again.stderr
    results = json.loads(again.stdout)["results"]
    assert [(r["stride"], r["filters"], r["runs"], bool(r["why"])) for r in results] == [
        ("", "", 1, False), ("2", "", 0, True), ("", "4", 1, False),
    ]  # fmt: skip
