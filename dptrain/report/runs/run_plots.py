"""The plots of a training run: learning curves, steps, parts and layers."""

from __future__ import annotations

from collections.abc import Sequence

from dptrain.numbers import percent, short
from dptrain.report.elements.bars import parts_bars, pop_bars, pop_plot
from dptrain.report.elements.canvas import Plot
from dptrain.report.elements.curves import Curve, curves_plot, steps_plot
from dptrain.report.profiles.profile_plots import layers_plot
from dptrain.report.runs.run_record import TrainingRun, step_column


def accuracy_plot(run: TrainingRun) -> Plot:
    """Return the accuracy on training and validation data by epoch."""
    train, validation = run.column("train_accuracy"), run.column("validation_accuracy")
    curves = [
        Curve("training data", train[0], [100 * y for y in train[1]], "sky"),
        Curve("validation data", validation[0], [100 * y for y in validation[1]], "blue"),
    ]
    return curves_plot(
        "accuracy",
        "Accuracy by epoch",
        "accuracy, %",
        curves,
        x="epoch",
        log=False,
        top=100,
        caption=f"{'Validation data: after each epoch. ' if validation[1] else ''}Training data: "
        "mean over the epoch, before each update, with augmentation and dropout."
        f"{run.interrupted_means}",
        alt=f"Training accuracy by epoch: {_listed(train[1])}. Validation accuracy: "
        f"{_listed(validation[1]) or 'not measured'}.",
    )


def loss_plot(run: TrainingRun) -> Plot:
    """Return the loss of single minibatches, epochs and the validation data."""
    single = step_column(run, "loss")
    train, validation = run.column("train_loss"), run.column("validation_loss")
    curves = [
        Curve("minibatch", *single, "grey", "."),
        Curve("training data", *train, "sky"),
        Curve("validation data", *validation, "blue"),
    ]
    every = run.job["log_every"]
    which = "each" if every == 1 else f"every {every}th"
    after = ", and over the validation data after it" if validation[1] else ""
    return curves_plot(
        "loss",
        "Loss by epoch",
        "loss",
        curves,
        x="epoch",
        caption=f"Points are minibatches, {which} one. Lines are means over an epoch{after}."
        f"{run.interrupted_means}",
        alt=f"Training loss by epoch: {', '.join(map(short, _some(train[1])))}.",
    )


def time_curve(run: TrainingRun) -> list[Plot]:
    """Return the validation accuracy, or loss, by training time; none if it is not known."""
    seconds = run.seconds()
    name, scale, noun = (
        ("validation_accuracy", 100, "accuracy")
        if run.accuracy is not None
        else ("validation_loss", 1, "loss")
    )
    if seconds is None:
        return []
    pairs = [(s, scale * r[name]) for s, r in zip(seconds, run.epochs, strict=True) if r[name]]
    if len(pairs) < 2:
        return []
    curve = Curve("validation data", [x for x, _ in pairs], [y for _, y in pairs], "blue")
    return [
        curves_plot(
            f"{noun}-by-time",
            f"Validation {noun} by time",
            noun + (", %" if scale == 100 else ""),
            [curve],
            x="training time, s",
            top=100 if scale == 100 else None,
            log=False if scale == 100 else None,
            caption="Time of all steps so far with evaluations and checkpoints, without the start.",
            alt=f"Validation {noun} from {short(pairs[0][1])} after {short(pairs[0][0])} s to "
            f"{short(pairs[-1][1])} after {short(pairs[-1][0])} s.",
        )
    ]


def rate_plot(run: TrainingRun) -> Plot:
    """Return the learning rate by epoch."""
    found = step_column(run, "learning_rate")
    schedule = run.spans.value_text("schedule", int(run.summary["steps"]))
    steps = run.job["warmup_steps"]
    warmup = f" with {steps} steps of warm-up" if steps else ""
    return curves_plot(
        "learning-rate",
        "Learning rate",
        "learning rate",
        [Curve("learning rate", *found, "ink")],
        x="epoch",
        log=False,
        bottom=0.0,
        caption=f"Schedule: {schedule}{warmup}. Optimizer: {run.setting('optimizer')}.",
        alt=f"Learning rate by epoch, at most {short(max(found[1], default=0.0))}.",
    )


def time_plots(run: TrainingRun) -> list[Plot]:
    """Return the plots of the time of a step, as far as it was measured."""
    plots = []
    parts, step = run.step_parts, run.step_ms
    if parts is not None:
        plots.append(
            parts_bars(
                "parts",
                "Where the time of training goes",
                parts.all_steps,
                caption="Means of all steps, with the slow ones, checkpoints and evaluations.",
                unit="ms per step",
            )
        )
    if run.pop is not None:
        plots.append(pop_plot("pop", "Parallel efficiency", {"": pop_bars(run.pop)}))
    if run.stages:
        plots.append(layers_plot("layers", "Layers", run.stages))
    times = [(r["step"], r["step_ms"]) for r in run.steps if r["step_ms"]]
    if step is not None and len(times) > 2:
        interval = None if step.low is None or step.high is None else (step.low, step.high)
        band = " and its 95% interval" if interval is not None else ""
        plots.append(
            steps_plot(
                "steps",
                "Steps",
                [step for step, _ in times],
                [ms for _, ms in times],
                median=step.median,
                interval=interval,
                caption=f"Points are single steps of rank 0. The line is the median of {step.n} "
                f"steps, mean over ranks{band}.",
            )
        )
    return plots


def _listed(shares: Sequence[float]) -> str:
    return ", ".join(percent(value) for value in _some(shares))


def _some(values: Sequence[float], most: int = 12) -> list[float]:
    """Return at most `most` values at equal distances, with the last one."""
    stride = -(-len(values) // most) or 1
    return list(values[::-1][::stride][::-1])
