"""Training as a user runs it, from the command line to the files it leaves."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from dptrain.network import get_network
from dptrain.network.files import write_network
from dptrain.runs.spans import Spans
from dptrain.toml import read_toml
from dptrain.vocabulary import find_term
from tests.lazy import LazyModule
from tests.system.launch import (
    command,
    descendants,
    environment,
    launch,
    succeed,
    succeed_together,
    wait_until_ended,
)
from tests.tiers import tiered
from tests.unit.measure.test_profile import keys

onnxruntime = LazyModule("onnxruntime")

SMALL = ("train", "--network", "model-small", "--baseline-steps", 0)
ENDLESS = 10**7
"""Steps of a run that is stopped or killed, however late the test does it."""


def state(run: Path, step: int) -> dict[str, np.ndarray]:
    """Arrays of a checkpoint."""
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


def summary(run: Path) -> dict[str, Any]:
    """``summary.json``, which must be strict JSON."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return json.loads((run / "summary.json").read_text(), parse_constant=refuse)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.more
def test_train_without_arguments_learns_the_digits(tmp_path: Path) -> None:
    text = succeed("train", "--verbose", ranks=4, cwd=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    facts = summary(run)
    assert facts["test_accuracy"] >= 0.97
    assert facts["network"] == "model0"
    assert facts["ranks"] == 4
    assert facts["backend"] == "numba"
    assert facts["first_step_s"] > 0
    assert facts["samples_per_s"] > 0
    # A second of training is too short for an efficiency, unless the machine is busy.
    measured = facts["scaling"]["blocks"] >= 3
    assert ("scaling efficiency not measured" in text) != measured
    assert (facts["scaling"]["weak"] is None) != measured
    assert sum(1 for line in text.splitlines() if line.startswith("epoch")) == 12
    assert "Traceback" not in text


@pytest.mark.more
def test_the_closing_table_adds_up_to_the_step(tmp_path: Path) -> None:
    succeed(*SMALL, "--steps", 60, "--run-dir", "run", ranks=2, cwd=tmp_path)
    facts = summary(tmp_path / "run")
    parts = {name: ms for name, ms in facts["parts"].items() if ms is not None}
    stages = sum(stage["typical_ms"] for stage in facts["stages"])
    # Stages contain what their thread lacked of a core, and the part does not.
    least, most = parts["compute"], parts["compute"] + parts.get("without_core", 0.0)
    assert least * (1 - 1e-6) <= stages <= most * (1 + 1e-6)
    assert all(value >= 0 for value in parts.values())
    assert facts["step_ms"]["q1"] <= sum(parts.values()) <= facts["step_ms"]["q3"]
    pop = facts["pop"]
    product = math.prod(
        pop[name]["value"] for name in ("load_balance", "serialisation", "transfer")
    )
    assert pop["parallel"]["value"] == pytest.approx(product, rel=1e-6)
    everything = facts["step_parts"]["all_steps"]
    assert sum(ms for ms in everything.values() if ms is not None) == pytest.approx(
        facts["step_ms"]["mean"], rel=1e-9
    )
    # The second epoch begins with the evaluation after the first.
    assert everything["evaluation"] > 0
    assert sum(stage["share"] for stage in facts["stages"]) == pytest.approx(
        stages / sum(parts.values()), rel=1e-6
    )
    for record in (facts, *metrics(tmp_path / "run")):
        assert not [path for path in keys(record) if find_term(*path) is None]
    assert all(stage["slowest_ms"] >= stage["typical_ms"] * (1 - 1e-9) for stage in facts["stages"])
    phases = {stage["phase"] for stage in facts["stages"]}
    assert phases >= {"load", "forward", "loss", "backward_weight", "backward_input", "update"}


@pytest.mark.more
def test_little_of_a_step_belongs_to_no_part(tmp_path: Path) -> None:
    """A part that is not measured would be counted there, in every run.

    On a busy machine, ranks also lose their cores between the parts, which differs from run to run.
    """
    shares = []
    for number in range(5):
        succeed(*SMALL, "--steps", 60, "--run-dir", f"run{number}", ranks=2, cwd=tmp_path)
        parts = summary(tmp_path / f"run{number}")["parts"]
        shares.append(parts["other"] / sum(ms for ms in parts.values() if ms is not None))
        if shares[-1] < 0.25:
            return
    raise AssertionError(shares)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """50 steps of the reference backend in float64 on one rank."""
    folder = tmp_path_factory.mktemp("oracle")
    succeed(*SMALL, "--steps", 50, "--backend", "reference", "--run-dir", "run", cwd=folder)
    return state(folder / "run", 50)


@pytest.mark.more
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_ranks_train_to_the_parameters_of_the_oracle(
    tmp_path: Path, oracle: dict[str, np.ndarray], ranks: int
) -> None:
    def run(strategy: str) -> tuple[Any, ...]:
        return (
            *SMALL,
            "--steps",
            50,
            "--strategy",
            strategy,
            "--run-dir",
            strategy,
            "--threads",
            1,
        )

    strategies = "mirrored", "central"
    succeed_together(*map(run, strategies), ranks=ranks, cwd=tmp_path)
    for strategy in strategies:
        trained = state(tmp_path / strategy, 50)
        assert trained.keys() == oracle.keys()
        for name, expected in oracle.items():
            if not name.startswith("parameters/"):
                continue
            # One float32 rounding (2⁻²⁴ of its size) of every parameter in every step, on average
            # in the same direction: many times more than the float32 reference backend shows.
            bound = 50 * 2.0**-24 * np.linalg.norm(expected)
            assert np.linalg.norm(trained[name] - expected) <= bound, (strategy, name)


@pytest.mark.more
def test_minibatches_smaller_than_the_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (1, 4):
        run = f"run{ranks}"
        arguments = ("--batch-size", 3, "--steps", 20, "--run-dir", run)
        succeed(*SMALL, *arguments, ranks=ranks, cwd=tmp_path)
    one, four = state(tmp_path / "run1", 20), state(tmp_path / "run4", 20)
    for name, expected in one.items():
        bound = 2 * 20 * 2.0**-24 * np.linalg.norm(expected)
        assert np.linalg.norm(four[name] - expected) <= max(bound, 1e-7), name


@pytest.mark.more
@pytest.mark.parametrize(
    "options",
    [pytest.param((), marks=pytest.mark.more), ("--optimizer", "adam", "--learning-rate", "0.001")],
)
def test_resume_ends_bit_for_bit_where_the_uninterrupted_run_ends(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    # 36 steps an epoch: both halves end inside one. Dropout, order and augmentation take part.
    run = (*SMALL, *options, "--flip", "--schedule", "constant")
    whole = (*run, "--steps", 60, "--run-dir", "whole")
    succeed_together(whole, (*run, "--steps", 25, "--run-dir", "parts"), ranks=2, cwd=tmp_path)
    resume = ("train", "--resume", "parts", "--steps", 60)
    text = succeed(*resume, ranks=2, cwd=tmp_path)
    assert "resumed after step 25" in text
    whole, parts = state(tmp_path / "whole", 60), state(tmp_path / "parts", 60)
    assert whole.keys() == parts.keys()
    for name, expected in whole.items():
        assert np.array_equal(parts[name], expected), name
    lines = metrics(tmp_path / "parts")
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))


