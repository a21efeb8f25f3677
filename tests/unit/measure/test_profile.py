"""A profile of a job in this process: its figures, its files, its words."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from docs.tools.reference import expand
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.files import parse_json
from dptrain.measure.profile.profile import Profile, RankProfile, StageProfile
from dptrain.measure.profile.profile_files import claim, csv_text
from dptrain.measure.profile.profile_lines import profile_report
from dptrain.plan.lowering import Phase
from dptrain.training.profiling.profiling import ProfileOptions, profile
from dptrain.training.settings import load_settings
from dptrain.vocabulary import SECTIONS, find_term, vocabulary_table

ROOT = Path(__file__).parents[3]


def measure(backend: str, **options: Any) -> Profile:
    """A profile of a small network."""
    flags = {"network": "model-small", "batch_size": 5, "backend": backend, "threads": 1}
    if backend != "numba":
        flags |= {"network": "mlp-5", "batch_size": 100}
    options = {"steps": 4, "skip": 1, "roofs": False} | options
    record = profile(
        load_settings({**flags, "steps": 1}, {}),
        World.single(),
        ProfileOptions(**options),
        quiet=True,
    )
    assert record is not None
    return record


@pytest.fixture(scope="module")
def measured() -> Profile:
    return measure("numba", steps=300, roofs=True)


@pytest.mark.parametrize("backend", ["numba", "reference", "cuda"])
def test_every_backend_is_measured_by_the_same_code(backend: str) -> None:
    found = measure(backend)
    assert found.steps == found.step_ms.n == len(found.step_times_ms) == 4
    assert found.job["backend"] == backend
    # A mean of the same numbers, added up in another order.
    assert found.parts.total == pytest.approx(found.ranks[0].step_ms, rel=1e-9)
    # One rank has nothing to sum; where sums are calls, making them takes a little.
    assert found.parts.imbalance == 0.0
    assert found.parts.transfer == 0.0 or backend != "cuda"
    stages = sum(stage.typical_ms for stage in found.stages)
    assert stages * (1 + 1e-9) >= found.parts.compute > 0
    assert all(stage.time_ms.n == 4 for stage in found.stages)
    assert all(stage.time_ms.mean > 0 for stage in found.stages if stage.flops)
    assert {stage.phase for stage in found.stages} >= {
        "load", "forward", "loss", "backward_weight", "backward_input", "update",
    }  # fmt: skip
    assert found.sums == ()
    assert found.roofs is None
    assert not unknown_keys(found)


def test_a_step_is_its_parts_and_only_whole_minibatches_count(measured: Profile) -> None:
    # 1,437 digits in minibatches of 5: two are left over, and an epoch has 288 steps.
    assert measured.steps == 300
    assert measured.ranks[0].samples == 5
    assert measured.step_parts.all_steps.total == pytest.approx(measured.step_ms.mean, rel=1e-9)
    stages = sum(stage.typical_ms for stage in measured.stages)
    # Stages contain what their thread lacked of a core, and the part does not.
    most = (1 + 1e-9) * (measured.parts.compute + (measured.parts.without_core or 0.0))
    assert measured.parts.compute <= stages * (1 + 1e-9) <= most * (1 + 1e-9)
    assert measured.samples_per_s == pytest.approx(5e3 / measured.step_ms.mean)
    assert 0 < measured.timing_ms < 0.1 * measured.step_ms.median


def test_roofs_are_what_a_processor_may_do(measured: Profile) -> None:
    roofs = measured.roofs
    assert roofs is not None
    # From a slow virtual machine to a large server, a thread.
    assert 0.1 < roofs.gflops < 1000
    assert 0.1 < roofs.gb_per_s < 1000
    assert [size for size, _ in roofs.copies] == sorted(size for size, _ in roofs.copies)
    shares = [s.roofline_share for s in (*measured.stages, *measured.kinds)]
    text = "\n".join(map(str, profile_report(measured)))
    if measured.shares_withheld:
        assert shares == [None] * len(shares)
        assert measured.shares_withheld in text
        return
    assert all(0 < share <= 1 for share in shares)
    saves = any("Winograd" in stage.note for stage in measured.stages)
    assert ("Winograd's algorithm needs at least" in text) == saves


def test_the_rate_of_older_versions_is_computed_anew(measured: Profile, tmp_path: Path) -> None:
    old = replace(measured, samples_per_s=5e3 / measured.step_ms.median)
    old.write(tmp_path / "profile.json")
    found = Profile.read(tmp_path / "profile.json")
    assert found.samples_per_s == pytest.approx(measured.samples_per_s)


def test_json_gives_back_the_same_profile(measured: Profile, tmp_path: Path) -> None:
    measured.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == measured
    values = json.loads((tmp_path / "profile.json").read_text())
    values["version"] = 99
    (tmp_path / "new.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="version 99"):
        Profile.read(tmp_path / "new.json")
    (tmp_path / "other.json").write_text('{"version": 2, "job": {}}')
    with pytest.raises(UserError, match="is not a profile"):
        Profile.read(tmp_path / "other.json")
    values |= {"version": 2, "stages": []}
    (tmp_path / "empty.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="is not a profile"):
        Profile.read(tmp_path / "empty.json")
    with pytest.raises(UserError, match="cannot read"):
        Profile.read(tmp_path / "none.json")
    replace(measured, step_times_ms=(*measured.step_times_ms, math.nan)).write(tmp_path / "nan")
    with pytest.raises(UserError, match="not finite"):
        Profile.read(tmp_path / "nan")
    replace(measured, job={**measured.job, "ranks": "2"}).write(tmp_path / "ranks")
    with pytest.raises(UserError, match=r"job\.ranks is not a whole number"):
        Profile.read(tmp_path / "ranks")


def test_csv_has_a_line_a_stage_and_all_numbers(measured: Profile) -> None:
    lines = list(csv.DictReader(csv_text([asdict(s) for s in measured.stages]).splitlines()))
    assert [line["name"] for line in lines] == [stage.name for stage in measured.stages]
    for line, stage in zip(lines, measured.stages, strict=True):
        assert float(line["time_ms.median"]) == stage.time_ms.median
        assert float(line["flops"]) == stage.flops


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal_and_name_every_layer(measured: Profile, width: int) -> None:
    from rich.console import Console

    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as capture:
        for part in profile_report(measured):
            console.print(part, soft_wrap=isinstance(part, str))
    text = capture.get()
    for group in {stage.group for stage in measured.stages}:
        # A long name may be cut, a number never.
        assert group[:10] in text
    table = [line for line in text.splitlines() if "│" not in line and ":" not in line]
    assert all(len(line) <= width for line in table)
    assert not re.search(r"\s[\d.,]+…", text)


# Words.


def keys(value: Any, *path: str) -> set[tuple[str, ...]]:
    """Every path of keys below a value of JSON; what lies in lists has no number."""
    if isinstance(value, list):
        return set().union(*(keys(item, *path) for item in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    found = {(*path, key) for key in value}
    return found.union(*(keys(item, *path, key) for key, item in value.items()))


def unknown_keys(found: Profile) -> set[tuple[str, ...]]:
    """Of its file, those that the vocabulary lacks; env.json's are its own."""
    values = parse_json(found.text())
    del values["environment"]
    return {path for path in keys(values) if find_term(*path) is None}


