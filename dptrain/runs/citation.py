"""What a text needs to cite a run, so that others can repeat it."""

from __future__ import annotations

from pathlib import Path

from dptrain.runs.records import Record, read_spans
from dptrain.runs.spans import Spans

NAMES = {
    "run": "run",
    "started": "date",
    "resumed": "resumed",
    "version": "dptrain",
    "commit": "commit",
    "network": "network",
    "parameters": "parameters",
    "data": "data",
    "data_digest": "SHA-256 of the data",
    "seed": "seed",
    "backend": "backend",
    "precision": "precision",
    "ranks": "ranks",
    "threads": "threads of a rank",
    "batch_size": "global minibatch",
    "optimizer": "optimizer",
    "learning_rate": "learning rate",
    "schedule": "schedule",
    "steps": "steps",
    "selected_step": "step of the parameters",
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "cpu": "processor",
    "digest": "SHA-256 of the specification",
}
"""Values of a record that a citation contains, with their names in texts."""

RESULTS = ("steps", "selected_step", "test_accuracy", "test_loss")
"""Values that follow the settings. `steps` is the number of completed steps, no setting."""

DERIVED = ("recipe", "network")
"""Origins of settings that follow from the network, which a citation names."""


def citation(record: Record) -> dict[str, object]:
    """Return the values of a run that a text should state, by name; unknown ones are left out.

    They include every setting that is neither a default nor from the recipe of the network. A
    setting that changed when the run was resumed has each value with the steps that it made, up to
    the step of the kept parameters.
    """
    spans, selected = read_spans(Path(str(record["run"]))), record.get("selected_step")
    made = spans if selected is None else spans.until(selected)
    values = {name: _value(record, made, name, selected) for name in (*NAMES, *_set_names(spans))}
    order = [name for name in values if name not in (*RESULTS, "cpu", "digest")]
    return {
        NAMES.get(name, name.replace("_", " ")): values[name]
        for name in (*order, *RESULTS, "cpu", "digest")
        if values[name] not in (None, "")
    }


def _set_names(spans: Spans) -> list[str]:
    """Return the names of the settings that a user set, or that changed on a resume."""
    names: dict[str, None] = {}
    for index, span in enumerate(spans.items):
        names.update(
            dict.fromkeys(
                name
                for name, origin in span.origins.items()
                if origin not in DERIVED and name in span.settings
            )
        )
        if index:
            names.update(dict.fromkeys(span.changes_from(spans.items[index - 1])))
    return [name for name in names if name not in NAMES]


def _value(record: Record, made: Spans, name: str, selected: int | None) -> object:
    is_setting = name not in ("started", *RESULTS)
    if is_setting and len({str(span.value(name)) for span in made.items}) > 1:
        return made.value_text(name, selected)
    return record.get(name)
