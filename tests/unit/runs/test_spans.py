"""A run that is resumed with other settings is shown with the steps that each setting made."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import dptrain
from dptrain import AfterStep, Dense, Flatten, Network, Trainer
from dptrain.cli.main import cli, run
from dptrain.errors import UserError
from dptrain.report.comparisons.comparison import compare_runs
from dptrain.report.runs.run_page import resume_text, run_page
from dptrain.report.runs.run_plots import accuracy_plot, loss_plot
from dptrain.report.runs.run_record import TrainingRun
from dptrain.report.runs.run_tables import epochs_table, settings_tables, spans_table
from dptrain.runs.citation import citation
from dptrain.runs.comparison import Comparison
from dptrain.runs.names import SPANS as FILE
from dptrain.runs.records import read_record
from dptrain.runs.settings import DIRECTORY_SETTINGS
from dptrain.runs.spans import Span, Spans, value_text
from dptrain.setting_groups import Setting
from dptrain.toml import read_toml
from dptrain.training.persistence.repeating import changing_flags
from dptrain.training.settings import (
    START_SETTINGS,
    USED_WITH,
    GivenSettings,
    load_settings,
    settings,
)
from tests.tiers import tiered

NETWORK = Network((1, 8, 8), [Flatten(), Dense(10)], name="tiny")
COLOURS = ("saturation", "hue")
"""Settings that the images, which have one channel, refuse."""
QUICK = ("learning_rate", "seed", "threads", "clip_norm", "optimizer", "weights", "steps")
"""Settings whose change the quick tier tests."""

OTHERS: dict[str, Any] = {
    "network": "model1", "data": "synthetic", "backend": "numba", "precision": "fp32",
    "optimizer": "adam", "scale_rate": "sqrt", "schedule": "polynomial", "strategy": "central",
    "batch_norm": "rank", "balance": "1", "transport": "host", "best_by": "loss",
    "step_every": 7, "step_at": "1/3", "weights": "other.safetensors", "average_weights": 0.5,
    "momentum": 0.25, "nesterov": True, "patience": 50, "until_accuracy": 0.999, "steps": 30,
    "power": 2.0, "reference_batch": 64, "shards": 4, "keep_checkpoints": 2, "timeout": 200.0,
    "freeze": "dense1.bias", "rate_factor": "dense1=0.5", "class_weights": "balanced",
}  # fmt: skip
"""Other values than those of the run; the rest follows from the types."""

WITH: dict[str, dict[str, Any]] = {
    "steps": {"epochs": None},
    **{name: {other: values[0]} for name, (other, values) in USED_WITH.items() if values},
    "step_factor": {"schedule": "plateau"},
    "randaugment_magnitude": {"randaugment": 1},
}
"""What else must be set."""


def other_value(setting: Setting) -> Any:
    if setting.name in OTHERS:
        return OTHERS[setting.name]
    if setting.type is bool:
        return not setting.default
    if setting.type is int:
        return (setting.default or 0) + 3
    return 0.125


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 epochs of 9 steps whose best parameters are those of its last step."""
    folder = tmp_path_factory.mktemp("spans") / "run"
    with Trainer(
        NETWORK, "digits", run_dir=folder, epochs=2, batch_size=128, learning_rate=0.01,
        momentum=0.9, schedule="constant", backend="reference", precision="fp64", progress=False,
        baseline_steps=0, threads=1, validation=0.2,
    ) as trainer:  # fmt: skip
        trainer.fit()
        assert trainer.summary is not None
        assert trainer.summary["selected_step"] == 18
    return folder


def copy_of(run_dir: Path, folder: Path) -> Path:
    shutil.copytree(run_dir, folder / "run")
    return folder / "run"


def resume(folder: Path, **changed: Any) -> Trainer:
    with Trainer.resume(
        folder, progress=False, **{"epochs": 3, "threads": 1, **changed}
    ) as trainer:
        trainer.fit()
    return trainer


def refusal(folder: Path, **changed: Any) -> str | None:
    """Resume; return the message of an error, or None if the run continued."""
    try:
        resume(folder, **changed)
    except UserError as error:
        return str(error)
    return None


CHANGEABLE = [s for s in settings() if s.name not in (*DIRECTORY_SETTINGS, *START_SETTINGS)]


