"""Reports of training runs and comparisons, from run directories with known contents."""

from __future__ import annotations

import json
import math
import os
import random
import re
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import UserError
from dptrain.measure.profile.pop import pop_efficiencies
from dptrain.measure.profile.profile import Parts, Spread, StepParts
from dptrain.report.comparisons.comparison import FILE, Comparison, short_names
from dptrain.report.files import PLOTS, REPORT, write_comparison, write_report
from dptrain.report.runs.run_page import run_page
from dptrain.report.runs.run_record import TrainingRun
from dptrain.runs.records import read_record
from dptrain.scaling.analysis import analyse
from dptrain.training.evaluation.predicted_values import read_values, values_text
from dptrain.training.evaluation.quality import ValueQuality
from tests.tiers import tiered
from tests.unit.report.test_files import HOSTILE, Reader
from tests.unit.scaling.synthetic import Law, make_launches, make_profile, write_study


def spread(median: float, *, width: float = 0.02, n: int = 400) -> Spread:
    low, high = (1 - width) * median, (1 + width) * median
    return Spread(median, low, high, median, n, low, high, 1.2 * median, 1.5 * median)


def write_run(
    folder: Path, *, accuracy: float | None = 0.95, step_ms: float = 2.0, ranks: int = 1,
    epochs: int = 4, ended: bool = True, content: str = "a" * 64, **changes: Any,
) -> Path:  # fmt: skip
    """A run directory without checkpoints: 45 steps an epoch, 360 test samples."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('network = "model0"\n')
    parts = Parts(0.8 * step_ms, 0.05 * step_ms, 0.1 * step_ms, 0.0, 0.05 * step_ms)
    profile = make_profile(Law(), ranks=ranks, batch_size=32)
    summary = {
        "network": "model0", "parameters": 210_998, "data": "digits", "backend": "numba",
        "precision": "fp32", "ranks": ranks, "threads": 1, "batch_size": 32, "seed": 0,
        "steps": 45 * epochs, "stopped": False, "train_loss": 0.2, "test_loss": 0.1,
        "test_accuracy": accuracy, "samples_per_s": 9000.0, "other_cores": 0.0,
        "scaling": {"weak": None, "strong": None, "weak_interval": None, "strong_interval": None},
        "memory": {"parameters": 800_000, "buffers": 3_000_000},
        "step_ms": asdict(spread(step_ms)), "parts": asdict(parts),
        "step_parts": asdict(StepParts(
            {name: spread(value) for name, value in parts.known.items()}, parts, parts, 0.5, 0.5
        )),
        "stages": [asdict(stage) for stage in profile.stages], "energy": None,
        **changes,
    }  # fmt: skip
    job = {"steps": 180, "epoch_steps": 45, "log_every": 10, "optimizer": "sgd",
           "schedule": "cosine", "warmup_steps": 0, "learning_rate": 0.02}  # fmt: skip
    data = {"kind": "digits", "shape": [1, 8, 8], "dtype": "uint8", "train_samples": 1437,
            "test_samples": 360, "content": content, "preprocessing": "b"}  # fmt: skip
    records: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        records += [
            {"step": 45 * epoch - 5, "epoch": epoch - 1 / 9, "loss": 1 / epoch, "step_ms": step_ms,
             "learning_rate": 0.02, "samples_per_s": 9000.0},
            {"step": 45 * epoch, "epoch": epoch, "train_loss": 1 / epoch,
             "train_accuracy": accuracy and 0.9, "validation_loss": 0.9 / epoch,
             "validation_accuracy": accuracy, "learning_rate": 0.02, "samples_per_s": 9000.0},
        ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "spec.json").write_text(json.dumps({"job": job, "data": data, "origins": {}}))
    (folder / "env.json").write_text(json.dumps({"host": "node", "cpu": "a cpu", "cores": 2}))
    if ended:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_run_has_a_headline_with_its_interval_and_learning_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    page = Reader(write_report(run))
    # Wilson's interval of 342 of 360.
    assert "Test accuracy is 95.0% (95% interval 92.2% to 96.8%) after 4 epochs." in page.text
    assert "A step takes 2.00 ms (median 2.00 ms, 95% interval 1.96 to 2.04 ms)." in page.text
    plots = {path.stem for path in (run / PLOTS).glob("*.svg")}
    assert {"accuracy", "loss", "learning-rate", "steps", "parts", "layers"} <= plots


@pytest.mark.more
def test_a_regression_has_no_accuracy(tmp_path: Path) -> None:
    page = Reader(write_report(write_run(tmp_path / "run", accuracy=None)))
    assert "Test loss is 0.100 after 4 epochs; a step takes 2.00 ms" in page.text
    assert "accuracy" not in page.text.partition("Definitions")[0].lower()


@pytest.mark.more
def test_a_regression_has_a_plot_of_its_predictions(tmp_path: Path) -> None:
    results = {"test_mae": 0.5, "test_rmse": 0.75, "test_r2": 0.25}
    run = write_run(tmp_path / "run", accuracy=None, **results)
    values = np.arange(12.0).reshape(6, 2)
    quality = ValueQuality(("value",), values[:, :1], values[:, 1:])
    (run / "predicted.csv").write_text(values_text(quality))
    found = TrainingRun.read(run)
    page = run_page(found)
    assert not any(section.name == "predictions" for section in page.sections)
    drawn = page.lead[0]
    # The results are those of all test samples, not of those that are drawn.
    assert drawn.caption == "MAE 0.500, RMSE 0.750, R² 0.250. On the line, both are equal."
    assert "of 6 samples" in drawn.alt
    two = ValueQuality(("a/b", "b"), values, np.where(values == 11, np.nan, values))
    (run / "predicted.csv").write_text(values_text(two))
    page = run_page(TrainingRun.read(run))
    plots = [page.lead[0], *(p for s in page.sections if s.name == "predictions" for p in s.plots)]
    assert [plot.name for plot in plots if plot.name.startswith("predicted")] == ["predicted-a-b"]
    (run / "predicted.csv").write_text("sample,expected_value\n0,1\n")
    with pytest.raises(UserError, match=r"predicted\.csv is damaged: .*; remove it"):
        TrainingRun.read(run)


@given(
    values=st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(st.floats(), min_size=2 * width, max_size=2 * width), min_size=1, max_size=9
        )
    ),
    most=st.none() | st.integers(1, 9),
    damage=st.none() | st.tuples(st.integers(0, 200), st.sampled_from(["x", "\n", ",", '"', "\0"])),
)
def test_values_in_a_file_are_read_again(tmp_path_factory, values, most, damage) -> None:
    table = np.array(values)
    expected, predicted = np.hsplit(table, 2)
    names = tuple(f"value_{index}" for index in range(expected.shape[1]))
    text = values_text(ValueQuality(names, expected, predicted), most)
    path = tmp_path_factory.mktemp("values") / "predicted.csv"
    assert read_values(path) is None
    if damage is not None:
        at, letter = damage
        text = text[: at % len(text)] + letter + text[at % len(text) + 1 :]
    path.write_text(text, encoding="utf-8")
    if damage is not None:
        with suppress(UserError):
            read_values(path)
        return
    found = read_values(path)
    assert found is not None
    stride = 1 if most is None else -(-len(table) // most)
    assert found.names == names
    np.testing.assert_array_equal(np.hstack([found.expected, found.predicted]), table[::stride])
    assert most is None or len(found.expected) <= most


@pytest.mark.more
def test_a_short_run_has_a_report_without_times(tmp_path: Path) -> None:
    none: dict[str, Any] = {"parts": None, "step_parts": None, "stages": [],
                            "test_loss": None, "test_accuracy": None}  # fmt: skip
    run = write_run(tmp_path / "run", accuracy=None, epochs=1, **none)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "step_ms": None}))
    page = Reader(write_report(run))
    assert "Training ended after 1 epoch, without an evaluation." in page.text
    assert "No step was timed by stage" in page.text
    assert "Training was stopped after 45 of 180 steps." in page.text


@pytest.mark.more
def test_the_scaling_efficiency_of_a_run_has_its_interval(tmp_path: Path) -> None:
    scaling = {"weak": 0.91, "strong": 0.8, "weak_interval": [0.88, 0.94], "strong_interval": None}
    page = Reader(write_report(write_run(tmp_path / "run", ranks=2, scaling=scaling)))
    expected = "weak 91% (95% interval 88% to 94%), strong 80% (too few blocks for an interval)."
    assert expected in page.text
    assert "too few blocks for an interval" in page.text


@pytest.mark.more
def test_a_run_of_several_ranks_has_its_parallel_efficiency(tmp_path: Path) -> None:
    busy = np.random.default_rng(0).uniform(1.0, 1.2, (2, 400))
    pop = pop_efficiencies(busy, busy.max(axis=0) + 0.1, {"conv1": busy / 2})
    run = write_run(tmp_path / "run", ranks=2, pop=asdict(pop))
    page = Reader(write_report(run))
    assert (run / PLOTS / "pop.svg").exists()
    assert "Parallel efficiency (POP)" in page.text
    older = write_run(tmp_path / "older", ranks=2)
    write_report(older)
    assert not (older / PLOTS / "pop.svg").exists()


def test_an_unfinished_run_has_no_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ended=False)
    (run / ".last_checkpoint").write_text("90\n")
    expected = (
        r"run in \S+ has not ended: it has no summary\.json, its last checkpoint is that of step "
        r"90; wait until it ends, or continue it with: dptrain train --resume"
    )
    with pytest.raises(UserError, match=expected):
        write_report(run)
    assert not (run / REPORT).exists()


def test_a_run_that_diverged_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ended=False)
    (run / "failure.json").write_text('{"message": "training diverged: the loss is nan at step 3"}')
    with pytest.raises(UserError, match=r"has no results: training diverged: the loss is nan"):
        write_report(run)


@pytest.mark.parametrize("name", ["summary.json", "spec.json", "env.json"])
def test_a_named_pipe_in_a_run_is_refused(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(UserError, match=f"{name}: it is a named pipe"):
        write_report(run)


@pytest.mark.parametrize("name", ["summary.json", "spec.json", "env.json"])
@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_a_damaged_run_is_refused_in_a_line(tmp_path: Path, name: str, text: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).write_text(text)
    if (name, text) == ("env.json", "{}"):
        write_report(run)  # Every fact about the machine may be missing.
        return
    with pytest.raises(UserError, match=r"make it again$"):
        write_report(run)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "summary.json",
            '"test_accuracy": 0.95',
            '"test_accuracy": "x"',
            "expected 0 to 1",
        ),
        ("summary.json", '"test_accuracy": 0.95', '"test_accuracy": 1.7', "expected 0 to 1"),
        ("metrics.jsonl", '"samples_per_s": 9000.0', '"samples_per_s": "q"', "line 1: samples"),
        ("metrics.jsonl", '"train_accuracy": 0.9', '"train_accuracy": true', "line 2: train_acc"),
        (
            "metrics.jsonl",
            '"validation_accuracy": 0.95',
            '"validation_accuracy": -1',
            "expected 0 to 1",
        ),
        ("summary.json", '"weak": null', '"weak": "x"', r"scaling\.weak is 'x'; expected a number"),
        (
            "summary.json",
            '"weak_interval": null',
            '"weak_interval": [1]',
            r"scaling\.weak_interval is \[1\]; expected a list of 2 values",
        ),
        (
            "summary.json",
            '"weak_interval": null',
            '"weak_interval": [1, true]',
            r"scaling\.weak_interval\.1 is True; expected a number",
        ),
        (
            "summary.json",
            '"scaling": {',
            '"scaling": 5, "x": {',
            "scaling is 5; expected an object",
        ),
        (
            "summary.json",
            '"energy"',
            '"time_to_accuracy": [], "energy"',
            r"time_to_accuracy is \[\]; expected an object",
        ),
        (
            "summary.json",
            '"energy"',
            '"time_to_accuracy": {"requested": 0.9, "reached": 1}, "energy"',
            r"time_to_accuracy\.reached is 1; expected true or false",
        ),
        (
            "summary.json",
            '"step_ms": {"median": 2.0',
            '"step_ms": {"median": "2"',
            r"step_ms\.median is '2'; expected a number",
        ),
        (
            "summary.json",
            '"step_ms": {"median": 2.0, ',
            '"step_ms": {',
            r"step_ms\.median is None; expected a number",
        ),
        ("summary.json", '"stages": [', '"stages": [3, ', r"stages\.0 is 3; expected an object"),
    ],
)
def test_wrong_values_of_a_run_are_refused_in_a_line(
    tmp_path: Path, name: str, old: str, new: str, message: str
) -> None:
    run = write_run(tmp_path / "run")
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))
    with pytest.raises(UserError, match=rf"{message}.*; restore the file or make it again$"):
        write_report(run)


WRONG = (None, -1, 0, 1.5, 10**400, "x", [], {}, True, [[1]], math.nan, math.inf, "Infinity")


FILES = ("summary.json", "spec.json", "env.json", "spans.json")


@pytest.mark.parametrize(("name", "draws"), tiered(
    [(name, draws) for name in FILES for draws in (False, True)], [(name, False) for name in FILES]
))  # fmt: skip
def test_any_wrong_value_is_read_or_refused_in_a_line(
    tmp_path: Path, name: str, draws: bool
) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.toml").touch()
    span = {"first_step": 1, "settings": json.loads((run / "spec.json").read_text())["job"],
            "origins": {}, "config": {}, "digest": "a", "ranks": [{"threads": 1}],
            "environment": {"host": "a"}}  # fmt: skip
    spans = [span, {**span, "first_step": 2, "digest": "b"}]
    (run / "spans.json").write_text(json.dumps({"complete": True, "spans": spans}))
    whole = json.loads((run / name).read_text())
    edits = [(path, value) for path in paths(whole) for value in WRONG]
    for path, value in random.Random(7).sample(edits, min(40 if draws else 120, len(edits))):
        (run / name).write_text(json.dumps(replaced(whole, path, value)))
        assert read_record(run)["run"] == str(run)
        try:
            found = TrainingRun.read(run)
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert not draws or run_page(found).title


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Return the paths of all values within a value of JSON."""
    items = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else ()
    )  # fmt: skip
    return [(key, *rest) for key, part in items for rest in ((), *paths(part))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a value with another part."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_a_run_without_its_curves_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl; restore the file or make it again$"):
        write_report(run)


