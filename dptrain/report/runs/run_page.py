"""The page of a training run."""

from __future__ import annotations

from collections.abc import Sequence

from dptrain.measure.machine.energy import Energy, energy_lines
from dptrain.measure.machine.load import BUSY_SHARE
from dptrain.measure.profile.profile import Spread
from dptrain.numbers import fixed, percent, short
from dptrain.records import from_values
from dptrain.report.elements.canvas import Plot
from dptrain.report.elements.definitions import OF_RUNS
from dptrain.report.elements.page import Key, Page, Section, restrictions_section
from dptrain.report.profiles.profile_page import (
    definitions_section,
    environment_section,
    sentence,
    shares,
    step_interval,
    step_sentence,
)
from dptrain.report.runs.quality_plots import confusion_plot, predicted_plots
from dptrain.report.runs.run_plots import (
    accuracy_plot,
    loss_plot,
    rate_plot,
    time_curve,
    time_plots,
)
from dptrain.report.runs.run_record import TrainingRun
from dptrain.report.runs.run_tables import (
    MOST_CLASSES,
    epochs_table,
    incidents_table,
    settings_tables,
    spans_table,
    time_tables,
)
from dptrain.runs.names import SUMMARY
from dptrain.tables import Number
from dptrain.training.evaluation.predicted_values import MOST_ROWS
from dptrain.training.evaluation.quality_tables import classes_table, labels_table
from dptrain.training.evaluation.regression import r2_remark

VALUE_RESULTS = (
    ("test_r2", "Test R²", "1 is perfect, 0 is the mean"),
    ("test_rmse", "Test RMSE", "in the unit of the data"),
)
"""Results of a regression in the summary, with their labels and explanations."""


def run_page(run: TrainingRun) -> Page:
    """Return the report of a training run."""
    notes = tuple(_notes(run))
    curves = [rate_plot(run), *time_curve(run)]
    predicted = _predicted_plots(run)
    first = [accuracy_plot(run)] if run.accuracy is not None else predicted[:1]
    return Page(
        kind="dptrain training run",
        title=f"Training of {run.summary['network']} on {run.summary['data']}",
        about=about_line(run),
        headline=_headline(run),
        lead=(*first, loss_plot(run)),
        text=tuple(_text(run)),
        file=SUMMARY,
        keys=tuple(_keys(run)),
        notes=notes,
        sections=(
            *_classes_section(run),
            *_predictions_section(run, predicted[1:]),
            Section("curves", "Learning curves", plots=tuple(curves), tables=(epochs_table(run),)),
            Section("time", "Time of a step", plots=tuple(time_plots(run)),
                    tables=tuple(time_tables(run)), text=tuple(_time_text(run))),
            *restrictions_section(notes),
            Section("settings", "Settings", text=tuple(resume_text(run)), tables=(
                *((spans_table(run),) if len(run.spans.items) > 1 else ()),
                *((incidents_table(run),) if run.incidents else ()), *settings_tables(run),
            )),
            environment_section(run.environment, [], _environment_text(run)),
            definitions_section(OF_RUNS),
        ),
        closing="Written by dptrain from summary.json, metrics.jsonl and spans.json, which contain "
        "each number in full precision.",
    )  # fmt: skip


def _predicted_plots(run: TrainingRun) -> list[Plot]:
    """Return predicted against expected values of the test data, if they exist."""
    if run.predicted is None:
        return []
    known = {name: run.summary.get(f"test_{name}") for name in ("mae", "rmse", "r2")}
    results = {name: value for name, value in known.items() if value is not None}
    complete = results if {"mae", "rmse"} <= set(results) else run.predicted.results()
    return predicted_plots(run.predicted, complete)


