"""The files of `dptrain paper`: the numbers of the report, valid LaTeX, and no lost edits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.cli.main import run
from dptrain.errors import UserError
from dptrain.report.elements.page import Page
from dptrain.report.files import make_page, read_result
from dptrain.report.paper import files
from dptrain.report.paper.files import RECORD, write_paper
from dptrain.report.paper.references import REFERENCES
from dptrain.report.paper.values import Value, number_groups, sentence_groups
from dptrain.scaling.analysis import analyse
from dptrain.scaling.study import Study
from dptrain.scaling.tables import forecast_table
from dptrain.tables import Column, Number, Records, Table
from dptrain.tables.latex import latex
from tests.unit.report.test_files import HOSTILE, files_below
from tests.unit.scaling.synthetic import Law, make_launches
from tests.unit.scaling.test_efficiencies import with_pop

COMMANDS = re.compile(r"\\([A-Za-z]+\*?|.)", re.DOTALL)
SYMBOLS = {
    "textbackslash": "\\", "textasciicircum": "^", "textasciitilde": "~", "textasciigrave": "`",
    "textless": "<", "textgreater": ">", "textbar": "|", "ldots": "…", "times": "×", "alpha": "α",
    "beta": "β", "mu": "µ", "infty": "∞", ",": "\u202f", "char": '"',
}  # fmt: skip
"""What some commands print."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with profiles and POP efficiencies, without load and training."""
    found = tmp_path_factory.mktemp("study")
    launches = [
        replace(m, profile=with_pop(m.profile))
        for m in make_launches(Law(cores=3, noise=0.01), (1, 2, 4))
    ]
    for measured in launches:
        (found / measured.folder).mkdir(parents=True)
        measured.profile.write(found / measured.folder / "profile.json")
    analyse(launches).write(found / "study.json")
    return found


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two launches of each point, whose folders are missing."""
    found = tmp_path_factory.mktemp("small")
    analyse(make_launches(Law(noise=0.01), (1, 2), launches=2)).write(found / "study.json")
    return found


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return make_page(read_result(folder), folder)


@pytest.fixture(scope="module")
def paper(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_paper(folder, tmp_path_factory.mktemp("paper") / "results")


def definitions(path: Path) -> dict[str, str]:
    """The values that a file defines, by key; each key occurs once."""
    lines = path.read_text().splitlines()
    found = [re.fullmatch(r"\\dpdefine\{([^{}]*)\}\{(.*)\}", line) for line in lines]
    pairs = [(match[1], match[2]) for match in found if match]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def printed(text: str) -> str:
    """What LaTeX prints of a text; fails on what would be an error or markup.

    It reads LaTeX symbol by symbol and shares nothing with the writer.
    """
    pieces, groups, at, name = [], [], 0, ""
    while at < len(text):
        symbol = text[at]
        if command := COMMANDS.match(text, at):
            at, name = command.end(), command[1]
            if text.startswith("{}", at):
                at += 2
            if name == "char":
                assert text.startswith("34{}", at)
                at += 4
            if name not in ("ensuremath", "texttt"):
                pieces.append(SYMBOLS.get(name, name if len(name) == 1 else f"<{name}>"))
            continue
        assert symbol not in "%#&$\n", text
        assert symbol not in "^_" or "ensuremath" in groups, text
        if symbol == "{":
            groups.append(name)
            pieces.append("\u200b")  # Two hyphens with a group between them are no dash.
        elif symbol == "}":
            groups.pop()
        else:
            pieces.append("\u00a0" if symbol == "~" else symbol)
        at, name = at + 1, ""
    assert not groups, text
    return "".join(pieces).replace("---", "—").replace("--", "–").replace("\u200b", "")


def tables_of(page: Page) -> Iterator[Table]:
    for section in page.sections:
        yield from section.tables


def test_each_number_of_a_table_has_one_key_with_its_text(page: Page) -> None:
    values = [value for group in number_groups(page) for value in group.values]
    texts = {value.key: value.text for value in values}
    assert len(texts) == len(values)
    assert all(re.fullmatch(r"[a-z0-9.+-]+", key) for key in texts)
    for table in tables_of(page):
        of_table = [text for key, text in texts.items() if key.startswith(f"{table.name}.")]
        for column in table.columns:
            if column.kind in ("number", "computed") and not column.is_key:
                for cell in column.cells:
                    numbers = [part.text for part in cell if isinstance(part, Number)]
                    if not numbers or column is table.columns[0]:
                        continue
                    assert any(all(n in text for n in numbers) for text in of_table), (table, cell)


def test_the_file_defines_the_numbers_and_intervals_of_the_study(folder: Path, paper: Path) -> None:
    study, found = Study.read(folder / "study.json"), definitions(paper / "values.tex")
    for point in study.points[1:]:
        if point.ranks == 1:
            continue
        value, key = point.efficiency, f"points-{point.scaling}.{point.ranks}.efficiency"
        low, high = 100 * value.low, 100 * value.high
        assert printed(found[key]) == f"{100 * value.value:.1f}% ({low:.1f}–{high:.1f}%)"


def test_sentences_use_defined_keys_and_are_those_of_the_study(folder: Path, paper: Path) -> None:
    study, found = Study.read(folder / "study.json"), definitions(paper / "values.tex")
    used = re.findall(r"\\dpvalue\{(.*?)\}", (paper / "sentences.tex").read_text())
    assert used
    assert set(used) <= found.keys()
    conclusion = [found[f"conclusion.{i + 1}"] for i in range(len(study.conclusion))]
    assert [printed(text) for text in conclusion] == list(study.conclusion)
    markdown = (paper / "sentences.md").read_text()
    assert all(sentence in markdown for sentence in study.conclusion)
    assert all(printed(text) for text in found.values())


def test_what_the_report_withholds_is_withheld(small: Path) -> None:
    paper = write_paper(small)
    found = definitions(paper / "values.tex")
    for ranks in (1, 2):  # The base has no efficiency, and two launches give none.
        key = f"points-weak.{ranks}.efficiency"
        assert found[key] == rf"\dpwithheld{{{key}}}"
    assert found["points-weak.2.step"].endswith(" (no interval)")
    assert "No forecast of weak scaling" in (paper / "sentences.md").read_text()
    methods = (paper / "methods.md").read_text()
    assert "number of timed steps is unknown" in methods
    assert "load by other programs was not recorded" in methods


def test_absolute_paths_and_hosts_are_not_published(small: Path, tmp_path: Path) -> None:
    study = Study.read(small / "study.json")
    facts = {**study.environment, "host": "secret-host", "directory": "/home/me/secret-folder"}
    notes = ("launches differ: a in /home/me/secret-folder/launches/x, b in y",)
    replace(study, environment=facts, notes=notes).write(tmp_path / "study.json")
    target = write_paper(tmp_path)
    texts = [path.read_text() for path in target.rglob("*") if path.suffix in (".tex", ".md")]
    assert len(texts) > 6
    assert not any("secret-host" in text or "/home/me" in text for text in texts)


def test_citations_have_entries_and_entries_are_complete(paper: Path) -> None:
    entries = re.findall(r"^@[a-z]+\{(\w+),", (paper / "references.bib").read_text(), re.MULTILINE)
    tex = (paper / "methods.tex").read_text()
    cited = [key for keys in re.findall(r"\\cite\{(.*?)\}", tex) for key in keys.split(",")]
    assert sorted(cited) == sorted(entries)
    assert set(re.findall(r"@([a-z]+\d*)", (paper / "methods.md").read_text())) == set(entries)
    assert {"dptrain", "student1908", "wagner2017", "karp1990", "amdahl1967"} <= set(entries)
    assert "kingma2015" not in entries
    for reference in REFERENCES:
        assert {"author", "title", "year"} <= reference.fields.keys()
        assert all(printed(text) for name, text in reference.fields.items() if name != "doi")


def test_figures_and_tables_have_unique_names(page: Page, paper: Path) -> None:
    for names in ([plot.name for plot in page.plots], [table.name for table in tables_of(page)]):
        assert len(set(names)) == len(names)
    captions = definitions(paper / "values.tex")
    for plot in page.plots:
        assert f"caption.{plot.name}" in captions
        assert (paper / "figures" / f"{plot.name}.pdf").read_bytes().startswith(b"%PDF")
        assert (paper / "figures" / f"{plot.name}.svg").read_text() == plot.svg
    for table in tables_of(page):
        lines = (paper / "tables" / f"{table.name}.tex").read_text().splitlines()
        rows = [line for line in lines if line.endswith(r"\\")]
        assert len(rows) == 1 + len(table.rows)
        assert all(row.count(" & ") == len(table.columns) - 1 for row in rows)


def test_rows_and_columns_that_look_alike_have_different_keys(page: Page) -> None:
    records = Records.of([{"x": 1.0}, {"x": 2.0}])
    columns = (
        Column("Name", "", (("a b",), ("a–b",)), "word"),
        records.values("x", "x", "ms"),
        records.values("x", "X", "%"),
        records.values("x", "x", "ms"),
    )
    sections = (replace(page.sections[0], tables=(Table("T", columns, "", "t", "f"),)),)
    (group,) = number_groups(replace(page, keys=(), sections=sections))
    assert [value.key for value in group.values] == [
        f"t.a-b-{row}.{column}" for row in (1, 2) for column in ("x-ms-1", "x-percent", "x-ms-3")
    ]
    assert group.values[1] == Value("t.a-b-1.x-percent", "100.0%")


def test_a_forecast_has_its_interval(page: Page) -> None:
    study = analyse(make_launches(Law(per_node=1, sample=2.0, noise=0.005), (1, 2, 4, 8, 16)))
    table = forecast_table(study)
    assert table is not None
    (group,) = number_groups(
        replace(page, keys=(), sections=(replace(page.sections[0], tables=(table,)),))
    )
    texts = {value.key: value.text for value in group.values}
    for forecast in study.forecasts:
        for (ranks, _, value), (low, high) in zip(forecast.points, forecast.intervals, strict=True):
            text = f"{100 * value:.1f}% ({100 * low:.1f}–{100 * high:.1f}%)"
            assert texts[f"forecast.{forecast.scaling}.{ranks}.efficiency"] == text


PLAIN = st.text(st.sampled_from('-–—%_{}\\$&#^~<>|"…×αé\u202f 1a'))
ANY = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")))


@given(PLAIN, ANY)
def test_latex_prints_any_text(plain: str, other: str) -> None:
    assert printed(latex(plain)) == plain
    printed(latex(other))


def test_a_file_that_a_user_changed_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    contents: dict[str, str | bytes] = {"methods.tex": "one", "figures/a.pdf": b"two", "b": "three"}
    monkeypatch.setattr(files, "paper_files", lambda folder, prefix: contents)
    target = tmp_path / "results"
    command = ["paper", str(tmp_path), "--output", str(target)]
    assert run(command, is_rank_zero=True) == 0
    written = files_below(target)
    for name in ("methods.tex", "figures/a.pdf", RECORD):
        (target / name).write_bytes(b"mine")
        (target / "b").unlink()
        before = files_below(target)
        capsys.readouterr()
        assert run(command, is_rank_zero=True) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(rf"{name} exists and is not as dptrain paper wrote it; .*--replace", line)
        assert files_below(target) == before
        assert run([*command, "--replace"], is_rank_zero=True) == 0
        assert files_below(target) == written
    contents["methods.tex"] = "a newer study"
    (target / "b").write_text("mine")
    del contents["b"], contents["figures/a.pdf"]
    assert run(command, is_rank_zero=True) == 0
    found = {name: data for name, data in files_below(target).items() if name != RECORD}
    assert found == {"methods.tex": b"a newer study", "b": b"mine"}


@pytest.mark.more
def test_the_same_study_has_the_same_files(small: Path, tmp_path: Path) -> None:
    assert files_below(write_paper(small, tmp_path)) == files_below(write_paper(small))


def test_a_prefix_has_the_characters_of_keys(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--prefix a_b is not valid in keys; expected small"):
        write_paper(small, tmp_path / "out", prefix="a_b")
    assert not (tmp_path / "out").exists()


def compiled(folder: Path, body: str) -> tuple[int, str]:
    """The exit code and the output of pdflatex for a document with these lines."""
    (folder / "main.tex").write_text(body)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "main"],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "HOME": str(folder), "max_print_line": "9999"},
    )
    return done.returncode, done.stdout


@pytest.mark.more
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_pdflatex_compiles_two_results_and_names_the_known_keys(
    folder: Path, paper: Path, tmp_path: Path
) -> None:
    study = Study.read(folder / "study.json")
    (tmp_path / "other").mkdir()
    hostile = {**study.job, "data": HOSTILE + r" \{~^é–×"}
    replace(study, job=hostile, notes=(HOSTILE,)).write(tmp_path / "other" / "study.json")
    write_paper(tmp_path / "other", tmp_path / "b", prefix="b")
    shutil.copytree(paper, tmp_path / "a")
    tables = "".join(rf"\input{{a/tables/{path.name}}}" for path in (paper / "tables").iterdir())
    start = r"\documentclass{article}\usepackage{graphicx}\input{a/values}\input{b/values}"
    body = (
        rf"{start}\begin{{document}}\section{{\dpvalue{{points-weak.4.efficiency}}}}"
        r"\input{a/sentences}\input{a/methods}\input{b/sentences}\input{b/methods}"
        r"\begin{figure}\includegraphics{a/figures/efficiency-weak.pdf}"
        r"\caption{\dpvalue{b/caption.efficiency-weak}}\end{figure}"
        rf"\tiny {tables}\dpvalue{{%s}}\end{{document}}"
    )
    code, output = compiled(tmp_path, body % "b/points-strong.2.step")
    assert code == 0, output
    code, output = compiled(tmp_path, body % "b/points-strong.3.step")
    assert code == 1
    assert "There is no value 'b/points-strong.3.step'" in output
    assert "b/points-strong.2.step b/points-strong.2.throughput" in output
    code, output = compiled(tmp_path, body % "nothing")
    assert re.search(
        r"no value 'nothing'. Keys begin with one of:.* points-weak .* b/caption", output
    )
    code, output = compiled(tmp_path, body % "points-weak.1.efficiency")
    assert code == 1
    assert "The value 'points-weak.1.efficiency' is withheld" in output
    code, output = compiled(tmp_path, body.replace("b/values", "a/values") % "points-weak.2.step")
    assert "is defined twice" in output


def test_the_sentences_of_a_page_have_the_parts_that_methods_lack(page: Page) -> None:
    names = [group.name for group in sentence_groups(page)]
    assert names[0] == "conclusion"
    assert "environment" not in names
    assert "definitions" not in names