@pytest.mark.parametrize(
    "setting", tiered(CHANGEABLE, [s for s in CHANGEABLE if s.name in QUICK]), ids=lambda s: s.name
)
def test_every_changed_setting_is_refused_or_recorded(
    setting: Setting, trained: Path, tmp_path: Path
) -> None:
    folder, name = copy_of(trained, tmp_path), setting.name
    before = Spans.read(folder).items[0]
    other, was = other_value(setting), before.settings[name]
    if name in ("backend", "precision"):
        changed = {"backend": "numba", "precision": "fp32"}  # Of another type than the checkpoint.
    else:
        changed = {name: other, **WITH.get(name, {})}
    assert value_text(other) != value_text(was)
    refused = refusal(folder, **changed)
    if refused is not None:
        if name in ("network", "data"):
            assert str(other) in refused or "network's" in refused
        elif name not in ("backend", "shards", "tune", *COLOURS):
            assert value_text(other) in refused
            assert value_text(was) in refused
        assert len(Spans.read(folder).items) == 1
        assert (folder / "config.toml").read_text() == (trained / "config.toml").read_text()
        return
    spans = Spans.read(folder)
    assert [span.first_step for span in spans.items] == [1, 19]
    now = spans.items[1].changes_from(spans.items[0])[name][1]
    assert value_text(now) == value_text(other)
    was = "auto" if name == "transport" else was
    expected = f"{name} {value_text(now)} (so far {value_text(was)})"
    assert expected in spans.resumes()
    assert_shown(folder, trained, name, now, was, expected)


def test_one_rank_changes_no_transport() -> None:
    several = {"ranks": 3, "transport": "shared"}
    for before, now in ((several, {"ranks": 1, "transport": "mpi"}),
                        ({"ranks": 1, "transport": "mpi"}, several)):  # fmt: skip
        config = {"transport": "auto"}
        changes = Span(5, now, config=config).changes_from(Span(1, before, config=config))
        assert list(changes) == ["ranks"]
        chosen = Span(5, now, config={"transport": "nccl"})
        assert list(chosen.changes_from(Span(1, before, config=config))) == ["ranks", "transport"]


def assert_shown(folder: Path, base: Path, name: str, now: Any, was: Any, expected: str) -> None:
    """Check that all five places show a change."""
    record, summary = read_record(folder), json.loads((folder / "summary.json").read_text())
    kept = summary["selected_step"]
    assert record["resumed_after"] == "18"
    assert expected in record["resumed"]
    made = Spans.read(folder).of_step(kept)
    assert made is not None
    if name != "steps":
        assert record[name] == made.settings[name]
    assert summary["spans"][-1]["changed"][name] == now
    assert summary["spans"][summary["selected_span"]]["first_step"] == made.first_step
    comparison = Comparison.of([read_record(base), record])
    assert expected in comparison.resumes[1]
    assert comparison.results["steps"][1] == summary["steps"]
    cited = citation(record)
    assert expected in str(cited["resumed"])
    assert "steps" not in str(cited["date"])
    assert cited["steps"] == summary["steps"]
    config = (folder / "config.toml").read_text()
    assert read_toml(folder / "config.toml") == read_toml(base / "config.toml")
    flag = f"--{name.replace('_', '-')}"
    if name != "threads":
        assert re.search(rf"^#   dptrain train --resume NEW.* {flag}\b", config, re.MULTILINE) or (
            f" --no-{name.replace('_', '-')}" in config
        )
    run = TrainingRun.read(folder)
    assert any(expected in text for text in resume_text(run))
    shown = str(settings_tables(run))
    both = f"{value_text(was)} (steps 1–18), {value_text(now)} (steps 19–{kept})"
    if name != "transport":  # It is mpi before and after, because there is one rank.
        assert (both in shown) == (kept > 18)
    assert expected in str(spans_table(run))
    assert run.timed_steps == f"steps 19–{summary['steps']}"
    compared = compare_runs([TrainingRun.read(base), run])
    assert any(expected in note for note in compared.notes)
    if kept > 18 and name != "transport":
        assert compared.settings[name][1] == both


