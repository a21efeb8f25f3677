"""The command line as a user starts it: exit codes, and one voice whatever the number of ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.system.launch import command, environment, launch, under_launcher
from tests.tiers import tiered

MISTAKES = [
    (["train", "--batchsize", "3"], "No such option '--batchsize'"),
    (["train", "--batch-size", "0"], "--batch-size is 0; expected a whole number"),
    (["describe", "model9"], "no network 'model9'"),
]


@pytest.mark.parametrize("ranks", tiered([0, 2, 4], [2]))
@pytest.mark.parametrize(
    ("arguments", "message"),
    tiered(MISTAKES, MISTAKES[1:2]),
)
def test_a_mistake_is_said_once(arguments: list[str], message: str, ranks: int) -> None:
    done = launch(*arguments, ranks=ranks)
    assert done.returncode == 2
    assert not done.stdout
    said = [line for line in done.stderr.splitlines() if line.startswith("dptrain: ")]
    assert len(said) == 1
    assert message in said[0]
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.more
def test_a_mistake_in_a_variable_is_said_once() -> None:
    done = launch("train", ranks=3, DPTRAIN_SED="1")
    assert done.returncode == 2
    line = "dptrain: unknown environment variable DPTRAIN_SED; did you mean 'DPTRAIN_SEED'?\n"
    assert done.stderr.count(line) == 1


@pytest.mark.more
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["describe", "mlp-50", "--json"]])
def test_many_ranks_print_what_one_prints(arguments: list[str]) -> None:
    alone, together = launch(*arguments), launch(*arguments, ranks=3)
    assert alone.returncode == together.returncode == 0
    assert together.stdout == alone.stdout
    assert not together.stderr


@pytest.mark.more
def test_doctor_hears_from_all_ranks() -> None:
    done = launch("doctor", "--json", ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert "3 ranks (0 to 2)" in found["ranks"]["text"]
    assert found["launcher"]["status"] == "ok"
    assert found["mpi"]["status"] == "ok"


@pytest.mark.more
def test_doctor_finds_a_launcher_that_does_not_work_with_mpi(tmp_path: Path) -> None:
    # As with srun without the right --mpi: every process has an MPI of one rank.
    line = under_launcher(tmp_path, "slurmstepd", command("doctor"))
    variables = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    done = subprocess.run(line, env=environment(**variables), capture_output=True, text=True)
    assert done.returncode == 2
    [found] = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert "MPI reports 1 rank, but the launcher started 4" in found
    variables["SLURM_PROCID"] = "3"
    silent = subprocess.run(line, env=environment(**variables), capture_output=True, text=True)
    assert not silent.stdout


@pytest.mark.more
def test_a_child_of_an_mpi_program_is_refused_and_other_commands_work(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import subprocess, sys\n"
        "from mpi4py import MPI\n"
        "codes = [subprocess.run([sys.executable, '-m', 'dptrain', *words]).returncode\n"
        "         for words in (['train', '--steps', '1'], ['data', 'list'])]\n"
        "assert codes == [2, 0], codes\n"
    )
    done = launch(ranks=2, program=(str(script),), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this process is a child of an MPI program") == 2
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.more
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small /dev/shm")
def test_a_small_shared_memory_is_refused_before_mpi_aborts(tmp_path: Path) -> None:
    small = 'mount -t tmpfs -o size=100k none /dev/shm && "$@"'
    inside = ["unshare", "-m", "sh", "-c", small, "sh"]
    line = [*inside, *command("train", "--steps", "1", "--run-dir", str(tmp_path / "run"), ranks=2)]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True)
    if "MPICH" not in done.stderr:
        pytest.skip(f"no private mount, or an MPI that needs no memory there: {done.stderr}")
    assert done.returncode == 2
    [message] = done.stderr.splitlines()
    assert re.match(r"dptrain: /dev/shm has 100\.0 KiB free, but MPICH .* 2 ranks", message)
    line = [*inside, *command("doctor", "--json")]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True)
    found = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert found["/dev/shm"]["status"] == "note"
