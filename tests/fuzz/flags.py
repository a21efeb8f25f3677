"""Random commands, flags and variables of the environment, most of them in this process."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dptrain.training.settings import settings
from tests.fuzz.flag_commands import (
    BASES,
    SMALL,
    VALUES,
    WEIGHTS,
    arguments_of,
    commands,
    write_files,
)  # fmt: skip
from tests.fuzz.flag_values import (
    INPUTS,
    Random,
    pick,
    valid_setting,
    valid_value,
    wrong_value,
)  # fmt: skip
from tests.fuzz.outcome import COMPARED, Outcome, Result, call, expect

CODES = (0, 2, 3, 75)
"""Exit codes of a command that no signal interrupts and that has no bug."""

LIMIT_S = 5.0
"""Processor time after which a refusal is too late."""
LIMIT_BYTES = 2**30
"""Memory that a refusal may need."""

READ = ("file", "inputs", "weights")
"""Parameters whose paths are only read."""

PROCESSES, LAUNCHED = 0.015, 0.015
"""Shares of the trials that start a process, and two ranks."""

VARIABLES = {
    "OMP_NUM_THREADS": ("1", "0", "-1", "x", "9" * 400, "", "2,3"),
    "NUMBA_NUM_THREADS": ("1", "2"),
    "TERM": ("dumb", "", "xterm-256color", "é"),
    "COLUMNS": ("80", "20", "1", "0", "-1", "x", "9" * 30, "1000000", ""),
    "LINES": ("1", "-1", "x"),
    "LANG": ("C", "C.UTF-8", "tr_TR.UTF-8", "x", ""),
    "LC_ALL": ("C", "POSIX", "xx_XX"),
    "HOME": ("/absent", "", "file.txt", "."),
    "XDG_CACHE_HOME": ("cache", ""),
    "NO_COLOR": ("1", ""),
    "FORCE_COLOR": ("1",),
    "TZ": ("UTC", "x", "Asia/Tokyo"),
    "CUDA_VISIBLE_DEVICES": ("", "-1", "9", "x"),
    "SLURM_CPUS_PER_TASK": ("2", "x", "-1"),
    "SLURM_JOB_ID": ("1", "x"),
    "SLURM_ARRAY_TASK_ID": ("1",),
    "SLURM_JOB_END_TIME": ("x", "1", "9" * 400),
    "MPLBACKEND": ("agg", "x"),
    "SOURCE_DATE_EPOCH": ("0", "x"),
    "DPTRAIN_ALLOW_SINGLE": ("1", "0", "x"),
    "DPTRAIN_UNKNOWN": ("1",),
    "DPTRAIN_": ("1",),
}  # fmt: skip
"""Variables that are no settings, and values of them."""


def trial(random: Random, folder: Path) -> Outcome:
    """Run a random command, which must end with a documented exit code."""
    write_files(folder)
    how = random.random()
    launched = how < LAUNCHED
    is_process = how < LAUNCHED + PROCESSES
    name = _command(random, is_launched=launched, is_process=is_process)
    values = _values(random, name)
    variables = _variables(random)
    arguments = list(arguments_of(name, values))
    if is_process:
        return _start(arguments, variables, folder, ranks=2 if launched else 0)
    with _inside(folder, variables):
        return _call(arguments, variables)


def _command(random: Random, *, is_launched: bool, is_process: bool) -> str:
    if is_launched:
        return str(pick(random, ("train", "train", "evaluate", "find-rate", "profile", "describe")))
    names = [*BASES, *(["doctor"] if is_process else [])]
    weights = [WEIGHTS.get(name, 1.0) for name in names]
    return str(random.choice(names, p=[weight / sum(weights) for weight in weights]))


def _values(random: Random, name: str) -> dict[str, Any]:
    """Return values of random parameters of a command; half of the commands have no wrong one."""
    values = dict(BASES.get(name, {}))
    parameters = [each for each in commands()[name].params if each.name != "help"]
    wrong_share = 0.0 if random.random() < 0.55 else 0.5
    for _ in range(int(random.integers(0, 5 if wrong_share else 4))):
        if not parameters:
            break
        parameter = pick(random, parameters)
        is_wrong = random.random() < wrong_share
        texts = {**VALUES, **SMALL.get(name, {})}
        values[parameter.name or ""] = _value(random, parameter, texts, is_wrong=is_wrong)
    if wrong_share and values and random.random() < 0.1:
        del values[pick(random, values)]
    return values


def _value(
    random: Random, parameter: click.Parameter, texts: dict[str, Any], *, is_wrong: bool
) -> Any:
    name = parameter.name or ""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return pick(random, (*parameter.opts, *parameter.secondary_opts))
    is_path = isinstance(parameter.type, click.Path) or name in ("run_dir", "resume", "weights")

    def one() -> str:
        if not is_wrong:
            return valid_value(random, parameter, texts)
        if name in READ and random.random() < 0.2:
            return str(pick(random, INPUTS))
        return wrong_value(random, name, is_path=is_path)

    if parameter.multiple or parameter.nargs == -1:
        return [one() for _ in range(int(random.integers(1, 3)))]
    return one()


def _variables(random: Random) -> dict[str, str]:
    """Return random variables of the environment; two thirds of the trials have none."""
    found: dict[str, str] = {}
    if random.random() < 0.65:
        return found
    for _ in range(int(random.integers(1, 4))):
        if random.random() < 0.3:
            setting = pick(random, settings())
            is_wrong = random.random() < 0.5
            value = (
                wrong_value(random, setting.name)
                if is_wrong
                else pick(random, VALUES[setting.name])
                if setting.name in VALUES
                else valid_setting(random, setting)
            )
            found[setting.variable] = value
        else:
            name = pick(random, VARIABLES)
            found[name] = pick(random, VARIABLES[name])
    return found


@contextlib.contextmanager
def _inside(folder: Path, variables: dict[str, str]) -> Iterator[None]:
    """Run the block in a folder and with variables of the environment."""
    before, directory = dict(os.environ), Path.cwd()
    os.chdir(folder)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(before)


def _call(arguments: list[str], variables: dict[str, str]) -> Outcome:
    """Run a command in this process."""
    start, largest = time.process_time(), _peak_bytes()
    result = call(*arguments, codes=CODES)
    seconds, more = time.process_time() - start, _peak_bytes() - largest
    outcome = _outcome(result, arguments)
    if result.code == 2:
        text = f"{_short(arguments)} {variables}"
        expect(seconds < LIMIT_S, f"refused after {seconds:.1f} s: {text}: {result.errors}")
        expect(more < LIMIT_BYTES, f"refused with {more:,} bytes: {text}: {result.errors}")
    return outcome


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _outcome(result: Result, arguments: list[str]) -> Outcome:
    expect("Traceback" not in result.output + result.errors, f"a traceback: {result.errors}")
    if result.code != 2:
        return COMPARED
    # A check of data prints each problem; a launcher that fails has lines of its own.
    lines = 50 if arguments[:2] == ["data", "check"] or arguments[0] in ("scale", "doctor") else 1
    return result.refusal(lines=lines)


def _start(arguments: list[str], variables: dict[str, str], folder: Path, ranks: int) -> Outcome:
    """Run a command in a process, or in each of two ranks."""
    line = [sys.executable, "-m", "dptrain", *arguments]
    if ranks:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        mpirun = shutil.which("mpirun", path=path)
        expect(mpirun is not None, "no mpirun next to Python or on PATH")
        line = [str(mpirun), "-n", str(ranks), *line]
    done = subprocess.run(
        line, cwd=folder, env={**os.environ, **variables}, capture_output=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    text = f"{_short(line)} {variables}: exit code {done.returncode}: {output[-500:]}{errors}"
    codes = (*CODES, 1) if arguments[:1] == ["doctor"] else CODES
    expect(done.returncode in codes, text)
    expect("Traceback" not in output + errors, text)
    if done.returncode != 2:
        return COMPARED
    own = [line for line in errors.splitlines() if line.startswith("dptrain: ")]
    named = [line for line in own if "compiling kernels" not in line]
    expect(bool(named) or "--json" in arguments or arguments[0] == "doctor", text)
    return Outcome(COMPARED.verdict.REFUSED, named[-1] if named else "")


def _short(arguments: list[str]) -> str:
    return " ".join(text if len(text) < 100 else f"{text[:60]}…[{len(text)}]" for text in arguments)