def test_every_key_of_a_profile_is_in_the_vocabulary(measured: Profile) -> None:
    assert not unknown_keys(measured)
    columns = set(csv_text([asdict(s) for s in measured.kinds]).splitlines()[0].split(","))
    columns |= set(csv_text([asdict(r) for r in measured.ranks]).splitlines()[0].split(","))
    assert all(find_term(*column.split(".")) for column in columns)
    for record in (StageProfile, RankProfile):
        assert all(find_term(field.name) for field in fields(record))
    assert all(find_term(phase.value) for phase in Phase)
    assert find_term("step_time") is None


def test_the_documentation_shows_the_vocabulary() -> None:
    text = expand((ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8"))
    for title in SECTIONS:
        assert f"### {title}\n\n{vocabulary_table(title)}\n" in text
    names = [word.name for words in SECTIONS.values() for word in words]
    assert len(names) == len(set(names)), "a name that means two things"


# Mistakes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps is 0"),
        ({"skip": -1}, "--skip is -1"),
        ({"trace": True}, "--trace writes a file"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ProfileOptions(**options)


def test_a_trace_that_no_viewer_opens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dptrain.training.profiling.profiling.MOST_TRACE_BYTES", 1000)
    with pytest.raises(UserError, match="try fewer --steps"):
        measure("reference", output=tmp_path / "p", trace=True)
    assert not list((tmp_path / "p").iterdir())


def test_a_profile_is_never_overwritten(tmp_path: Path) -> None:
    measure("reference", output=tmp_path / "p")
    assert {path.name for path in (tmp_path / "p").iterdir()} == {
        "profile.json", "profile.csv", "kinds.csv", "ranks.csv",
    }  # fmt: skip
    (tmp_path / "other").mkdir()
    (tmp_path / "other/kinds.csv").write_text("of something else")
    with pytest.raises(UserError, match=r"kinds\.csv exists without a profile\.json"):
        claim(tmp_path / "other")
    with pytest.raises(UserError, match="contains a profile"):
        measure("reference", output=tmp_path / "p")
