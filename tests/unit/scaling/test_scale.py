"""`dptrain scale` from its command to its files, with a launcher that starts no ranks."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dptrain.cli.main import run
from dptrain.report.files import REPORT, write_report
from dptrain.scaling.design import Design
from dptrain.scaling.display import time_text
from dptrain.scaling.points import Measured
from dptrain.scaling.scale import _widest
from dptrain.scaling.study import Study
from tests.unit.scaling.synthetic import Law, make_profile

ROOT = Path(__file__).parents[3]
FAKE = str(Path(__file__).with_name("fake_launcher.py"))
LAUNCHER = shlex.join([sys.executable, "-I", "-S", FAKE])


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the launcher leaves."""
    folder = tmp_path_factory.mktemp("profiles")
    for ranks, batch_size in ((1, 16), (1, 32), (2, 32), (2, 64)):
        profile = make_profile(Law(), ranks=ranks, batch_size=batch_size)
        profile.write(folder / f"r{ranks}-b{batch_size}.json")
    return folder


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profiles: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("DPTRAIN_", "FAKE_", "PMI_", "OMPI_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_PROFILES", str(profiles))
    # A second each, and nothing here looks at it but the first test.
    monkeypatch.setattr("dptrain.report.files.write_report", lambda folder: None)
    monkeypatch.chdir(tmp_path)


def scale(*arguments: str) -> int:
    small = ("--ranks", "1,2", "--launches", "2", "--launcher", LAUNCHER)
    return run(["scale", "--output", "study", *small, *arguments], is_rank_zero=True)


def made() -> list[str]:
    """Folders in the order of their launches, preparation left aside."""
    names = Path("study/order.txt").read_text().splitlines()
    return [name for name in names if not name.startswith("t1-b")]


@pytest.mark.more
def test_a_study_from_command_to_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dptrain.report.files.write_report", write_report)
    assert scale() == 0
    assert (Path("study") / REPORT).exists()
    said = capsys.readouterr().out
    assert "6 launches, about" in said
    assert "6/6" in said
    study = Study.read(Path("study/study.json"))
    assert [point.name for point in study.points] == [
        "weak-r1-t1", "weak-r2-t1", "strong-r1-t1", "strong-r2-t1",
    ]  # fmt: skip
    assert all(len(point.launches) == 2 for point in study.points)
    # Rounds are whole: no point has its second launch before all have their first.
    assert [name[-1] for name in made()] == ["1"] * 3 + ["2"] * 3
    for launch in study.points[1].launches:
        assert (Path("study") / launch.folder / "log.txt").exists()
    words = shlex.split(study.commands["strong-r2-t1"])
    assert words[: len(shlex.split(LAUNCHER)) + 2] == [*shlex.split(LAUNCHER), "-n", "2"]
    assert "profile" in words
    assert not list(Path("study").glob("prepare*"))
    for name in ("points.csv", "launches.csv", "forecasts.csv"):
        assert (Path("study") / name).exists()


@pytest.mark.more
def test_weak_points_train_until_the_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale("--launches", "3", "--until-accuracy", "0.9", "--epochs", "8") == 0
    said = capsys.readouterr().out
    assert "Time to 90.0% validation accuracy" in said
    assert "Training reaches 90.0% validation accuracy in 2.88 s (95% interval 0." in said
    study = Study.read(Path("study/study.json"))
    found = {point.name: point.time_to_accuracy for point in study.points}
    assert found["strong-r1-t1"] is None
    assert found["strong-r2-t1"] is None
    two = found["weak-r2-t1"]
    assert two is not None
    assert (two.accuracy, two.trainings, two.reached) == (0.9, 3, 3)
    # The seed, which the launcher adds to the epochs, is that of the round: 0, 1, 2.
    assert two.epochs is not None
    assert two.epochs.value == pytest.approx((2 * 3 * 4) ** (1 / 3))
    assert two.time_s is not None
    assert two.time_s.value == two.epochs.value
    # Up to an epoch earlier, 1, 2 and 3 instead of 2, 3 and 4 epochs.
    assert 0 < two.epochs.low < 1
    # Of rounds: 2 / 2, 4 / 3, 6 / 4.
    assert two.speed_up is not None
    assert two.speed_up.value == pytest.approx((1 * 4 / 3 * 3 / 2) ** (1 / 3))
    summary = Path("study/launches/weak-r2-t1-2/training/run/summary.json")
    flags = json.loads(summary.read_text())["flags"]
    for flag, value in (
        ("--batch-size", "64"), ("--epochs", "8"), ("--seed", "1"), ("--baseline-steps", "0"),
    ):  # fmt: skip
        assert flags[flags.index(flag) + 1] == value
    assert not Path("study/launches/strong-r2-t1-2/training").exists()
    assert "time_to_accuracy.time_s.value" in Path("study/points.csv").read_text()


