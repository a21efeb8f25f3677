"""The JSON files of a run directory: their names, and the values that readers of them need.

A file that lacks a value, or has one of another type, is refused in one line where it is read, so
that what reads it further on can rely on the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptrain.forms import (
    BOOLEAN,
    COUNT,
    NUMBER,
    PAIR,
    POSITIVE,
    SCALAR,
    SHARE,
    TEXT,
    Form,
    Optional,
    form_of,
    read_object,
)
from dptrain.measure.profile.pop import Pop
from dptrain.measure.profile.profile import Spread, StageProfile, StepParts
from dptrain.runs.names import ENVIRONMENT, FAILURE, SPANS, SPECIFICATION, SUMMARY

SETTINGS: Form = {"steps": POSITIVE, "epoch_steps": POSITIVE, ...: Optional(SCALAR)}

TEXTS: Form = {...: Optional(TEXT)}

RANKS: Form = [{...: Optional(SCALAR)}]

FORMS: Mapping[str, Form] = {
    FAILURE: {"message": TEXT},
    SPECIFICATION: {
        "version": Optional(TEXT), "digest": Optional(TEXT), "job": SETTINGS,
        "data": {"train_samples": POSITIVE, "test_samples": COUNT},
        "ranks": Optional(RANKS), "origins": Optional(TEXTS),
    },
    ENVIRONMENT: {
        **dict.fromkeys(("started", "host", "cpu", "commit"), Optional(TEXT)),
        "command": Optional([TEXT]), "cores": Optional(POSITIVE), "versions": Optional(TEXTS),
    },
    SPANS: {"complete": BOOLEAN, "spans": [{
        "first_step": POSITIVE, "settings": SETTINGS, "origins": Optional(TEXTS),
        "config": {...: Optional(SCALAR)}, "digest": Optional(TEXT), "ranks": RANKS,
        "environment": {"command": Optional([TEXT]), ...: Optional(TEXT)},
    }]},
    SUMMARY: {
        **dict.fromkeys(("network", "data", "backend", "precision"), TEXT),
        **dict.fromkeys(("ranks", "threads", "batch_size"), POSITIVE),
        **dict.fromkeys(("parameters", "seed", "steps"), COUNT),
        **dict.fromkeys(("test_accuracy", "validation_accuracy"), Optional(SHARE)),
        **dict.fromkeys((
            "train_loss", "validation_loss", "test_loss", "test_mae", "test_rmse", "test_r2",
            "samples_per_s", "other_cores",
        ), Optional(NUMBER)),
        "digest": Optional(TEXT), "stopped": BOOLEAN, "out_of_patience": Optional(BOOLEAN),
        "selected_step": Optional(COUNT), "selected_by": Optional(TEXT),
        "timed_steps": Optional((COUNT, COUNT)),
        "memory": Optional({...: NUMBER}),
        "scaling": {
            "weak": Optional(NUMBER), "strong": Optional(NUMBER),
            "weak_interval": Optional(PAIR), "strong_interval": Optional(PAIR),
            "why": Optional(TEXT), "note": Optional(TEXT),
        },
        "time_to_accuracy": Optional({
            "requested": NUMBER, "reached": BOOLEAN,
            "epochs": Optional(NUMBER), "time_s": Optional(NUMBER),
        }),
        "limit": Optional({"text": TEXT}),
        "step_ms": Optional(form_of(Spread)),
        "step_parts": Optional(form_of(StepParts)),
        "stages": [form_of(StageProfile)],
        "pop": Optional(form_of(Pop)),
    },
}  # fmt: skip


def read_file(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a file of a run directory.

    Args:
        folder: the run directory.
        name: a key of `FORMS`.

    Raises:
        UserError: the file is missing or damaged.
    """
    return read_object(folder / name, FORMS[name])
