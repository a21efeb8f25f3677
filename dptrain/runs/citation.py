"""What a text needs to cite a run, so that others can repeat it."""

from __future__ import annotations

from dptrain.runs.records import Record

NAMES = {
    "run": "run",
    "started": "date",
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
    "steps": "steps",
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "cpu": "processor",
    "digest": "SHA-256 of the specification",
}
"""Values of a record that a citation contains, with their names in texts."""


def citation(record: Record) -> dict[str, object]:
    """Return the values of a run that a text should state, by name; unknown ones are left out."""
    return {NAMES[name]: record[name] for name in NAMES if record.get(name) is not None}
