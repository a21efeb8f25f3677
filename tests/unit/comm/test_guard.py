"""One process without MPI: plain printing and exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest

from dptrain.comm.abort import describe, guard
from dptrain.comm.world import World
from dptrain.errors import UserError


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def main() -> NoReturn:
        raise error

    return main


def test_a_regular_end_keeps_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(lambda: 7) == 7
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (UserError("no such file"), 2, "dptrain: no such file\n"),
        (SystemExit(0), 0, ""),
        (SystemExit(None), 0, ""),
        (SystemExit(5), 5, ""),
        (SystemExit("too bad"), 1, "dptrain: too bad\n"),
        (KeyboardInterrupt(), 130, "dptrain: interrupted\n"),
    ],
)
def test_what_is_not_a_bug_has_no_traceback(
    error: BaseException, code: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guard(_raising(error)) == code
    assert capsys.readouterr().err == printed


def test_a_bug_has_its_traceback_and_its_cause_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(_raising(ZeroDivisionError("seven by nothing"))) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert printed.endswith("\ndptrain: ZeroDivisionError: seven by nothing\n")
    assert printed.count("ZeroDivisionError: seven by nothing") == 1


def test_an_agreed_mistake_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        World.single().agree(UserError("no data"))
        return 0

    assert guard(main) == 2
    assert capsys.readouterr().err == "dptrain: no data\n"


def test_of_many_ranks_the_rank_is_named() -> None:
    error = RuntimeError("broken")
    assert describe(error, 2, 4) == "dptrain: rank 2 of 4: RuntimeError: broken\n"


def test_the_command_line_does_not_wait_for_mpi() -> None:
    """Importing the room must not import MPI: `--help` answers at once."""
    code = (
        "import sys, dptrain.comm.abort, dptrain.comm.signals; assert 'mpi4py' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