@pytest.mark.more
def test_an_accuracy_that_is_not_reached_is_stated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_UNREACHED", "2")
    assert scale("--until-accuracy", "0.9") == 0
    said = capsys.readouterr().out
    assert "0 of 2 launches at 2 ranks reached 90.0% validation accuracy" in said
    assert "not reached" in said
    point = Study.read(Path("study/study.json")).points[1].time_to_accuracy
    assert point is not None
    assert (point.reached, point.time_s, point.speed_up) == (0, None, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--epochs", "8"), "--epochs limits the training of --until-accuracy"),
        (("--until-accuracy", "0.9", "--scaling", "strong"), "add weak to --scaling"),
        (("--until-accuracy", "1.5"), "above 0"),
        (("--until-accuracy", "0.9", "--network", "solar"), "network 'solar' predicts values"),
    ],
)
def test_accuracies_that_cannot_be_reached_are_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale(*flags) == 2
    assert message in capsys.readouterr().err
    assert not Path("study").exists()


@pytest.mark.more
def test_ranks_that_slurm_starts_are_no_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dptrain.scaling.running.cores_of_others", lambda before: 2.0)

    def others(point: str) -> float | None:
        assert scale("--launches", "1", "--only", point) == 0
        value: float | None = json.loads(Path(f"study/launches/{point}-1/launch.json").read_text())[
            "other_cores"
        ]
        return value

    assert others("weak-r1-t1") == 2.0
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert others("weak-r2-t1") is None


@pytest.mark.more
def test_rounds_are_added_until_efficiencies_are_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def widest(folder: Path, design: Design) -> str:
        return "" if design.launches == 4 else "the efficiency of weak-r2-t1 is known to ±0.030"

    assert scale("--until", "0.02", "--only", "weak-r2-t1") == 2
    monkeypatch.setattr("dptrain.scaling.scale._widest", widest)
    assert scale("--until", "0.02") == 0
    assert "round 4, because the efficiency of weak-r2-t1 is known to ±0.030" in (
        capsys.readouterr().out
    )
    study = Study.read(Path("study/study.json"))
    assert {len(point.launches) for point in study.points} == {4}
    stored = Design.read(Path("study"))
    assert stored is not None
    assert (stored.launches, stored.until, stored.most_launches) == (4, 0.02, 30)


@pytest.mark.more
def test_a_study_with_added_rounds_continues_with_its_first_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 3

    def widest(folder: Path, design: Design) -> str:
        return "" if design.launches == most else "an interval is wide"

    monkeypatch.setattr("dptrain.scaling.scale._widest", widest)
    command = ("--launches", "1", "--until", "0.02")
    assert scale(*command) == 0
    assert len(made()) == 9
    assert scale(*command) == 0
    assert len(made()) == 9
    most = 4
    assert scale("--launches", "1", "--until", "0.01", "--most-launches", "20") == 0
    assert len(made()) == 12
    stored = Design.read(Path("study"))
    assert stored is not None
    assert (stored.launches, stored.until, stored.most_launches) == (4, 0.01, 20)


def test_a_limit_below_the_launches_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale("--launches", "4", "--until", "0.02", "--most-launches", "3") == 2
    said = capsys.readouterr().err
    assert "--most-launches is 3, but every point has 4 launches" in said
    assert "use --most-launches 4 or more" in said
    assert not Path("study").exists()


