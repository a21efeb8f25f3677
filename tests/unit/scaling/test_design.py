"""What a study launches, in which order, and what it refuses."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from dptrain.errors import UserError
from dptrain.scaling.design import Design, refuse_difference
from dptrain.scaling.launching import Launcher
from dptrain.scaling.running import ROOF_ROUNDS, command_of
from dptrain.scaling.scale import Selection

DESIGN = Design(
    ranks=(1, 2, 4), threads=(1, 2), scalings=("weak", "strong"), launches=5, steps=50, seed=0,
    launcher=(), batch_size=32, settings={"network": "model0"},
)  # fmt: skip


def test_every_combination_is_a_point_and_the_base_is_one_of_both_ways() -> None:
    points = DESIGN.points()
    assert points[0].name == "weak-r1-t1"
    assert len(points) == 11
    places = {(p.ranks, p.threads) for p in points}
    assert places == {(r, t) for r in (1, 2, 4) for t in (1, 2)}
    for p in points:
        workers = p.ranks * p.threads
        assert p.batch_size == (32 * workers if p.scaling == "weak" else 32)


def test_the_smallest_number_of_workers_has_the_minibatch() -> None:
    points = replace(DESIGN, ranks=(2, 6), threads=(1,)).points()
    assert [(p.name, p.batch_size) for p in points] == [
        ("weak-r2-t1", 32), ("weak-r6-t1", 96), ("strong-r6-t1", 32),
    ]  # fmt: skip


def test_a_minibatch_that_would_not_be_whole_is_refused() -> None:
    with pytest.raises(UserError, match=r"31 into 46\.5; expected a multiple of 2, try .* 62"):
        replace(DESIGN, ranks=(2, 3), threads=(1,), batch_size=31).points()


def test_rounds_visit_each_point_once_in_an_order_of_their_own() -> None:
    tasks, points = DESIGN.tasks(), DESIGN.points()
    rounds = [tasks[i : i + len(points)] for i in range(0, len(tasks), len(points))]
    assert len(rounds) == 5
    for number, members in enumerate(rounds, 1):
        assert {task.round for task in members} == {number}
        assert sorted(t.point.name for t in members) == sorted(p.name for p in points)
    orders = {tuple(task.point.name for task in members) for members in rounds}
    assert len(orders) == 5
    assert tasks == DESIGN.tasks()
    assert tasks != replace(DESIGN, seed=1).tasks()
    assert len({task.folder for task in tasks}) == len(tasks)


def test_parts_make_every_launch_once() -> None:
    shares = [Selection((), part, 4).of(DESIGN) for part in (1, 2, 3, 4)]
    together = [task for share in shares for task in share]
    assert sorted(t.folder for t in together) == sorted(t.folder for t in DESIGN.tasks())
    rounds = [Selection((), part, 5).of(DESIGN) for part in (1, 2, 3, 4, 5)]
    assert [{task.round for task in members} for members in rounds] == [{1}, {2}, {3}, {4}, {5}]
    only = Selection(("weak-r4-t1",)).of(DESIGN)
    assert [task.round for task in only] == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="did you mean 'weak-r4-t1'"):
        Selection(("weak-r4t1",)).of(DESIGN)


def test_a_design_is_read_as_it_was_kept_and_the_first_one_stays(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    assert Design.read(folder) is None
    DESIGN.write(folder)
    replace(DESIGN, steps=7).write(folder)
    assert Design.read(folder) == DESIGN
    assert [path.name for path in folder.iterdir()] == ["scale.json"]


def test_a_study_with_more_launches_goes_on_with_all_of_them(tmp_path: Path) -> None:
    DESIGN.write(tmp_path)
    more = replace(DESIGN, launches=DESIGN.launches + 2)
    more.write(tmp_path)
    DESIGN.write(tmp_path)
    assert Design.read(tmp_path) == more


def test_a_study_that_another_process_begins_just_now_is_no_stranger(tmp_path: Path) -> None:
    (tmp_path / ".scale.json.17").touch()
    assert Design.read(tmp_path) is None


def test_where_there_is_no_room_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(UserError, match="No space left"):
        DESIGN.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_study_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="contains files but no scaling study"):
        Design.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 20}, "with --steps 50, this command has 20"),
        ({"ranks": (1, 2)}, "with --ranks 1,2,4, this command has 1,2"),
        ({"launches": 3}, "with --launches 5, this command has 3"),
        ({"scalings": ("weak",)}, "with --scaling weak,strong, this command has weak"),
        ({"settings": {"network": "cifar"}}, "with --network model0, this command has cifar"),
        (
            {"settings": {"network": "model0", "crop": 2}},
            r"--crop \(default\), this command has 2; omit --crop",
        ),
    ],
)
def test_another_study_in_the_same_folder_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        refuse_difference(Path("DIR"), DESIGN, replace(DESIGN, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"launches": 9},
        {"until": 0.02, "most_launches": 20},
        {"until": 0.02, "most_launches": 20, "launches": 3},
        {"most_launches": 7},
    ],
)
def test_another_number_of_rounds_continues_the_study(changes: dict) -> None:
    refuse_difference(Path("DIR"), DESIGN, replace(DESIGN, **changes))


def test_changed_stopping_options_are_stored(tmp_path: Path) -> None:
    DESIGN.write(tmp_path)
    changed = replace(DESIGN, until=0.02, most_launches=20)
    changed.write(tmp_path)
    assert Design.read(tmp_path) == changed


@pytest.mark.parametrize("known_losses", [False, True])
def test_every_point_measures_its_limits_in_the_first_rounds(known_losses: bool) -> None:
    design = replace(DESIGN, known_losses=known_losses)
    for task in design.tasks():
        command = command_of(design, task, Launcher(("mpirun",), False), Path("output"))
        injects = "--known-losses" in command
        assert injects == (known_losses and task.point.ranks > 1)
        assert ("--no-roofs" in command) == (task.round > ROOF_ROUNDS and not injects)
