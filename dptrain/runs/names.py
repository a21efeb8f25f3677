"""The names of the files in a run directory."""

from __future__ import annotations

CONFIG, NETWORK = "config.toml", "network.toml"
SPECIFICATION, ENVIRONMENT, SUMMARY, SPANS = "spec.json", "env.json", "summary.json", "spans.json"
FAILURE = "failure.json"
"""Why a run has no results: ``message``, in one line."""
INCIDENTS = "incidents.json"
LOCK, SUPERVISOR = ".lock", ".supervisor"
