"""Paths that the system refuses end in one line, whatever command reads or writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptrain.cli.main import run
from dptrain.errors import path_user_error

COMMANDS = (
    "report {}", "evaluate {}", "export {} -o a.onnx", "predict {} -i a.npy -o b.csv",
    "train --config {}", "train --weights {}", "train --resume {}", "train --network {}.toml",
    "runs list {}", "runs compare {} {}", "runs label {} --add a", "runs cite {}",
    "describe {}.toml", "describe {}.onnx", "data describe npz:{}", "data describe npy:{}",
    "data describe folder:{}", "data describe csv:{}?target=a", "data check mnist:{}",
    "data check cifar10:{}", "data show digits --output {}", "data convert digits --output {}",
    "study sweep --config {} --set batch_size=2",
)  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """A name that is too long, links that form a cycle, and a path in a file."""
    cycle, file = tmp_path / "cycle", tmp_path / "file"
    cycle.symlink_to(cycle)
    file.write_text("text")
    return ["x" * 300, str(cycle), str(file / "inner"), f"{tmp_path}/{'y' * 300}/z"]


@pytest.mark.parametrize("command", COMMANDS)
def test_paths_that_the_system_refuses_are_one_line(
    command: str, paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for path in paths:
        if "--output" in command and path.endswith("cycle"):
            continue  # The file replaces the link.
        assert run(command.replace("{}", path).split(), is_rank_zero=True) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("dptrain: ")


def test_an_error_of_the_system_names_the_path() -> None:
    error = path_user_error(OSError(36, "File name too long", "a\nb"))
    assert str(error) == "a\\nb cannot be used: File name too long"
    assert path_user_error(OSError(5, "Input/output error")) is None
