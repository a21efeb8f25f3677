"""The flags of `dptrain train --survive`: mistakes, and what the ranks receive."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dptrain.cli.main import run

LAUNCHER = """\
#!/bin/sh
printf '%s\\n' "$@" >"$0.words"
case "$*" in *"print('here')"*) echo here ;; *--version) echo 1 ;; *) exit 2 ;; esac
"""
"""A launcher that records its command line, and fails as a mistake does."""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-n", "2"), "--ranks has no effect without --survive; add it, or start ranks by mpirun"),
        (("--survive", "--dry-run"), "--dry-run starts no training"),
        (("--survive", "-n", "4", "--shards", "2"), "--shards is 2, but --ranks is 4"),
        (("--survive", "-n", "2", "--min-ranks", "3"), "--min-ranks is 3, but --ranks is 2"),
        (("--survive", "-n", "2", "--resume", "nothing"), "nothing is not a run directory"),
        (("--survive", "-n", "2", "--launcher", "nothing"), "--launcher nothing: no such program"),
        (("--survive", "-n", "2", "--launcher", "false"), "starts no rank: it printed nothing"),
        (("--survive", "--snapshot-mib", "0"), "expected a whole number of at least 1"),
    ],
)
def test_mistakes_are_found_before_ranks_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--network", "mlp-5", *flags], is_rank_zero=True) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_ranks_receive_the_flags_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    given = ("--network", "mlp-5", "--nesterov", "--optimizer", "sgd", "--seed", "5")
    words = ("train", "--survive", "-n", "3", "--launcher", f"{launcher} --hosts a,b", *given)
    assert run([*words, "--run-dir", "there", "--resume"], is_rank_zero=True) == 2
    made = (tmp_path / "launcher.words").read_text().split("\n")[:-1]
    assert made[:8] == ["--hosts", "a,b", "-n", "3", sys.executable, "-m", "dptrain", "train"]
    flags = made[8:]
    assert flags[-3:] == ["--run-dir", "there", "--resume"]
    assert {"--snapshots", "--nesterov"} <= set(flags)
    assert flags[flags.index("--seed") + 1] == "5"
    assert "--survive" not in flags
    out = capsys.readouterr().out
    assert "with another number of ranks, the last bits of the parameters differ" in out
