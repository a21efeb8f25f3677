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
        (("--repair",), "--repair has no effect without --survive; add it"),
        (("--survive", "--dry-run"), "--dry-run starts no training"),
        (("--survive", "-n", "4", "--shards", "2"), "--shards is 2, but --ranks is 4"),
        (("--survive", "-n", "2", "--min-ranks", "3"), "--min-ranks is 3, but --ranks is 2"),
        (("--survive", "-n", "2", "--resume", "nothing"), "nothing is not a run directory"),
        (("--survive", "-n", "2", "--launcher", "nothing"), "--launcher nothing: no such program"),
        (("--survive", "-n", "2", "--launcher", "false"), "starts no rank: it printed nothing"),
        (("--survive", "--snapshot-mib", "0"), "expected a whole number of at least 1"),
        (("--survive", "--hosts", ","), "--hosts is ','; expected NAME:RANKS"),
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
    words = (
        "train",
        "--survive",
        "--repair",
        "-n",
        "3",
        "--launcher",
        f"{launcher} --hosts a,b",
        *given,
    )
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


def test_a_rehearsal_needs_no_flag_for_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rehearse", "--help"], is_rank_zero=True) == 0
    out = capsys.readouterr().out
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("  -")}
    assert "--max-restarts" in listed
    assert not listed & {"--survive", "--hosts", "--resume"}


def launched(folder: Path, *flags: str) -> list[str]:
    """Return the words with which ranks are started."""
    launcher = folder / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    words = ("train", "--survive", "--network", "mlp-5", "--launcher", str(launcher), *flags)
    assert run([*words, "--run-dir", str(folder / "run")], is_rank_zero=True) == 2
    return (folder / "launcher.words").read_text().split("\n")[:-1]


@pytest.mark.parametrize("variable", [None, "0", "1"])
@pytest.mark.parametrize("key", [None, "false", "true"])
@pytest.mark.parametrize("flag", [None, "--no-snapshots", "--snapshots"])
def test_the_setting_of_the_user_decides_on_snapshots(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    key: str | None,
    flag: str | None,
) -> None:
    """Flags take precedence over the variable, and the variable over the file."""
    file = tmp_path / "settings.toml"
    file.write_text("seed = 3\n" if key is None else f"seed = 3\nsnapshots = {key}\n")
    if variable is not None:
        monkeypatch.setenv("DPTRAIN_SNAPSHOTS", variable)
    words = launched(tmp_path, "--config", str(file), *([] if flag is None else [flag]))
    found = [word for word in words if word.endswith("snapshots")]
    from_file = "--no-snapshots" if key == "false" else "--snapshots"
    assert found == ([flag] if flag else [] if variable else [from_file])


@pytest.mark.parametrize("value", ["", "x", "-1", "3(x2)", "9" * 30])
def test_variables_of_slurm_that_are_no_numbers_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr("dptrain.cli.survive.available_cores", lambda: 5)
    for name in ("SLURM_NTASKS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.setenv(name, value)
    assert launched(tmp_path)[:2] == ["-n", "5"]


def test_a_run_continues_in_its_own_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('network = "mlp-5"\n')
    words = ("--resume", str(tmp_path / "run"), "--run-dir", str(tmp_path / "other"))
    assert run(["train", "--survive", *words], is_rank_zero=True) == 2
    assert "a run continues in its own directory" in capsys.readouterr().err