def test_names_of_a_run_cannot_become_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", network=HOSTILE, data=HOSTILE)
    page = Reader(write_report(run))
    assert not {"script", "img"} & {tag for tag, _ in page.elements}


def test_two_runs_are_compared_with_intervals(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", accuracy=0.90, step_ms=1.0)
    page = Reader(write_comparison([one, two], tmp_path / "out"))
    assert (
        "Test accuracy of two is 90.0%, 5.0 percentage points less than that of one, 95.0% (95% "
        "interval of the difference −9.0 to −1.1)."
    ) in page.text
    assert "Median step of two is 1.00 ms, 50.0% less than that of one, 2.00 ms" in page.text
    assert {
        "validation-accuracy",
        "validation-loss",
        "train-loss",
        "changes",
        "parts",
        "layers",
    } <= {path.stem for path in (tmp_path / "out" / PLOTS).glob("*.svg")}
    record = json.loads((tmp_path / "out" / FILE).read_text())
    assert record["version"] == Comparison.FORM.version
    assert record["names"] == ["one", "two"]
    change = record["quantities"][0]["changes"][1]
    assert change["value"] == pytest.approx(-5.0)


@pytest.mark.more
@pytest.mark.parametrize("step_ms", tiered([0.1, 1.2, 1.27, 1.9, 300.0], [1.27]))
def test_numbers_below_the_axis_of_changes_are_whole(tmp_path: Path, step_ms: float) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", step_ms=step_ms)]
    write_comparison(runs, tmp_path / "out")
    svg = (tmp_path / "out" / PLOTS / "changes.svg").read_text()
    (width,) = re.findall(r'viewBox="0 0 (\d+) ', svg)
    centred = re.findall(r'text-anchor: middle[^>]*" x="([\d.]+)"[^>]*>([−+]?[\d.,]+)<', svg)
    assert "0" in {text for _, text in centred}
    for x, text in centred:
        half = 0.35 * 8.5 * len(text)
        assert half <= float(x) <= float(width) - half, text


@pytest.mark.more
def test_a_difference_that_may_be_chance_is_called_so(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", accuracy=0.94),
            write_run(tmp_path / "c", accuracy=0.5)]  # fmt: skip
    text = Reader(write_comparison(runs, tmp_path / "out")).text
    assert (
        "b 94.0%, 1.0 percentage points less (95% interval of the difference −4.5 to +2.4, so it "
        in text
    )
    assert "c 50.0%, 45.0 percentage points less (95% interval of the difference −50.4 to " in text


@pytest.mark.more
def test_runs_with_other_data_have_no_difference_of_accuracy(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", content="c" * 64)]
    page = Reader(write_comparison(runs, tmp_path / "out"))
    assert "The runs have different data" in page.text
    assert "Median step of b is 2.00 ms" in page.text


@pytest.mark.more
def test_other_minibatches_are_compared_by_throughput(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", batch_size=64)]
    page = Reader(write_comparison(runs, tmp_path / "out"))
    assert "Throughput of a median step of b is 32" in page.text
    assert "100% more than that of a" in page.text


def write_profile(folder: Path, **job: Any) -> Path:
    profile = make_profile(Law(), ranks=2, batch_size=64)
    folder.mkdir()
    replace(profile, job={**profile.job, **job}).write(folder / "profile.json")
    return folder


def test_results_of_different_kinds_are_refused(tmp_path: Path) -> None:
    run, profile = write_run(tmp_path / "run"), write_profile(tmp_path / "profile")
    with pytest.raises(UserError, match=r"run is a training run and \S+profile is a profile;"):
        write_comparison([run, profile], tmp_path / "out")
    inference = write_profile(tmp_path / "inference", task="inference")
    with pytest.raises(UserError, match="one of inference; compare profiles of the same task"):
        write_comparison([profile, inference], tmp_path / "out")
    regression = write_run(tmp_path / "regression", accuracy=None)
    with pytest.raises(UserError, match="has no test accuracy, unlike other runs"):
        write_comparison([run, regression], tmp_path / "out")
    with pytest.raises(UserError, match="occurs twice"):
        write_comparison([run, tmp_path / "." / "run"], tmp_path / "out")
    with pytest.raises(UserError, match="7 results are too many"):
        write_comparison([tmp_path / str(i) for i in range(7)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.more
def test_studies_are_compared_at_common_points(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_study(one, Law(cores=16, noise=0.01), (1, 2, 4))
    write_study(two, Law(cores=16, noise=0.01, beta=4e-6), (1, 4, 8))
    page = Reader(write_comparison([one, two], tmp_path / "out"))
    assert "Weak scaling, 4 ranks: efficiency of two is" in page.text
    record = json.loads((tmp_path / "out" / FILE).read_text())
    names = [quantity["name"] for quantity in record["quantities"]]
    assert names == [
        "weak scaling, 4 ranks: efficiency", "strong scaling, 4 ranks: efficiency",
        "weak scaling, 1 rank: step", "weak scaling, 4 ranks: step",
        "strong scaling, 4 ranks: step",
    ]  # fmt: skip
    three = tmp_path / "three"
    three.mkdir()
    analyse(make_launches(Law(), (3, 6))).write(three / "study.json")
    with pytest.raises(UserError, match="have no point in common"):
        write_comparison([one, three], tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", r"absent does not exist; expected a folder of `dptrain train`"),
        ("file", r"file is a file; expected a folder"),
        ("empty", r"contains no results of these commands"),
        ("losses", r"contains only losses\.json, and a report also needs a profile"),
    ],
)
def test_other_folders_are_refused_in_a_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "losses.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        write_report(tmp_path / name)


def test_names_are_as_short_as_possible() -> None:
    paths = [Path("/a/x/one"), Path("/b/x/one"), Path("/b/x/two")]
    assert short_names(paths[1:]) == ("one", "two")
    assert short_names(paths) == ("a/x/one", "b/x/one", "b/x/two")
