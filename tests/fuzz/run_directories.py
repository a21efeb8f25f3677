"""Run directories of small training runs, with files that are damaged, removed or replaced."""

from __future__ import annotations

import atexit
import csv
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.fuzz.conversion import write_linear_network
from tests.fuzz.damage import damage_file
from tests.fuzz.outcome import ACCEPTED, COMPARED, Outcome, Result, call, expect, expect_close

Random = np.random.Generator
VALUES = ("null", "-1", "0", "1e400", "NaN", '""', '"x"', "[]", "{}", "true", "9" * 400, "[[1]]",
          '"../../etc"', '"\\u001b[31m"', "1.5", "123456789012345678901234567890")  # fmt: skip
STEPS = 4


@dataclass
class Base:
    """A training run.

    Attributes:
        run: its directory, which no command changes.
        data: what can be predicted.
        network: the file of its network.
        evaluations: what `evaluate --json` prints, by the step of the checkpoint.
        predictions: the lines of the file that `predict` writes, by the step.
        parameters: the arrays that `export` writes, by the step.
        summary: contents of summary.json.
    """

    run: Path
    data: Path
    network: Path
    arguments: list[str]
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    predictions: dict[int, list[list[str]]] = field(default_factory=dict)
    parameters: dict[int, dict[str, NDArray[Any]]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


def trial(random: Random, folder: Path) -> Outcome:
    """Damage a copy of a run directory, and compare what commands read from it."""
    known = bases()
    base = known[int(random.integers(len(known)))]
    run = folder / "run"
    shutil.copytree(base.run, run, symlinks=True)
    crashes = bool(random.random() < 0.3)
    if crashes:
        # As after a crash between two checkpoints.
        (run / "summary.json").unlink()
        shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
        shutil.rmtree(run / "checkpoints" / "best", ignore_errors=True)
    is_intact = bool(random.random() < 0.4)
    if not is_intact:
        for _ in range(int(random.integers(1, 3))):
            damage(random, run)
    verdicts = [_command(random, base, run, is_intact=is_intact, crashes=crashes) for _ in range(2)]
    if is_intact:
        return COMPARED
    refusals = [each for each in verdicts if each is not COMPARED]
    return refusals[0] if refusals else ACCEPTED


def _command(random: Random, base: Base, run: Path, *, is_intact: bool, crashes: bool) -> Outcome:
    """Run a command, and compare its result with that of the undamaged run."""
    choice = random.random()
    if choice < 0.35:
        result = call("evaluate", run, "--json", *(["--checkpoint", 2] if choice < 0.1 else []))
        if result.code == 0:
            check_evaluation(base, json.loads(result.output))
    elif choice < 0.5:
        output = run.parent / "predicted.csv"
        output.unlink(missing_ok=True)
        result = call("predict", run, "-i", base.data, "-o", output)
        if result.code == 0:
            expect(_rows(output) == base.predictions[_step(result)], "other predictions")
    elif choice < 0.62:
        output = run.parent / "weights.safetensors"
        result = call("export", run, "--output", output, "--replace")
        if result.code == 0:
            found, expected = load_file(output), base.parameters[_step(result)]
            expect(found.keys() == expected.keys(), f"parameters {list(found)}")
            for name, values in expected.items():
                expect_close(found[name], values, 0.0, name)
    elif choice < 0.74:
        result = call("runs", "list", run.parent, *(["--json"] if random.random() < 0.5 else []))
        expect(not is_intact or "run" in result.output, "the run is not listed")
    elif choice < 0.8:
        result = call("runs", "cite", run)
    elif choice < 0.84:
        result = call("runs", "label", run, "--add", "tried")
    elif choice < 0.88:
        result = call("runs", "compare", base.run, run)
    elif choice < 0.92:
        result = call("report", run, "--replace")
        expect(result.code != 0 or (run / "report.html").is_file(), "no report is written")
        if crashes and is_intact:
            return _outcome(result, is_valid=False)
    else:
        result = call("train", "--resume", run)
        # A damaged byte may be another setting, which is used and recorded.
        if result.code == 0 and "changed settings" not in result.output:
            check_resumed(base, run)
    return _outcome(result, is_valid=is_intact)


def _outcome(result: Result, *, is_valid: bool) -> Outcome:
    if result.code == 0:
        return COMPARED
    return result.refusal(is_valid=is_valid)


def check_evaluation(base: Base, found: dict[str, Any]) -> None:
    """Compare an evaluation with that of the same checkpoint of the undamaged run."""
    expected = base.evaluations.get(found.get("step"))
    expect(expected is not None, f"step {found.get('step')} is evaluated")
    assert expected is not None
    for key in ("loss", "accuracy", "samples", "classes", "confusion", "mae"):
        expect(
            found.get(key) == expected.get(key),
            f"{key} of step {found['step']}: {found.get(key)}; expected {expected.get(key)}",
        )


def check_resumed(base: Base, run: Path) -> None:
    """Compare the result of a run that was resumed with that of the run without an interruption."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    for key in ("steps", "test_loss", "test_accuracy", "test_mae"):
        expect(
            summary.get(key) == base.summary.get(key),
            f"{key} after resuming: {summary.get(key)}; expected {base.summary.get(key)}",
        )


def damage(random: Random, run: Path) -> None:
    """Damage, remove or replace a random file."""
    files = [path for path in run.rglob("*") if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.suffix not in (".png", ".svg")]
    if not files:
        return
    path = files[int(random.integers(len(files)))]
    match int(random.integers(10)):
        case 0 | 1:
            damage_file(random, path)
        case 2:
            path.unlink()
        case 3:
            path.write_bytes(b"")
        case 4:
            path.unlink()
            path.mkdir()
        case 5:
            path.unlink()
            os.mkfifo(path)
        case 6:
            shutil.rmtree(path.parent)
        case 7:
            other = files[int(random.integers(len(files)))]
            content = other.read_bytes()
            path.write_bytes(content)
        case _:
            _edit_text(random, path)


def _edit_text(random: Random, path: Path) -> None:
    """Replace a value in a line of a JSON or TOML file, or the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return damage_file(random, path)
    at = int(random.integers(len(lines))) if lines else 0
    value = VALUES[int(random.integers(len(VALUES)))]
    if lines:
        for mark in (": ", " = "):
            key, found, rest = lines[at].partition(mark)
            if found:
                comma = "," if rest.endswith(",") else ""
                lines[at] = f"{key}{mark}{value}{comma}"
                break
        else:
            lines[at] = value
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return None


# The undamaged runs.


@cache
def bases() -> list[Base]:
    """Train the runs that are damaged; they are removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="dptrain-runs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    random = np.random.default_rng(5)
    made = [_classes(random, folder / "classes"), _values(random, folder / "values")]
    for base in made:
        _train(base)
        _check_by_hand(base)
    return made


def _classes(random: Random, folder: Path) -> Base:
    folder.mkdir()
    x, y = random.integers(0, 256, (40, 5, 4, 3), dtype=np.uint8), np.arange(40) % 3
    np.savez(folder / "data.npz", x=x[:30], y=y[:30])
    np.savez(folder / "new.npz", x=x[30:], y=y[30:])
    write_linear_network(folder / "net.toml", (3, 5, 4), 3, "classes")
    arguments = ["--data", f"npz:{folder / 'data.npz'}", "--validation", "0.2"]
    return Base(folder / "run", folder / "new.npz", folder / "net.toml", arguments)


def _values(random: Random, folder: Path) -> Base:
    folder.mkdir()
    with (folder / "data.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b b", "c"])
        writer.writerows(random.standard_normal((40, 3)).round(6).tolist())
    write_linear_network(folder / "net.toml", (2,), 1, "values")
    arguments = ["--data", f"csv:{folder / 'data.csv'}?target=c"]
    return Base(folder / "run", folder / "data.csv", folder / "net.toml", arguments)


def _train(base: Base) -> None:
    result = call(
        "train", "--network", base.network, *base.arguments, "--backend", "reference", "--threads",
        1, "--steps", STEPS, "--batch-size", 6, "--checkpoint-every", 2, "--log-every", 1,
        "--baseline-steps", 0, "--evaluate-every", 1, "--run-dir", base.run,
    )  # fmt: skip
    expect(result.code == 0, f"training fails: {result.errors}")
    base.summary = json.loads((base.run / "summary.json").read_text(encoding="utf-8"))
    for step in (2, STEPS):
        chosen = ["--checkpoint", step]
        base.evaluations[step] = json.loads(call("evaluate", base.run, "--json", *chosen).output)
        files = [base.run.parent / f"{name}-{step}{suffix}"
                 for name, suffix in (("p", ".csv"), ("w", ".safetensors"))]  # fmt: skip
        found = call("predict", base.run, "-i", base.data, "-o", files[0], *chosen)
        expect(_step(found) == step, f"another step than {step}: {found}")
        found = call("export", base.run, "--output", files[1], *chosen)
        expect(_step(found) == step, f"another step than {step}: {found}")
        base.predictions[step], base.parameters[step] = _rows(files[0]), load_file(files[1])


def _step(result: Result) -> int:
    """Return the step of the model that a command used."""
    found = re.search(r"model of step (\d+)", result.output)
    return int(found[1]) if found else -1


def _check_by_hand(base: Base) -> None:
    """Compare the predictions with the same in float64."""
    parameters = base.parameters[STEPS]
    weight, bias = (parameters[f"dense1.{part}"].astype(float) for part in ("weight", "bias"))
    header, *rows = base.predictions[STEPS]
    # Values have the name of the target.
    first = next(i for i, name in enumerate(header) if name == "c" or name.startswith("prob"))
    found = np.array([[float(text) for text in row[first : first + len(bias)]] for row in rows])
    if base.data.suffix == ".npz":
        pixels = np.load(base.data)["x"].astype(float).transpose(0, 3, 1, 2)
        z = (pixels.reshape(len(pixels), -1) / 127.5 - 1.0) @ weight.T + bias
        expected = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    else:
        table = np.loadtxt(base.data, delimiter=",", skiprows=1)
        training = table[: len(table) - len(table) // 5]
        mean, deviation = training.mean(axis=0), training.std(axis=0)
        z = (table[:, :2] - mean[:2]) / deviation[:2] @ weight.T + bias
        expected = z * deviation[2] + mean[2]
    expect_close(found, expected, 2e-5, "predictions")


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))