@pytest.mark.more
def test_a_run_goes_on_from_another_directory(tmp_path: Path) -> None:
    write_network(get_network("model-small"), tmp_path / "mine.toml")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.random((40, 3, 16, 16)), y=np.arange(40) % 10)
    own = ("train", "--network", "mine.toml", "--data", "npz:mine.npz", "--baseline-steps", 0)
    constant = ("--schedule", "constant")
    succeed(*own, *constant, "--steps", 2, "--run-dir", "run", cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    text = succeed("train", "--resume", "../run", "--steps", 4, cwd=elsewhere)
    assert "resumed after step 2" in text
    assert json.loads(succeed("evaluate", "../run", "--json", cwd=elsewhere))["step"] == 4


@pytest.mark.more
def test_resuming_a_finished_run_leaves_its_results(tmp_path: Path) -> None:
    succeed(*SMALL, "--steps", 8, "--run-dir", "run", ranks=2, cwd=tmp_path)
    results = tmp_path / "run/summary.json"
    before = results.read_bytes()
    for _ in range(2):
        assert "nothing left to do" in succeed("train", "--resume", "run", ranks=2, cwd=tmp_path)
        assert results.read_bytes() == before
    # As if it had been killed between its last checkpoint and its summary.
    results.unlink()
    succeed("train", "--resume", "run", ranks=2, cwd=tmp_path)
    facts = summary(tmp_path / "run")
    assert facts["test_accuracy"] == json.loads(before)["test_accuracy"]
    assert facts["steps"] == 8
    assert facts["train_loss"] is None


@pytest.mark.more
def test_going_on_from_an_older_checkpoint_than_the_newest_is_said(tmp_path: Path) -> None:
    run = (*SMALL, "--steps", 8, "--checkpoint-every", 4, "--run-dir", "run")
    succeed(*run, cwd=tmp_path)
    newest = tmp_path / "run/checkpoints/step-00000008"
    (newest / "state.safetensors").write_bytes(b"half")
    text = succeed("train", "--resume", "run", cwd=tmp_path)
    assert "resumed after step 4" in text
    (note,) = (line for line in text.splitlines() if line.startswith("warning: "))
    assert "step-00000008 is damaged" in note


@pytest.mark.more
def test_as_many_checkpoints_stay_as_were_asked_for(tmp_path: Path) -> None:
    run = (*SMALL, "--steps", 8, "--checkpoint-every", 2, "--run-dir", "run")
    succeed(*run, "--keep-checkpoints", 1, cwd=tmp_path)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000008"]


@pytest.mark.more
def test_resume_at_another_number_of_ranks(tmp_path: Path) -> None:
    run = (*SMALL, "--schedule", "constant")
    succeed(*run, "--steps", 60, "--run-dir", "whole", ranks=1, cwd=tmp_path)
    succeed(*run, "--steps", 25, "--run-dir", "parts", ranks=3, cwd=tmp_path)
    succeed("train", "--resume", "parts", "--steps", 60, ranks=2, cwd=tmp_path)
    whole, parts = state(tmp_path / "whole", 60), state(tmp_path / "parts", 60)
    for name, expected in whole.items():
        bound = 2 * 60 * 2.0**-24 * np.linalg.norm(expected)
        assert np.linalg.norm(parts[name] - expected) <= max(bound, 1e-7), name


@pytest.mark.more
def test_the_written_configuration_starts_the_same_run_again(tmp_path: Path) -> None:
    succeed(*SMALL, "--steps", 20, "--run-dir", "first", ranks=2, cwd=tmp_path)
    config = tmp_path / "first/config.toml"
    values = read_toml(config)
    assert values["learning_rate"] > 0
    assert values["data"] == "digits"
    succeed("train", "--config", config, "--run-dir", "second", ranks=2, cwd=tmp_path)
    first, second = state(tmp_path / "first", 20), state(tmp_path / "second", 20)
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_that_goes_on_exactly(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = (*SMALL, "--schedule", "constant", "--steps", ENDLESS, "--run-dir", "run")
    line = command(*map(str, run), ranks=2)
    process = subprocess.Popen(
        line, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    wait_for_steps(tmp_path / "run")
    process.send_signal(number)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 75
    assert "stopped on request" in text
    stopped_at = summary(tmp_path / "run")["steps"]
    assert summary(tmp_path / "run")["stopped"] is True
    assert 0 < stopped_at < ENDLESS
    target = stopped_at + 10
    again = (*SMALL, "--schedule", "constant", "--steps", target, "--run-dir", "again")
    resume = ("train", "--resume", "run", "--steps", target)
    succeed_together(resume, again, ranks=2, cwd=tmp_path)
    expected, resumed = state(tmp_path / "again", target), state(tmp_path / "run", target)
    assert all(np.array_equal(expected[name], resumed[name]) for name in expected)


def begin(run: Path, *arguments: Any, ranks: int = 2) -> subprocess.Popen[str]:
    """Start endless training in `run`."""
    flags = ("--schedule", "constant", "--steps", ENDLESS, "--run-dir", run, *arguments)
    line = command(*map(str, (*SMALL, *flags)), ranks=ranks)
    pipe = subprocess.PIPE
    return subprocess.Popen(line, env=environment(), stdout=pipe, stderr=pipe, text=True)


@pytest.mark.more
def test_the_same_command_begins_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'network = "model-small"\nbaseline_steps = 0\nschedule = "constant"\n'
    )
    same = ("train", "--config", "mine.toml", "--resume", "--run-dir", "run", "--steps")
    assert "resumed" not in succeed(*same, 8, cwd=tmp_path)
    (tmp_path / "mine.toml").write_text('network = "model0"')  # Holds for new runs.
    assert "resumed after step 8" in succeed(*same, 12, cwd=tmp_path)
    before = (tmp_path / "run/summary.json").read_bytes()
    assert "nothing left to do" in succeed(*same, 12, cwd=tmp_path)
    assert (tmp_path / "run/summary.json").read_bytes() == before


@pytest.mark.more
def test_a_warning_after_training_does_not_kill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from dptrain.cli.main import run\n"
        "code = run(sys.argv[1:], is_rank_zero=True); os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.exit(code)"
    )
    line = [sys.executable, "-c", program, *map(str, SMALL), "--steps", "2"]
    assert subprocess.run(line, cwd=tmp_path, env=environment()).returncode == 0


@pytest.mark.more
def test_two_jobs_do_not_train_in_one_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with begin(run) as first:
        wait_for_steps(run)
        for how in (("--resume", run), ("--resume", "--run-dir", run)):
            second = launch("train", *how, "--steps", 3, ranks=2)
            assert second.returncode == 2
            assert "is training in run directory" in second.stderr
        first.send_signal(signal.SIGTERM)
        text, _ = first.communicate(timeout=300)
        assert first.returncode == 75, text
    assert summary(run)["steps"] == metrics(run)[-1]["step"]


@pytest.mark.more
def test_a_run_killed_before_its_first_checkpoint_is_begun_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # With validation data, every improvement is a checkpoint.
    with begin(run, "--checkpoint-every", ENDLESS, "--validation", 0) as first:
        wait_for_steps(run)
        for pid in descendants(first.pid, "dptrain"):
            os.kill(pid, signal.SIGKILL)
        first.communicate(timeout=300)
    text = succeed("train", "--resume", run, "--steps", 5, "--log-every", 1, ranks=2)
    assert "started again: it had no checkpoint" in text
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3, 4, 5]
    # A run whose checkpoints were deleted has results to lose.
    shutil.rmtree(run / "checkpoints")
    refused = launch("train", "--resume", run, "--steps", 9)
    assert refused.returncode == 2
    assert "checkpoints is missing" in refused.stderr