@pytest.mark.parametrize(
    "setting", tiered(CHANGEABLE, [s for s in CHANGEABLE if s.name == "learning_rate"]),
    ids=lambda s: s.name,
)  # fmt: skip
def test_an_edited_configuration_is_refused_or_recorded(
    setting: Setting, trained: Path, tmp_path: Path
) -> None:
    folder, name = copy_of(trained, tmp_path), setting.name
    if name in ("backend", "precision", "steps", "epochs", "threads", *WITH):
        pytest.skip("needs changes of other settings too")
    other = other_value(setting)
    text = (folder / "config.toml").read_text()
    line = f"{name} = {json.dumps(other)}\n"
    lines = [row for row in text.splitlines(keepends=True) if not row.startswith(f"{name} = ")]
    (folder / "config.toml").write_text("".join([*lines, line]))
    was = Spans.read(folder).items[0].settings[name]
    refused = refusal(folder)
    if refused is not None:
        unnamed = ("network", "data", "shards", "tune", *COLOURS)
        assert name in unnamed or value_text(was) in refused
        return
    was = "auto" if name == "transport" else was
    expected = f"{name} {value_text(other)} (so far {value_text(was)})"
    assert expected in Spans.read(folder).resumes()
    # The file says again with what the run began.
    assert read_toml(folder / "config.toml") == read_toml(trained / "config.toml")


def test_settings_without_a_step_left_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = copy_of(trained, tmp_path)
    with pytest.raises(UserError, match=r"no step left after step 18, so learning_rate 0\.5 "
                       r"\(so far 0\.01\) would have no effect; add --epochs"):  # fmt: skip
        Trainer.resume(folder, progress=False, learning_rate=0.5)
    files = ("config.toml", "spans.json", "spec.json", "env.json", "summary.json")
    with (
        Trainer.resume(folder, progress=False) as same,
        pytest.warns(UserWarning, match="makes no step: 18 of 18 steps are complete"),
    ):
        same.fit()
    assert all((folder / name).read_bytes() == (trained / name).read_bytes() for name in files)


def test_an_edited_network_is_refused_with_both_values(tmp_path: Path) -> None:
    network = Network((1, 8, 8), [Flatten(), dptrain.Dropout(0.4), Dense(10)])
    with Trainer(
        network,
        "digits",
        run_dir=tmp_path / "run",
        steps=2,
        schedule="constant",
        progress=False,
        backend="reference",
    ) as trainer:
        trainer.fit()
    file = tmp_path / "run" / "network.toml"
    file.write_text(file.read_text().replace("0.4", "0.25"))
    with pytest.raises(UserError, match=r"layer 2 rate is 0\.25 \(so far 0\.4\)"):
        Trainer.resume(tmp_path / "run", progress=False, steps=4)


def test_the_kept_parameters_name_their_span(trained: Path, tmp_path: Path) -> None:
    """Parameters that a later span did not improve keep the settings of the earlier one."""
    folder = copy_of(trained, tmp_path)
    resume(folder, learning_rate=1e-9, best_by="accuracy")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["selected_step"], summary["selected_span"]) == (18, 0)
    record = read_record(folder)
    assert (record["learning_rate"], record["selected_step"]) == (0.01, 18)
    assert record["resumed"] == (
        "after step 18 with epochs 3 (so far 2), learning_rate 1e-09 (so far 0.01) "
        "(not in the parameters, those of step 18)"
    )
    assert citation(record)["learning rate"] == 0.01
    checkpoint = json.loads((folder / "best/step-00000018/manifest.json").read_text())
    assert checkpoint["facts"]["spec"]["job"]["learning_rate"] == 0.01
    compared = compare_runs([TrainingRun.read(trained), TrainingRun.read(folder)])
    assert "learning_rate" not in compared.settings
    listed = CliRunner().invoke(cli, ["runs", "list", str(folder)]).output
    assert "was resumed after step 18 with epochs 3 (so far 2), learning_rate 1e-09" in listed


@pytest.mark.more
def test_the_report_says_which_steps_were_timed(trained: Path, tmp_path: Path) -> None:
    folder = copy_of(trained, tmp_path)
    resume(folder, learning_rate=0.02)
    page = run_page(TrainingRun.read(folder))
    assert any("In steps 19–27, a step takes" in text for text in page.text)
    assert sum("steps 19–27" in str(key) for key in page.keys) == 2
    assert "those of the last start" in str(page.sections)


