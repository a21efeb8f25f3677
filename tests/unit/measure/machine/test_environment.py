"""What `env.json` records, and the cores and memory that a container leaves."""

import re
import sys
from pathlib import Path

import pytest

from dptrain.files import dump_json, parse_json
from dptrain.measure.machine import environment as module
from dptrain.measure.machine.environment import environment


def test_it_is_json_and_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dptrain", "train", "--seed", "3"])
    facts = environment()
    assert parse_json(dump_json(facts)) == facts
    assert facts["command"] == ["dptrain", "train", "--seed", "3"]
    assert facts["versions"]["numpy"] == sys.modules["numpy"].__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", facts["started"])
    assert (facts["rank"], facts["size"]) == (0, 1)


def test_every_dependency_is_recorded() -> None:
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert dependencies
    assert set(re.findall(r'"([\w-]+)', dependencies[1])) <= set(module.PACKAGES)


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JWT", "abc")
    monkeypatch.setenv("DPTRAIN_API_TOKEN", "abc")
    monkeypatch.setenv("HOME_ADDRESS", "abc")
    variables = environment()["variables"]
    assert variables["SLURM_JOB_ID"] == "17"
    assert "abc" not in variables.values()
