"""A scaling study of ranks that are really started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dptrain.measure.profile.profile import Profile
from dptrain.scaling.study import Study
from tests.system.launch import launch, succeed

pytestmark = pytest.mark.more

STUDY = (
    "scale", "--network", "model-small", "--ranks", "1,2", "--scaling", "weak", "--launches", "2",
    "--steps", "6",
)  # fmt: skip


def test_a_study_of_one_and_two_ranks(tmp_path: Path) -> None:
    text = succeed(*STUDY, "--output", tmp_path / "study", cwd=tmp_path)
    assert "4 launches, about" in text
    study = Study.read(tmp_path / "study/study.json")
    assert [(p.ranks, p.batch_size, len(p.launches)) for p in study.points] == [
        (1, 32, 2), (2, 64, 2),
    ]  # fmt: skip
    for point in study.points:
        profiles = [
            Profile.read(tmp_path / "study" / launch.folder / "profile.json")
            for launch in point.launches
        ]
        assert all(profile.job["ranks"] == point.ranks for profile in profiles)
        assert all(profile.steps == 6 for profile in profiles)
        low, high = sorted(profile.step_ms.mean for profile in profiles)
        assert low <= point.step_ms.value <= high
        added = point.ideal.total + point.loss.total
        assert abs(added - point.step_ms.value) < 1e-6 * added
    # On a busy machine, the known losses are not recovered.
    losses = "ideal step + loss by part", "the table of losses is withheld"
    assert text.index("Weak scaling") < max(text.find(each) for each in losses)
    page = (tmp_path / "study/report.html").read_text(encoding="utf-8")
    assert all(f'id="plot-{name}-weak"' in page for name in ("efficiency", "parts", "timeline"))
    # All is there, so nothing is launched again.
    again = json.loads(succeed("scale", "--output", tmp_path / "study", "--json", cwd=tmp_path))
    assert again == json.loads((tmp_path / "study/study.json").read_text())


def test_a_study_whose_ranks_cannot_start_says_why_once(tmp_path: Path) -> None:
    done = launch(*STUDY, "--data", "npz:missing.npz", "--output", "study", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.count("missing.npz") + done.stderr.count("missing.npz") >= 1
    causes = [line for line in done.stderr.splitlines() if line.startswith("dptrain: ")]
    assert len(causes) == 1
    assert "missing.npz does not exist" in causes[0]
    assert not (tmp_path / "study").exists()
    assert "Traceback" not in done.stdout + done.stderr