def test_the_report_says_what_means_of_an_interrupted_epoch_contain(
    trained: Path, tmp_path: Path
) -> None:
    interrupted = "of an interrupted epoch are means since the resume"
    note = epochs_table(TrainingRun.read(trained)).note
    assert "time so far" in note
    assert interrupted not in note
    folder = copy_of(trained, tmp_path)
    resume(folder, stop_after=23)
    note = epochs_table(TrainingRun.read(folder)).note
    assert "since the run was started or resumed" in note
    assert interrupted not in note
    resume(folder)
    run = TrainingRun.read(folder)
    assert interrupted in epochs_table(run).note
    assert interrupted in str(accuracy_plot(run).caption)
    assert interrupted in str(loss_plot(run).caption)


@given(epoch_steps=st.integers(1, 12), firsts=st.lists(st.integers(2, 60), max_size=4, unique=True))
def test_means_of_an_epoch_begin_with_the_span_that_interrupted_it(epoch_steps, firsts) -> None:
    spans = Spans(
        tuple(Span(first, {"epoch_steps": epoch_steps}) for first in (1, *sorted(firsts)))
    )
    # The epochs whose last step another span made than the first one.
    made = [id(spans.of_step(step)) for step in range(1, 100)]
    epochs = [made[first : first + epoch_steps] for first in range(0, 72, epoch_steps)]
    assert spans.begin_within_epochs(epoch_steps) == any(len(set(epoch)) > 1 for epoch in epochs)
    run = TrainingRun(Path("run"), {"selected_step": 60}, {}, {}, (), (), spans)
    assert bool(run.interrupted_means) == spans.begin_within_epochs(epoch_steps)


def test_further_epochs_are_repeated_by_commands(tmp_path: Path) -> None:
    """Also if the length of a run changes before it has ended."""
    folder = tmp_path / "run"
    x, y = np.ones((20, 1, 8, 8), np.float32), np.arange(20) % 2
    linear = Network((1, 8, 8), [Flatten(), Dense(2)])
    settings: dict[str, Any] = {"backend": "reference", "progress": False}
    options: dict[str, Any] = {"run_dir": folder, "steps": 2, "schedule": "cosine", **settings}
    with Trainer(linear, (x, y), **options) as trainer:
        trainer.fit()
        with pytest.warns(UserWarning, match=r"makes no step: .*, in Python with fit\(epochs=N\)"):
            trainer.fit()
        trainer.callbacks.insert(
            0, AfterStep(lambda trainer, _: trainer.step == 3 and trainer.stop())
        )
        trainer.fit(epochs=6)
        assert trainer.step == 4
        trainer.callbacks.pop(0)
        trainer.fit(epochs=1)
    commands = re.findall("^#   dptrain (.*)$", (folder / "config.toml").read_text(), re.MULTILINE)
    assert [command.split("NEW")[1] for command in commands] == [
        "", " --steps 8 --stop-after 4", " --steps 5",
    ]  # fmt: skip