def _predictions_section(run: TrainingRun, plots: Sequence[Plot]) -> list[Section]:
    """Return the section with the outputs after the first one, which the top of the page shows."""
    if run.predicted is None or not plots:
        return []
    left_out = len(run.predicted.names) - len(plots) - 1
    some = "1 more output has" if left_out == 1 else f"{left_out} more outputs have"
    more = f" {some} no plot." if left_out else ""
    text = (f"Test data; of more than {MOST_ROWS:,} samples, evenly spaced ones are drawn.{more}",)
    return [Section("predictions", "Predictions of other outputs", text=text, plots=tuple(plots))]


def _classes_section(run: TrainingRun) -> list[Section]:
    """Return the section with results by class, and images of mistakes, if they exist."""
    images: tuple[tuple[bytes, str], ...] = ()
    if run.mistakes is not None:
        caption = (
            "The most confident mistakes on the test data, as the network sees them: the class, "
            "and the predicted one with its probability."
        )
        images = ((run.mistakes, caption),)
    plots = () if run.classes is None else (confusion_plot(run.classes),)
    tables = () if run.classes is None else (classes_table(run.classes, most=MOST_CLASSES),)
    if run.labels is not None:
        return [Section("labels", "Labels", tables=(labels_table(run.labels, most=MOST_CLASSES),))]
    if not (plots or images):
        return []
    return [Section("classes", "Classes", plots=plots, images=images, tables=tables)]


def about_line(run: TrainingRun) -> str:
    """Return the job in a line: size, backend, parallelism and minibatch."""
    summary, job = run.summary, run.job
    ranks, threads = int(summary["ranks"]), int(summary["threads"])
    each = f"{ranks} rank{'s' * (ranks > 1)} × {threads} thread{'s' * (threads > 1)}"
    if any(
        run.spans.items[-1].value(name) != span.value(name)
        for span in run.spans.items
        for name in ("ranks", "threads")
    ):
        each += f" ({run.timed_steps})"
    return (
        f"{fixed(summary['parameters'], 0)} parameters, {summary['backend']} in "
        f"{summary['precision']}, {each}, minibatch {summary['batch_size']}, {job['optimizer']}, "
        f"seed {summary['seed']}."
    )


def epochs_text(run: TrainingRun) -> str:
    """Return ``8 epochs``, or ``2.4 epochs`` if training ended within an epoch."""
    count = run.num_epochs
    number = fixed(count, 0) if float(count).is_integer() else fixed(count, 1)
    return f"{number} epoch{'s' * (number != '1')}"


def _headline(run: TrainingRun) -> str:
    accuracy, after = run.accuracy, _of_epoch(run)
    labels = run.summary.get("test_label_accuracy")
    if accuracy is not None and labels is not None:
        return (
            f"Of all labels of the test data, {percent(labels)} are correct {after}. All labels of "
            f"a sample are correct for {percent(accuracy.value)} of the samples (95% interval "
            f"{percent(accuracy.low)} to {percent(accuracy.high)})."
        )
    if accuracy is not None:
        return (
            f"Test accuracy is {percent(accuracy.value)} (95% interval {percent(accuracy.low)} to "
            f"{percent(accuracy.high)}) {after}."
        )
    rmse, r2 = run.summary.get("test_rmse"), run.summary.get("test_r2")
    if rmse is not None:
        results = (
            f"RMSE is {short(rmse)}"
            if r2 is None
            else (f"R² is {short(r2)} and RMSE {short(rmse)}")
        )
        return f"Test {results} {after}{r2_remark(r2)}."
    loss = run.summary["test_loss"]
    step = run.step_ms
    first = (
        f"Test loss is {short(loss)} {after}"
        if loss is not None
        else (f"Training ended {after}, without an evaluation")
    )
    timed = f" in {run.timed_steps}" if run.timed_steps else ""
    return f"{first}." if step is None else f"{first}; {step_sentence(f'a step{timed}', step)}."


def _of_epoch(run: TrainingRun) -> str:
    """Return of which epoch the results are, if evaluations selected one, or after how many."""
    if _selection(run) is None:
        return f"after {epochs_text(run)}"
    epoch = run.selected_step / float(run.job["epoch_steps"])
    return f"with the parameters of epoch {epoch:g} of {run.num_epochs:.4g}"