@pytest.mark.more
def test_rounds_end_at_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    # Two launches have no interval.
    assert scale("--until", "0.02", "--most-launches", "3") == 0
    assert len(Study.read(Path("study/study.json")).points[0].launches) == 3
    said = capsys.readouterr().out
    assert re.search(
        r"round 3, because the interval of the efficiency of \S+ needs 3 launches, also without "
        "the last round",
        said,
    )
    assert "inf" not in said


def widest_of(
    monkeypatch: pytest.MonkeyPatch,
    launches: int,
    slow_ms: float,
    *,
    until: float = 0.02,
    steps: int = 50,
) -> str:
    """Return what a study is continued for whose every other launch of two ranks is slow."""
    design = Design(
        ranks=(1, 2), threads=(1,), scalings=("weak",), launches=launches, steps=steps, seed=0,
        launcher=(), batch_size=32, settings={}, until=until, most_launches=30,
    )  # fmt: skip
    measured = [
        Measured(
            task.folder,
            order,
            make_profile(
                Law(), ranks=task.point.ranks, batch_size=task.point.batch_size, steps=steps,
                step_ms=(
                    slow_ms if task.point.ranks == 2 and task.round % 2 else 10.0 + 0.001 * order
                ),
            ),
        )
        for order, task in enumerate(design.tasks())
    ]  # fmt: skip
    found = SimpleNamespace(launches=measured)
    monkeypatch.setattr("dptrain.scaling.scale.collect", lambda folders, output: found)
    return _widest(Path("study"), design)


@pytest.mark.parametrize(("launches", "ends"), [(5, False), (7, False), (8, True), (12, True)])
def test_two_groups_of_launches_need_no_more_rounds(
    launches: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (widest_of(monkeypatch, launches, 15.0) == "") is ends


@pytest.mark.parametrize(("until", "launches"), [(0.02, 30), (0.2, 29)])
def test_equal_launches_need_rounds_until_a_slow_one_would_be_seen(
    until: float, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (5, launches - 1):
        assert widest_of(monkeypatch, number, 10.001, until=until, steps=1000)
    assert widest_of(monkeypatch, launches, 10.001, until=until, steps=1000) == ""
    found = widest_of(monkeypatch, 5, 10.001, until=0.2, steps=1000)
    assert "fewer than 29 launches may contain no slow one" in found


@pytest.mark.more
def test_all_launches_read_ahead_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((2, 0), (3, 2)):
        monkeypatch.setattr("dptrain.scaling.running.available_cores", lambda n=cores: n)
        shutil.rmtree("study", ignore_errors=True)
        assert scale("--launches", "1") == 0
        stored = Design.read(Path("study"))
        assert stored is not None
        assert stored.settings["prefetch"] == expected
        commands = Study.read(Path("study/study.json")).commands.values()
        # The default of the setting is to choose, so a number is always part of the command.
        assert all(f"--prefetch {expected}" in command for command in commands)


@pytest.mark.more
def test_json_is_the_record_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale("--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads(Path("study/study.json").read_text())
    assert "6 launches" in said.err


@pytest.mark.more
def test_a_study_goes_on_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale() == 0
    gone = Path("study/launches/weak-r2-t1-2")
    (gone / "profile.json").unlink()
    before = {p: p.stat().st_mtime_ns for p in Path("study/launches").glob("*/profile.json")}
    Path("study/order.txt").unlink()
    assert run(["scale", "--output", "study"], is_rank_zero=True) == 0
    assert made() == ["weak-r2-t1-2"]
    assert "1 launch (5 of 6 are complete)" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in before}


@pytest.mark.parametrize("words", ["mpirum", "ls", "echo", "true", f"{sys.executable} --oops"])
def test_a_launcher_that_starts_nothing_is_refused_before_anything_is_written(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale("--launcher", words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("dptrain: --launcher ")
    assert "expected auto, mpirun or srun" in said
    assert not Path("study").exists()


@pytest.mark.more
def test_more_launches_are_added() -> None:
    assert scale() == 0
    assert run(["scale", "--output", "study", "--launches", "3"], is_rank_zero=True) == 0
    assert len(made()) == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "20"), "--steps 50, this command has 20"),
        pytest.param(
            ("--batch-size", "64"), "--batch-size 32, this command has 64", marks=pytest.mark.more
        ),
        pytest.param(
            ("--network", "model1"),
            "--network model0, this command has model1",
            marks=pytest.mark.more,
        ),
    ],
)
def test_a_changed_configuration_is_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale("--launches", "1") == 0
    written = Path("study/study.json").read_text()
    capsys.readouterr()
    assert run(["scale", "--output", "study", *arguments], is_rank_zero=True) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
    assert Path("study/study.json").read_text() == written