def test_a_run_is_repeated_from_its_own_folder(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands in the configuration file make the same parameters, bit for bit."""
    folder = copy_of(trained, tmp_path)
    resume(folder, epochs=None, steps=40, schedule="polynomial", clip_norm=0.5, stop_after=23)
    resume(folder, epochs=None, steps=33, schedule="constant", clip_norm=None, learning_rate=0.03)
    commands = re.findall("^#   (dptrain .*)$", (folder / "config.toml").read_text(), re.MULTILINE)
    assert len(commands) == 3
    assert "--stop-after 23" in commands[1]
    assert "--clip-norm none" in commands[2]
    monkeypatch.chdir(folder)
    codes = [run(command.split()[1:], is_rank_zero=True) for command in commands]
    assert codes == [0, 75, 0]
    first, again = (
        dptrain.load(path, checkpoint=33).parameters for path in (folder, folder / "NEW")
    )
    for name, values in first.items():
        np.testing.assert_array_equal(values, again[name])
    made, repeated = (Spans.read(path).items for path in (folder, folder / "NEW"))
    machine = {"threads": 1, "prefetch": 0, "network": ""}
    assert [{**span.settings, **machine} for span in repeated] == [
        {**span.settings, **machine} for span in made
    ]
    assert [span.first_step for span in repeated] == [1, 19, 24]


def test_a_run_stops_after_the_step_that_was_set(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 9, "learning_rate": 0.01, "progress": False}
    with Trainer(NETWORK, "digits", run_dir=tmp_path / "run", stop_after=4, **options) as part:
        part.fit()
        assert (part.step, part.progress.stopped) == (4, True)
    with pytest.raises(UserError, match="--stop-after is 4, but the run has made 4 steps"):
        Trainer.resume(tmp_path / "run", progress=False, stop_after=4)
    with Trainer.resume(tmp_path / "run", progress=False) as rest:
        rest.fit()
    whole = Trainer(NETWORK, "digits", **options)
    whole.fit()
    for name, values in whole.parameters.items():
        np.testing.assert_array_equal(values, rest.parameters[name])


def test_a_directory_of_an_earlier_version_has_one_span(trained: Path, tmp_path: Path) -> None:
    folder = copy_of(trained, tmp_path)
    (folder / FILE).unlink()
    found = Spans.read(folder)
    assert [span.first_step for span in found.items] == [1]
    assert found.is_complete
    assert read_record(folder)["learning_rate"] == 0.01
    assert "resumed" not in citation(read_record(folder))
    resume(folder, learning_rate=0.02)
    assert "learning_rate 0.02 (so far 0.01)" in Spans.read(folder).resumes()
    assert read_toml(folder / "config.toml")["learning_rate"] == 0.01
    # Such a version resumed the run, and replaced the settings that came before.
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**env, "command": ["dptrain", "--resume"]}))
    (folder / FILE).unlink()
    assert read_record(folder)["resumed"].startswith("by an earlier version of dptrain")


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"spans": 3}', '{"complete": true, "spans": [{}]}',
        '{"complete": true, "spans": [{"first_step": 0, "settings": {}}]}',
    ],
)  # fmt: skip
def test_damaged_spans_are_named(content: str, trained: Path, tmp_path: Path) -> None:
    folder = copy_of(trained, tmp_path)
    (folder / FILE).write_text(content)
    with pytest.raises(UserError, match=r"spans\.json"):
        Trainer.resume(folder, progress=False, epochs=3)
    assert "learning_rate" not in read_record(folder)


# Properties of the data alone.

STARTS = st.lists(
    st.tuples(st.integers(0, 60), st.dictionaries(
        st.sampled_from(["learning_rate", "power", "seed"]), st.sampled_from([0.5, 1.0, 2.0]),
    )), min_size=1, max_size=6,
)  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 90), st.sampled_from([0.5, 1.0, 2.0])),
             min_size=1, max_size=5),
    st.integers(1, 80), st.integers(1, 80),
)  # fmt: skip
def test_results_of_a_resumed_run_are_those_of_its_record(
    tmp_path_factory: pytest.TempPathFactory, starts: Any, steps: int, selected: int
) -> None:
    """The number of completed steps is a result, and `steps` of each span a plan."""
    folder, spans = tmp_path_factory.mktemp("results"), Spans()
    for first, planned, power in sorted(starts):
        first = first if spans.items else 1
        spans = spans.followed_by(Span(first, {"steps": planned, "epoch_steps": 9, "power": power}))
    (folder / FILE).write_text(spans.text())
    selected = min(selected, steps)
    record = {"run": str(folder), "steps": steps, "selected_step": selected, "power": 3.0,
              "started": "2026-11-28", "test_loss": 0.25, "resumed": ""}  # fmt: skip
    made = spans.until(selected).items
    powers = {span.settings["power"] for span in made}
    both = spans.value_text("power", selected) if len(powers) > 1 else 3.0
    cited, compared = citation(record), Comparison.of([record, {**record, "power": 9.0}])
    assert (cited["steps"], cited["test loss"]) == (steps, 0.25)
    assert compared.results["steps"] == (steps, steps)
    assert compared.results["selected_step"] == (selected, selected)
    if len(powers) > 1:
        assert cited["power"] == both
    elif "power" in compared.settings:
        assert compared.settings["power"] == (3.0, 9.0)


def test_a_setting_of_a_later_version_is_no_change(trained: Path, tmp_path: Path) -> None:
    """Unless a user set it."""
    for origins, expected in (({}, ""), ({"sampling": "--sampling"}, "so far none")):
        folder = copy_of(trained, tmp_path / str(len(origins)))
        resume(folder)
        values = json.loads((folder / FILE).read_text())
        del values["spans"][0]["settings"]["sampling"], values["spans"][0]["config"]["sampling"]
        values["spans"][1]["origins"].update(origins)
        (folder / FILE).write_text(json.dumps(values))
        found = Spans.read(folder)
        assert ("sampling" in found.resumes()) is bool(expected)
        assert expected in found.resumes()
        assert found.value_text("sampling").startswith("none (steps" if origins else "shuffle")


def test_the_file_of_an_earlier_run_with_an_unused_setting_starts_it_again(
    trained: Path, tmp_path: Path
) -> None:
    folder = copy_of(trained, tmp_path)
    file = folder / "config.toml"
    expected = load_settings({}, {}, file)
    file.write_text(file.read_text() + "power = 2.0\nrandaugment_magnitude = 5.0\n")
    assert load_settings({}, {}, file) == expected
    own = tmp_path / "own.toml"
    own.write_text(file.read_text())
    with pytest.raises(UserError, match="has no effect"):
        load_settings({}, {}, own)


@given(STARTS, st.integers(1, 12))
def test_each_step_has_the_settings_that_made_it(
    starts: list[tuple[int, dict[str, float]]], steps: int
) -> None:
    """Compare spans with a list of the settings of each step."""
    made: list[dict[str, float]] = []
    spans = Spans()
    for completed, changed in starts:
        base = made[min(completed, len(made)) - 1] if made and completed else {}
        now = {**base, **changed}
        completed = min(completed, len(made))
        spans = spans.followed_by(Span(completed + 1, now, dict.fromkeys(now, "--flag")))
        made = made[:completed] + [now] * steps
    for step, expected in enumerate(made, 1):
        span = spans.of_step(step)
        assert span is not None
        assert span.settings == expected
    parts = spans.merged(len(made))
    assert [number for first, last, _ in parts for number in range(first, last + 1)] == [
        *range(1, len(made) + 1)
    ]
    for name in ("learning_rate", "power"):
        text = spans.value_text(name, len(made))
        values = {value_text(step.get(name)) for step in made}
        assert all(value in text for value in values)
        assert ("(step" in text) == (len(values) > 1)
    again = Spans.of(json.loads(spans.text()))
    assert again.text() == spans.text()


VALUES = {
    "learning_rate": st.sampled_from([0.01, 0.5]), "clip_norm": st.sampled_from([None, 0.5, 2.0]),
    "schedule": st.sampled_from(["constant", "cosine", "step"]),
    "weight_decay": st.sampled_from([None, 0.0, 1e-4]), "epochs": st.sampled_from([None, 3, 4]),
    "optimizer": st.sampled_from(["sgd", "adam"]), "momentum": st.sampled_from([None, 0.0, 0.9]),
    "patience": st.sampled_from([None, 2, 5]), "flip": st.booleans(),
    "step": st.sampled_from([{"step_every": 5}, {"step_at": "1/2"}, {"step_at": "1/3,2/3"}]),
    "bucket_kib": st.sampled_from([None, 64]), "crop": st.integers(0, 2),
    "label_smoothing": st.sampled_from([0.0, 0.1]), "tune": st.booleans(),
}  # fmt: skip


def config_of(chosen: dict[str, Any]) -> dict[str, Any]:
    values = {k: v for k, v in chosen.items() if k != "step" and v is not None}
    if chosen["schedule"] == "step":
        values.update(chosen["step"])
    if chosen["epochs"] is None:
        values["steps"] = 77
    if chosen["optimizer"] != "sgd":
        values.pop("momentum", None)
    return GivenSettings(network="model0", data="digits", **values).with_recipe().to_toml_values()


@given(st.fixed_dictionaries(VALUES), st.fixed_dictionaries(VALUES))
def test_flags_of_a_repeated_run_make_its_settings(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    first, second = config_of(before), config_of(now)
    words, flags = changing_flags(first, second), dict[str, Any]()
    while words:
        word = words.pop(0)
        name = word.removeprefix("--").removeprefix("no-").replace("-", "_")
        is_switch = next(s.type is bool for s in settings() if s.name == name)
        flags[name] = not word.startswith("--no-") if is_switch else words.pop(0)
    merged = load_settings(flags, {}, _file(first))
    expected = GivenSettings(**second).with_recipe()
    assert merged.to_toml_values() == expected.to_toml_values()


def _file(values: dict[str, Any]) -> Path:
    import tempfile

    import tomli_w

    path = Path(tempfile.gettempdir()) / "dptrain-test-spans.toml"
    path.write_text(tomli_w.dumps(values))
    return path