def _selection(run: TrainingRun) -> float | None:
    """Return the result on the validation data that selected the parameters; None if none did."""
    found: float | None = run.summary.get(f"validation_{run.summary.get('selected_by', 'none')}")
    return found


def _text(run: TrainingRun) -> list[str]:
    found = [*_selection_text(run), *resume_text(run)]
    step, parts = run.step_ms, run.step_parts
    if step is not None:
        where = "" if parts is None else f" Of all time, {shares(parts.all_steps)}."
        found.append(f"{_step_text(run, step)}.{where}")
    found += _accuracy_text(run)
    found += _scaling_text(run) if run.summary["scaling"]["weak"] is not None else []
    if limit := run.summary.get("limit"):
        found.append(sentence(limit["text"]))
    return found


def _step_text(run: TrainingRun, step: Spread) -> str:
    """Return the time of a step; with the steps that were timed if the run was resumed."""
    timed = run.timed_steps
    return step_sentence(f"In {timed}, a step" if timed else "A step", step)


def resume_text(run: TrainingRun) -> list[str]:
    """Return after which steps the run was resumed, and what changed."""
    if not run.spans.is_resumed:
        return []
    return [f"The run was resumed {run.spans.resumes(run.selected_step)}."]


def _selection_text(run: TrainingRun) -> list[str]:
    """Return which epoch was selected, and by what."""
    by, value = run.summary.get("selected_by", "none"), _selection(run)
    if value is None:
        return []
    shown = percent(value) if by == "accuracy" else short(value)
    ended = " Training ended because of --patience." if run.summary.get("out_of_patience") else ""
    return [f"This epoch has the best validation {by}, {shown}.{ended}"]


def _accuracy_text(run: TrainingRun) -> list[str]:
    """Return the time to the requested accuracy, if there was one."""
    found = run.summary.get("time_to_accuracy")
    if not found:
        return []
    requested = percent(found["requested"])
    if not found["reached"]:
        return [f"No evaluation reached the requested validation accuracy of {requested}."]
    time = f" in {short(found['time_s'])} s" if found["time_s"] is not None else ""
    return [
        f"The requested validation accuracy of {requested} was reached{time} after "
        f"{short(found['epochs'])} epochs, without evaluations and checkpoints."
    ]


def _scaling_text(run: TrainingRun) -> list[str]:
    if int(run.summary["ranks"]) == 1:
        return []
    scaling = run.summary["scaling"]
    if scaling["weak"] is None:
        why = scaling.get("why") or "scaling efficiency not measured: --baseline-steps is 0"
        return [sentence(why)]
    named = []
    for name in ("weak", "strong"):
        interval = scaling[f"{name}_interval"]
        limits = (
            " (too few blocks for an interval)"
            if interval is None
            else (
                f" (95% interval {percent(interval[0], decimals=0)} to "
                f"{percent(interval[1], decimals=0)})"
            )
        )
        named.append(f"{name} {percent(scaling[name], decimals=0)}{limits}")
    return [f"Scaling efficiency with the same global minibatch: {', '.join(named)}."]