@pytest.mark.more
def test_a_failing_launch_ends_the_study_and_names_its_cause_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "strong-r2-t1-2")
    assert scale() == 2
    said = capsys.readouterr()
    assert (said.out + said.err).count("the data is missing") == 1
    assert "launch strong-r2-t1-2 of 2 ranks failed (exit code 2)" in said.err
    assert "log: study/launches/strong-r2-t1-2/log.txt" in said.err
    kept = len(made())
    monkeypatch.delenv("FAKE_FAIL")
    assert run(["scale", "--output", "study"], is_rank_zero=True) == 0
    assert len(made()) == 6
    assert kept >= 3


@pytest.mark.more
def test_the_part_that_completes_a_study_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale("--part", "1/2") == 0
    assert not Path("study/study.json").exists()
    printed = capsys.readouterr().out
    assert "3 of 6 launches are complete; the part that completes them writes the study" in printed
    assert "dptrain scale --collect study" in printed
    assert run(["scale", "--collect", "study"], is_rank_zero=True) == 0
    missing = "3 of 6 launches are missing in study; continue with: dptrain scale --output study"
    assert missing in Study.read(Path("study/study.json")).notes
    assert scale("--part", "2/2") == 0
    study = Study.read(Path("study/study.json"))
    assert len(study.points) == 4
    assert not any("missing" in note for note in study.notes)


@pytest.mark.more
def test_parts_run_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first, launcher = begin(monkeypatch, hang="t1-b", part="1/2")
    monkeypatch.delenv("FAKE_HANG")
    assert scale("--part", "2/2") == 0
    assert len(list(Path("study").glob("prepare*/**/log.txt"))) == 1  # The first one's, untouched.
    first.kill()
    first.communicate(timeout=100)
    assert ends(launcher)


@pytest.mark.more
def test_what_was_prepared_is_no_launch() -> None:
    assert scale("--launches", "1") == 0
    for place in ("prepare-a-1/t1-b32", "begun/prepare-a-1/t1-b32"):
        Path("study", place).mkdir(parents=True)
        shutil.copy("study/launches/weak-r1-t1-1/profile.json", Path("study", place))
    arguments = ["scale", "--collect", "study", "--collect", "study/begun", "--output", "all"]
    assert run(arguments, is_rank_zero=True) == 0
    points = Study.read(Path("all/study.json")).points
    assert all(len(point.launches) == 1 for point in points)


@pytest.mark.more
def test_a_study_is_collected_whatever_lies_beside_its_profiles() -> None:
    assert scale("--launches", "1") == 0
    Path("study/launches/weak-r1-t1-1/launch.json").write_text('[1, "x"]')
    Path("study/launches/weak-r2-t1-1/launch.json").write_text('{"command": 3, "began": 1}')
    Path("study/scale.json").write_text("{")
    assert run(["scale", "--collect", "study", "--output", "all"], is_rank_zero=True) == 0
    assert len(Study.read(Path("all/study.json")).points) == 4


@pytest.mark.more
def test_a_file_in_the_place_of_the_study_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale("--launches", "1") == 0
    Path("file").touch()
    capsys.readouterr()
    assert run(["scale", "--collect", "study", "--output", "file"], is_rank_zero=True) == 2
    said = capsys.readouterr().err
    assert "cannot write file" in said
    assert len(said.splitlines()) == 1


