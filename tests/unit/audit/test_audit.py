"""The noise that is fitted to launches, and the audit of a study with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dptrain.audit.fit import fit_noise
from dptrain.audit.noise import NOISES, Noise
from dptrain.audit.study import AUDIT, Audit, audit_study
from dptrain.cli.main import cli
from dptrain.errors import UserError
from dptrain.measure.profile.analysis import spread
from dptrain.measure.profile.profile import Profile
from dptrain.report.files import write_report
from dptrain.scaling.analysis import analyse
from tests.unit.scaling.synthetic import Law, make_launches


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write reports of tables and text alone, which takes a third of the time."""
    monkeypatch.setattr("dptrain.report.studies.study_page.study_plots", lambda study: [])
    monkeypatch.setattr("dptrain.report.profiles.profile_page.profile_plots", lambda *_, **__: [])


def launches_of(noise: Noise, ranks: int, launches: int = 10) -> list[np.ndarray]:
    random = np.random.default_rng(4)
    factors = noise.launches(random, 1, launches)[0]
    return list(noise.job(random, launches, ranks, 400) * factors[:, None])


def mean_of(noise: Noise, ranks: int) -> float:
    return float(noise.job(np.random.default_rng(0), 50, ranks, 1000).mean())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", ["independent", "AR 0.8", "bursts", "slow launches"])
def test_simulated_noise_is_recovered(name: str, ranks: int) -> None:
    noise = NOISES[name]
    found = fit_noise(launches_of(noise, ranks), ranks)
    assert found.spread == pytest.approx(noise.spread, rel=0.4)
    assert found.correlation == pytest.approx(noise.correlation, abs=0.15)
    assert found.burst_share == pytest.approx(noise.burst_share, rel=0.5)
    if noise.burst_share:
        assert found.burst_steps == pytest.approx(noise.burst_steps, rel=0.5)
    assert mean_of(found, ranks) == pytest.approx(mean_of(noise, ranks), rel=0.1)


def test_slow_launches_and_heavy_tails_are_recovered() -> None:
    slow = fit_noise(launches_of(Noise(slow_share=0.3), 4), 4)
    assert 0.1 <= slow.slow_share <= 0.5
    assert slow.slow_factor == pytest.approx(1.5, rel=0.1)
    heavy = fit_noise(launches_of(NOISES["Pareto(1.5) lateness"], 4), 4)
    assert heavy.tail == pytest.approx(1.5, abs=0.3)
    assert heavy.burst_share == 0


def write_study(folder: Path, noise: Callable[[int], Noise], launches: int = 5) -> None:
    """Write a study of one and two ranks whose steps have this noise, by the number of ranks."""
    random, found = np.random.default_rng(0), []
    for measured in make_launches(Law(), (1, 2), launches=launches):
        profile = measured.profile
        ranks = int(profile.job["ranks"])
        own = noise(ranks)
        steps = profile.step_ms.mean * own.job(random, 1, ranks, 50)[0]
        steps *= own.launches(random, 1, 1)[0, 0]
        found.append(replace(measured, profile=with_steps(profile, steps)))
        (folder / measured.folder).mkdir(parents=True)
        found[-1].profile.write(folder / measured.folder / "profile.json")
    analyse(found, commands={m.folder: "mpirun dptrain profile" for m in found}).write(
        folder / "study.json"
    )


def with_steps(profile: Profile, steps: np.ndarray) -> Profile:
    factor = float(steps.mean()) / profile.parts.total
    parts = profile.parts.times(factor)
    return replace(
        profile, steps=len(steps), step_ms=spread(steps), step_times_ms=tuple(steps.tolist()),
        parts=parts, step_parts=replace(profile.step_parts, typical=parts, all_steps=parts),
    )  # fmt: skip


def test_an_audit_of_calm_noise_finds_nothing(tmp_path: Path) -> None:
    write_study(tmp_path, lambda ranks: Noise())
    found = audit_study(tmp_path, replications=100)
    assert not found.weak
    assert "each of 5 intervals contains the truth in 90%" in found.sentence()
    # The base of weak and of strong scaling is the same.
    assert [i.point for i in found.intervals if i.name == "step_ms"] == [
        "weak-r1-t1", "weak-r2-t1", "strong-r2-t1",
    ]  # fmt: skip


def test_the_command_marks_intervals_that_fail(tmp_path: Path) -> None:
    write_study(tmp_path, lambda ranks: Noise(late=0.3 * (ranks > 1), tail=1.15))
    command = ["audit", str(tmp_path), "--replications", "100"]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert result.exit_code == 0
    found = Audit.read(tmp_path / AUDIT)
    weak = {(i.point, i.name) for i in found.weak}
    assert "step_ms" in {name for _, name in weak}
    assert "below 90%" in result.stdout
    assert found.sentence() in result.stdout
    page = (tmp_path / "report.html").read_text()
    assert page.count(found.sentence()) >= 2
    assert "Coverage of the intervals" in page
    assert "* contains the truth in less than 90%" in page
    assert page.count(" *<") + page.count("> *") >= 2


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small study with its audit, which tests copy."""
    folder = tmp_path_factory.mktemp("audited")
    write_study(folder, lambda ranks: Noise(), launches=3)
    audit_study(folder, replications=100).write(folder / AUDIT)
    return folder


@pytest.mark.parametrize("number", [3, 4])
def test_a_report_does_not_show_an_audit_of_other_launches(
    audited: Path, tmp_path: Path, number: int
) -> None:
    shutil.copytree(audited, tmp_path, dirs_exist_ok=True)
    found = make_launches(Law(noise=0.02), (1, 2), launches=number)
    analyse(found, commands={}).write(tmp_path / "study.json")
    page = write_report(tmp_path).read_text()
    assert "run dptrain audit again" in page
    assert "Coverage of the intervals" not in page


@pytest.mark.parametrize("change", [('"version": ', '"version": 9'), ("{", "")])
def test_a_report_is_written_without_an_audit_that_cannot_be_read(
    audited: Path, tmp_path: Path, change: tuple[str, str]
) -> None:
    shutil.copytree(audited, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / AUDIT).read_text()
    (tmp_path / AUDIT).write_text(text.replace(*change, 1))
    page = write_report(tmp_path).read_text()
    assert "The page lacks the audit of the intervals" in page
    assert "Coverage of the intervals" not in page


def test_a_study_of_two_launches_has_no_intervals(tmp_path: Path) -> None:
    write_study(tmp_path, lambda ranks: Noise(), launches=2)
    found = audit_study(tmp_path, replications=100)
    assert found.intervals == ()
    assert "no intervals, because no point has three launches" in found.sentence()
    result = CliRunner().invoke(cli, ["audit", str(tmp_path)], catch_exceptions=False)
    assert found.sentence() in result.stdout
    as_json = CliRunner().invoke(cli, ["audit", str(tmp_path), "--json"], catch_exceptions=False)
    assert as_json.stdout.strip() == (tmp_path / AUDIT).read_text().strip()


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no study"):
        audit_study(tmp_path, replications=100)
    write_study(tmp_path, lambda ranks: Noise())
    (tmp_path / "launches/weak-r2-t1-3/profile.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*restore it, or collect the study again"):
        audit_study(tmp_path, replications=100)


def test_measured_launches_are_not_changed() -> None:
    launches = launches_of(Noise(burst_share=0.1), 2)
    copies = [steps.copy() for steps in launches]
    fit_noise(launches, 2)
    assert all(np.array_equal(a, b) for a, b in zip(launches, copies, strict=True))