def wait_for_steps(run: Path) -> None:
    """Return when training has written its first line of metrics."""
    lines = run / "metrics.jsonl"
    deadline = time.monotonic() + 300  # Kernels may have to be compiled.
    while not (lines.exists() and lines.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    line = command(*map(str, (*SMALL, "--steps", ENDLESS, "--run-dir", "run")), ranks=3)
    process = subprocess.Popen(
        line,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_steps(tmp_path / "run")
    ranks = descendants(process.pid, "dptrain")
    assert len(ranks) == 3
    subprocess.run(["kill", "-9", str(ranks[1])], check=True)
    assert process.wait(timeout=300) != 0
    wait_until_ended(ranks)


@pytest.mark.more
@pytest.mark.parametrize("ranks", tiered([0, 3], [0]))
def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_layer(
    tmp_path: Path, ranks: int
) -> None:
    run = (*SMALL, "--learning-rate", "1e6", "--steps", 200, "--run-dir", "run")
    done = launch(*run, ranks=ranks, cwd=tmp_path)
    assert done.returncode == 3
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("dptrain: "))
    assert "the loss is" in line
    assert re.search(r"first in (parameter|the output of) (conv|dense)", line)
    assert "rank 0 of" not in line
    assert "learning rate" in line
    assert "Traceback" not in done.stderr


@pytest.mark.more
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "cifar10:nowhere"), "nowhere"),
        (("--data", "digitz"), "did you mean 'digits'"),
        (("--network", "model-small", "--data", "irradiance"), "irradiance"),
        (("--resume", "nowhere"), "nowhere"),
        (("--precision", "fp8"), "fp8"),
        (("--run-dir", "taken"), "taken"),
        (("--steps", 2, "--warmup-steps", 5), "5 of warm-up"),
        (("--threads", 2000), "up to 1,024"),
    ],
)
def test_a_mistake_is_one_line_from_one_rank(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    done = launch("train", *arguments, ranks=3, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("dptrain: "))
    assert message in line
    assert "Traceback" not in done.stderr
    assert (taken / "thesis.txt").read_text() == "mine"
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]
    assert "Abort(" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_evaluation_prediction_export_and_report_agree_with_training(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 17, (5, 8, 8)).astype(np.uint8)
    np.save(tmp_path / "new.npy", images)
    train = (*SMALL, "--epochs", 2, "--run-dir", "run")
    predict = ("predict", "run", "-i", "new.npy", "-o")
    export = ("export", "run", "--output", "model.onnx")
    succeed_together(train, (*predict, "two.csv"), export, ranks=2, cwd=tmp_path)
    facts = summary(tmp_path / "run")
    succeed_together(("report", "run"), (*predict, "one.csv"), ranks=0, cwd=tmp_path)
    assert f"{facts['test_accuracy']:.1%}" in (tmp_path / "run" / "report.html").read_text()
    one = (tmp_path / "one.csv").read_text().splitlines()
    assert len(one) == 6
    assert one[0].startswith("sample,class,probability_")
    shares = np.array([[float(v) for v in row.split(",")[2:]] for row in one[1:]])
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-4)
    two = (tmp_path / "two.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in one] == [row.split(",")[1] for row in two]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (exported,) = session.run(None, {"input": images[:, None]})
    np.testing.assert_allclose(exported, shares, rtol=2e-5, atol=1e-6)
    check_evaluation(tmp_path, ranks=0)


def check_evaluation(folder: Path, ranks: int) -> None:
    """Compare an evaluation of the run in a folder with that at the end of training."""
    facts = summary(folder / "run")
    found = json.loads(succeed("evaluate", "run", "--json", ranks=ranks, cwd=folder))
    assert found["accuracy"] == facts["test_accuracy"]
    assert found["loss"] == pytest.approx(facts["test_loss"], rel=1e-5)
    assert found["samples"] == 360
    assert found["scored"] == "the test split of digits, 360 samples"


@pytest.mark.more
def test_three_ranks_evaluate_what_two_have_trained(tmp_path: Path) -> None:
    succeed(*SMALL, "--epochs", 2, "--run-dir", "run", ranks=2, cwd=tmp_path)
    check_evaluation(tmp_path, ranks=3)
    (tmp_path / "one.csv").write_text("mine")
    np.save(tmp_path / "new.npy", np.zeros((5, 8, 8), np.uint8))
    refused = launch("predict", "run", "-i", "new.npy", "-o", "one.csv", cwd=tmp_path)
    assert refused.returncode == 2
    assert (tmp_path / "one.csv").read_text() == "mine"


def write_images(folder: Path, classes: Sequence[str], count: int) -> None:
    """Write grey images whose brightness depends on the class."""
    random = np.random.default_rng(len(classes))
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = random.integers(60 * label, 60 * label + 60, (8, 8)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


@pytest.mark.more
def test_a_model_keeps_its_classes_whatever_happens_to_the_training_data(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text(
        'input = [1, 8, 8]\nloss = "softmax_cross_entropy"\n'
        '[[layer]]\ntype = "flatten"\n[[layer]]\ntype = "dense"\nunits = 3\n'
    )
    write_images(tmp_path / "shapes", ("circle", "line", "square"), 20)
    write_images(tmp_path / "other", ("circle", "line", "square"), 4)
    succeed(
        "train", "--network", "net.toml", "--data", "folder:shapes", "--epochs", 3,
        "--learning-rate", 0.1, "--run-dir", "run", "--baseline-steps", 0, cwd=tmp_path,
    )  # fmt: skip
    shutil.rmtree(tmp_path / "shapes")
    predict = ("predict", "run", "-i", "other", "-o")
    succeed(*predict, "a.csv", cwd=tmp_path)
    write_images(tmp_path / "shapes", ("bird", "circle"), 1)
    succeed(*predict, "b.csv", cwd=tmp_path)
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert lines[0] == "sample,class,probability_circle,probability_line,probability_square,target"
    assert lines == (tmp_path / "b.csv").read_text().splitlines()
    right = sum(line.partition("/")[0] == line.split(",")[1] for line in lines[1:])
    evaluate = ("evaluate", "run", "--data", "folder:other")
    found = json.loads(succeed(*evaluate, "--json", ranks=2, cwd=tmp_path))
    assert found["scored"] == "all 12 samples of folder:other"
    assert found["accuracy"] == right / 12
    (tmp_path / "other" / "line").rename(tmp_path / "other" / "bar")
    refused = launch(*evaluate, cwd=tmp_path)
    assert refused.returncode == 2
    assert "missing: line; unknown: bar" in refused.stderr


@pytest.mark.more
@pytest.mark.parametrize("name", ["solar", "mlp-50-25"])
def test_regressions_learn(tmp_path: Path, name: str) -> None:
    data = "irradiance?samples=600"
    run = ("train", "--network", name, "--data", data, "--epochs", 2, "--run-dir", "run")
    succeed(*run, "--baseline-steps", 0, ranks=2, cwd=tmp_path)
    facts = summary(tmp_path / "run")
    assert facts["test_accuracy"] is None
    losses = metrics(tmp_path / "run")
    first = next(line["loss"] for line in losses if "loss" in line)
    assert facts["test_loss"] < first


@pytest.mark.more
def test_a_run_outlives_its_network_file_and_its_place(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    write_network(get_network("model-small"), mine)
    run = ("train", "--network", "mine.toml", "--data", "digits", "--baseline-steps", 0)
    succeed(*run, "--schedule", "constant", "--steps", 5, "--run-dir", "run", cwd=tmp_path)
    mine.unlink()
    moved = tmp_path / "elsewhere"
    (tmp_path / "run").rename(moved)
    assert json.loads(succeed("evaluate", moved, "--json"))["step"] == 5
    again = ("train", "--run-dir", moved, "--resume", "--steps", 8, "--schedule", "cosine")
    succeed(*again, cwd=tmp_path)
    assert read_toml(moved / "config.toml")["steps"] == 5
    assert Spans.read(moved).items[-1].settings["steps"] == 8
    nowhere = launch("train", "--resume", "--steps", 9)
    assert nowhere.returncode == 2
    assert "--resume names no run" in nowhere.stderr
    wrong = launch("train", "--resume", tmp_path / "elsewher")
    assert wrong.returncode == 2
    assert "elsewhere" in wrong.stderr.splitlines()[-1]
