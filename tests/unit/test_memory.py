"""A lack of memory is one line with the size needed and the size available."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dptrain.errors import UserError
from dptrain.memory import format_bytes, memory_user_error, require_memory


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (10**12, "931.3 GiB"),
        (2**60, "1.0 EiB"),
        (10**30, "867,361,737,988.4 EiB"),
    ],
)
def test_sizes_have_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_what_does_not_fit_is_refused_before_it_is_allocated() -> None:
    require_memory(100, "a batch", available_bytes=100)
    message = "^a batch needs 2.0 GiB of memory, but 1.0 GiB are available; use less$"
    with pytest.raises(UserError, match=message):
        require_memory(2**31, "a batch", "use less", available_bytes=2**30)
    with pytest.raises(UserError, match=r"needs .* EiB of memory, but .*iB are available; use a"):
        require_memory(10**30, "a batch")


def test_an_error_of_numpy_states_the_size() -> None:
    with pytest.raises(MemoryError) as info:
        np.empty((10**6, 10**9), np.float64)
    text = str(memory_user_error(info.value))
    assert "not enough memory for an array of 7.1 PiB; " in text
    assert "are available on this machine; use a smaller batch size" in text


def test_other_errors_are_shown() -> None:
    cupy = MemoryError("Out of memory allocating 2,147,483,648 bytes (allocated so far: 0 bytes).")
    assert "for an array of 2.0 GiB; " in str(memory_user_error(cupy))
    assert "(no\\nmap); " in str(memory_user_error(MemoryError("no\nmap")))
    assert "enough memory; " in str(memory_user_error(MemoryError()))


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (("--batch-size", "1000000000"), " TiB of memory, but "),
        *(
            pytest.param(*values, marks=pytest.mark.more)
            for values in (
                (("--batch-size", str(10**18)), "expected a whole number of at least 1 and up to"),
                (("--data", "synthetic?samples=1000000000"), " of memory, but "),
                (("--data", f"synthetic?samples={10**25}"), "at least 1 and up to 2,147,483,647"),
                (("--network", "wide.toml", "--data", "synthetic"), " TiB of memory, but "),
            )
        ),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(
    tmp_path: Path, arguments: tuple[str, ...], needed: str
) -> None:
    (tmp_path / "wide.toml").write_text(
        'input = [3, 8, 8]\nlayer = [{type = "conv", filters = 1000000000},'
        ' {type = "flatten"}, {type = "dense", units = 10}]\n'
    )
    program = "import sys; from dptrain.cli.main import main; main()"
    line = ["train", "--network", "model-small", "--steps", "1", *arguments]
    done = subprocess.run(
        [sys.executable, "-c", program, *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (message,) = done.stderr.splitlines()
    assert message.startswith("dptrain: ")
    assert needed in message
    assert not (tmp_path / "runs").exists()