@pytest.mark.more
def test_collected_studies_lie_apart_from_their_launches() -> None:
    assert scale() == 0
    Path("one").mkdir()
    for name in ("weak-r1-t1-1", "weak-r2-t1-1"):
        Path(f"study/launches/{name}").rename(f"one/{name}")
    arguments = ["scale", "--collect", "one", "--collect", "study", "--output", "both"]
    assert run(arguments, is_rank_zero=True) == 0
    study = Study.read(Path("both/study.json"))
    folders = {launch.folder for point in study.points for launch in point.launches}
    assert "../one/weak-r2-t1-1" in folders
    assert all((Path("both") / folder / "profile.json").exists() for folder in folders)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1,x"], "--ranks is '1,x'; expected whole numbers from 1 to"),
        (["--scaling", "wek"], "did you mean 'weak'"),
        (["--part", "3/2"], "--part is '3/2'; expected I/N"),
        (["--launcher", "nowhere-to-be-found"], "no such program"),
        (["--launcher", "mpirun 'a"], "No closing quotation"),
        (["--collect", "nowhere"], "--collect nowhere: no such folder"),
        (["--only", "weak-r8-t1"], "--only weak-r8-t1: no such point"),
        (["--network", "nothing"], "nothing"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["scale", "--output", "study", *arguments], is_rank_zero=True) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_ranks_do_not_start_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PALS_LOCAL_SIZE", "2")  # Its programs are unknown.
    assert run(["scale"], is_rank_zero=True) == 2
    assert "starts ranks itself" in capsys.readouterr().err


def test_nothing_of_the_users_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("study").mkdir()
    Path("study/study.json").write_text("mine")
    assert scale() == 2
    assert "contains files but no scaling study" in capsys.readouterr().err
    assert Path("study/study.json").read_text() == "mine"


@pytest.mark.more
def test_a_launch_is_made_by_one_process_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale("--only", "weak-r2-t1", "--launches", "1") == 0
    place = Path("study/launches/weak-r2-t1-1")
    (place / "profile.json").unlink()
    capsys.readouterr()
    with (place / "log.txt").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run(["scale", "--output", "study", "--only", "weak-r2-t1"], is_rank_zero=True) == 2
    assert "another `dptrain scale` in study/launches runs" in capsys.readouterr().err
    assert run(["scale", "--output", "study", "--only", "weak-r2-t1"], is_rank_zero=True) == 0


@pytest.mark.more
def test_ranks_that_will_share_cores_are_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dptrain.scaling.running.available_cores", lambda: 1)
    assert scale("--launches", "1") == 0
    said = capsys.readouterr().out
    assert "2 compute threads share 1 core at weak-r2-t1: the efficiency there is at most" in said


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_times_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def begin(
    monkeypatch: pytest.MonkeyPatch, hang: str = "t1-2", part: str = "1/1"
) -> tuple[subprocess.Popen[str], int]:
    """A study that hangs, in its second round: its process, and that of the launcher."""
    monkeypatch.setenv("FAKE_HANG", hang)
    monkeypatch.setenv("FAKE_PID", str(Path("pid").absolute()))
    command = [
        sys.executable, "-m", "dptrain", "scale", "--output", "study", "--ranks", "1,2",
        "--launches", "2", "--launcher", LAUNCHER, "--part", part,
    ]  # fmt: skip
    study = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while not Path("pid").exists() or not Path("pid").read_text():
        assert study.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return study, int(Path("pid").read_text())


def ends(pid: int) -> bool:
    """Whether a process goes away soon; one that is dead but not yet waited for has gone."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_study_that_is_stopped_takes_its_children_along_and_goes_on(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, launcher = begin(monkeypatch)
    study.send_signal(number)
    said, _ = study.communicate(timeout=100)
    assert study.returncode == 75
    assert "3 of 6 launches are complete; continue with: dptrain scale --output study" in said
    assert ends(launcher)
    monkeypatch.delenv("FAKE_HANG")
    assert run(["scale", "--output", "study"], is_rank_zero=True) == 0
    assert len(made()) == 6


@pytest.mark.more
def test_a_study_that_is_killed_leaves_no_child_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study, launcher = begin(monkeypatch)
    study.kill()
    study.communicate(timeout=100)
    assert ends(launcher)
    monkeypatch.delenv("FAKE_HANG")
    assert run(["scale", "--output", "study"], is_rank_zero=True) == 0
    assert len(made()) == 6