def _keys(run: TrainingRun) -> list[Key]:
    summary, accuracy, step = run.summary, run.accuracy, run.step_ms
    keys = []
    labels = summary.get("test_label_accuracy")
    if labels is not None:
        number = Number(fixed(100 * labels, 1), labels, "test_label_accuracy")
        keys.append(Key("Correct labels", (number, "%"), ("mean of all labels",)))
    if accuracy is not None:
        number = Number(fixed(100 * accuracy.value, 1), accuracy.value, "test_accuracy")
        interval = f"95% interval {percent(accuracy.low)} to {percent(accuracy.high)}"
        name = "Test accuracy" if labels is None else "All labels correct"
        keys.append(Key(name, (number, "%"), (interval,)))
    for name, label, detail in VALUE_RESULTS:
        if (value := summary.get(name)) is not None:
            keys.append(Key(label, (Number(short(value), value, name),), (detail,)))
    for name, label in (("test_loss", "Test loss"), ("train_loss", "Training loss")):
        if summary[name] is not None and len(keys) < 2:
            detail = (
                "of the last epoch"
                if name == "train_loss"
                else (f"mean of {run.num_test_samples} samples")
            )
            keys.append(Key(label, (Number(short(summary[name]), summary[name], name),), (detail,)))
    if step is not None:
        keys.append(
            Key(
                "Step",
                (Number(short(step.mean), step.mean, "step_ms.mean"), " ms"),
                (*step_interval(step, "step_ms"), _timed(run)),
            )
        )
    rate = summary["samples_per_s"]
    if rate is not None:
        keys.append(
            Key(
                "Throughput",
                (Number(fixed(rate, 0), rate, "samples_per_s"),),
                (f"samples/s, with evaluation and checkpoints{_timed(run)}",),
            )
        )
    return keys + _scaling_keys(run)


def _timed(run: TrainingRun) -> str:
    """Return the steps that were timed, after a semicolon; empty if they are all."""
    return f"; {run.timed_steps}" if run.timed_steps else ""


def _scaling_keys(run: TrainingRun) -> list[Key]:
    scaling = run.summary["scaling"]
    keys = []
    for name in ("weak", "strong"):
        value, interval = scaling[name], scaling[f"{name}_interval"]
        if value is None:
            continue
        detail: tuple[Number | str, ...] = ("too few blocks for an interval",)
        if interval is not None:
            low, high = (
                Number(fixed(100 * end, 0), end, f"scaling.{name}_interval.{i}")
                for i, end in enumerate(interval)
            )
            detail = ("95% interval ", low, "% to ", high, "%")
        number = Number(fixed(100 * value, 0), value, f"scaling.{name}")
        keys.append(Key(f"{name.capitalize()} efficiency", (number, "%"), detail))
    return keys


def _notes(run: TrainingRun) -> list[str]:
    found = []
    total = run.planned_steps
    reached = (run.summary.get("time_to_accuracy") or {}).get("reached")
    ended_early = run.summary["steps"] < total and not (
        run.summary.get("out_of_patience") or reached
    )
    if run.summary["stopped"] or ended_early:
        found.append(
            f"Training was stopped after {fixed(run.summary['steps'], 0)} of {fixed(total, 0)} "
            "steps."
        )
    if run.accuracy is not None:
        found.append(
            f"One run: the interval of the accuracy is that of {run.num_test_samples} test "
            "samples. Runs with other seeds have other accuracies."
        )
    others, cores = run.summary.get("other_cores"), run.environment.get("cores") or 1
    if others is not None and others > BUSY_SHARE * cores:
        found.append(
            f"Other programs used {others:.1f} cores of this node during "
            "training, which lengthens steps and intervals."
        )
    if note := run.summary["scaling"].get("note"):
        found.append(sentence(note))
    found.append("Intervals of times describe this launch; dptrain scale compares launches.")
    return found


def _time_text(run: TrainingRun) -> list[str]:
    missing = _scaling_text(run) if run.summary["scaling"]["weak"] is None else []
    if run.step_parts is not None:
        return missing
    return [
        *missing,
        "No step was timed by stage, because the run was too short. `dptrain profile` times as "
        "many steps as requested.",
    ]


def _environment_text(run: TrainingRun) -> tuple[str, ...]:
    """Return the energy, and of which start the environment is."""
    found = run.summary.get("energy")
    energy = tuple(map(sentence, energy_lines(from_values(Energy, found)))) if found else ()
    if run.spans.is_resumed:
        return ("The machine, the versions and the command are those of the last start.", *energy)
    return energy
