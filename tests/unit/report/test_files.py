"""What a report writes, and what it leaves alone."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dptrain.errors import UserError
from dptrain.report.files import PLOTS, REPORT, write_report
from dptrain.scaling.analysis import analyse
from dptrain.scaling.study import WEAK, Study
from tests.unit.scaling.synthetic import Law, make_launches, write_study

HOSTILE = "<script>alert('&')</script>\"'<img src=x onerror=alert(1)> $a_b$"


class Reader(HTMLParser):
    """Elements with their attributes, and all text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of weak scaling with its profiles, and its report."""
    found = tmp_path_factory.mktemp("study")
    write_study(found, Law(cores=3, noise=0.01), (1, 2, 4))
    study = Study.read(found / "study.json")
    weak = {
        field: tuple(one for one in getattr(study, field) if one.scaling == WEAK)
        for field in ("points", "forecasts")
    }
    replace(study, **weak).write(found / "study.json")
    write_report(found)
    return found


def files_below(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.more
def test_the_same_study_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_report(folder, tmp_path)
    written = files_below(tmp_path)
    there = files_below(folder)
    assert written == {name: there[name] for name in written}
    assert {REPORT, "plots/parts-weak.svg", "plots/parts-weak.png"} <= {*written}


@pytest.mark.more
def test_a_report_is_replaced_and_nothing_else_is(folder: Path, tmp_path: Path) -> None:
    study = Study.read(folder / "study.json")
    replace(study, profiles={}, forecasts=()).write(tmp_path / "study.json")
    write_report(tmp_path)
    for name in (REPORT, f"{PLOTS}/parts-weak.svg", f"{PLOTS}/parts-weak.png"):
        before = files_below(tmp_path)
        (tmp_path / name).write_text("mine")
        with pytest.raises(UserError, match=f"{name} exists and was not written by"):
            write_report(tmp_path)
        assert files_below(tmp_path) == {**before, name: b"mine"}
        (tmp_path / name).write_bytes(before[name])
    (tmp_path / REPORT).write_text("mine")
    write_report(tmp_path, replace=True)
    assert files_below(tmp_path) == before


def test_a_folder_without_records_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"contains no results of these commands"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.more
def test_a_study_may_come_without_its_profiles(folder: Path, tmp_path: Path) -> None:
    Study.read(folder / "study.json").write(tmp_path / "study.json")
    text = Reader(write_report(tmp_path)).text
    assert "Profile of a step" not in text
    assert "Weak scaling" in text


def test_a_study_without_points_is_refused(folder: Path, tmp_path: Path) -> None:
    replace(Study.read(folder / "study.json"), points=()).write(tmp_path / "study.json")
    with pytest.raises(UserError, match="is not a study"):
        write_report(tmp_path)


def test_names_cannot_become_markup(folder: Path, tmp_path: Path) -> None:
    study = Study.read(folder / "study.json")
    job = {key: HOSTILE if isinstance(value, str) else value for key, value in study.job.items()}
    environment = {
        key: HOSTILE if isinstance(value, str) else value
        for key, value in study.environment.items()
    }
    replace(
        study, job=job, environment={**environment, "command": [HOSTILE]}, conclusion=(HOSTILE,),
        notes=(HOSTILE,), commands={HOSTILE: HOSTILE},
    ).write(tmp_path / "study.json")  # fmt: skip
    page = Reader(write_report(tmp_path))
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert not [name for _, names in page.elements for name in names if name.startswith("on")]
    assert page.text.count("<script>alert('&')</script>") > 8


@pytest.mark.more
def test_names_in_plots_cannot_become_markup(folder: Path, tmp_path: Path) -> None:
    launch = folder / Study.read(folder / "study.json").profiles["weak-r4-t1"]
    text = (launch / "profile.json").read_text()
    (tmp_path / "profile.json").write_text(text.replace("conv1+", "<script>1</script>$x^2$+"))
    page = Reader(write_report(tmp_path))
    assert "script" not in {tag for tag, _ in page.elements}
    assert "<script>1</script>$x^2$+relu1+pool1" in page.text


@pytest.mark.more
@pytest.mark.parametrize(
    ("launches", "threads", "ranks"), [(1, (1,), (1, 2)), (3, (1, 2), (1, 2, 4)), (2, (2,), (1,))]
)
def test_small_and_wide_studies_have_reports(
    launches: int, threads: tuple[int, ...], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    made = make_launches(Law(noise=0.01), ranks, threads=threads, launches=launches)
    analyse(made).write(tmp_path / "study.json")
    text = Reader(write_report(tmp_path)).text
    assert "nan" not in text.lower().split()
    assert "inf" not in re.findall(r"[a-z]+", text.lower())
    # Only a fitted bandwidth may be infinite; a value without an interval has no bounds at all.
    assert "–∞" not in text
    if launches == 1:
        assert "there are too few for an efficiency" in text
    if len(threads) > 1:
        assert "2 threads per rank" in text


def test_a_page_refers_to_nothing_outside_of_it(folder: Path) -> None:
    page = Reader(folder / REPORT)
    addresses = [
        value
        for tag, names in page.elements
        for name, value in names.items()
        if name in ("href", "src", "xlink:href", "action", "srcset") and value
    ]
    assert addresses
    assert [a for a in addresses if not a.startswith(("#", "data:"))] == []
    assert "url(http" not in (folder / REPORT).read_text()
    ids = [names["id"] for _, names in page.elements if "id" in names]
    assert len(ids) == len(set(ids))
