"""Plots as files: text is text, colours have roles, pictures are there for everybody."""

from __future__ import annotations

import io
import re
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from dptrain.experiments.plots import figure
from dptrain.report.elements.canvas import DARK, LIGHT, PARTS, WIDTH, Plot, inline
from dptrain.report.elements.canvas import plot as draw_plot
from dptrain.report.elements.conditions import png_with, svg_with
from dptrain.report.profiles.profile_page import MeasuredProfile
from dptrain.report.profiles.profile_plots import profile_plots
from dptrain.report.studies.study_plots import study_plots
from dptrain.scaling.study import Study
from tests.unit.scaling.synthetic import Law, write_study
from tests.unit.scaling.test_efficiencies import with_pop

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", autouse=True)
def small_pictures() -> None:
    """Draw PNG files as reports have them, unlike other modules."""


@pytest.fixture(scope="module")
def plots(tmp_path_factory: pytest.TempPathFactory) -> list[Plot]:
    folder = tmp_path_factory.mktemp("study")
    write_study(folder, Law(per_node=1, sample=2.0, noise=0.005), (1, 2, 4, 8, 16))
    study = Study.read(folder / "study.json")
    profile = MeasuredProfile.read(folder / study.profiles["weak-r8-t1"]).profile
    return [*study_plots(study), *profile_plots(with_pop(profile))]


@pytest.mark.filterwarnings("error")
def test_labels_are_no_formulas(tmp_path: Path) -> None:
    names = [r"$\bad$", "$5 and $6", "猫", "a_1^2"]

    def label(axes: Axes) -> None:
        axes.set_xticks(range(len(names)), names)

    drawn = draw_plot("names", "Names", "", label, caption="", alt="Names.")
    written: list[Path] = []
    with figure(tmp_path / "names", written, x="", y="", title=names[0]) as axes:
        label(axes)
    for svg in (drawn.svg, written[0].read_text(encoding="utf-8")):
        texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
        assert set(names) <= set(texts)
    assert drawn.pdf()


@pytest.mark.more
def test_all_kinds_are_drawn(plots: list[Plot]) -> None:
    names = {plot.name for plot in plots}
    for kind in ("efficiency", "speed-up", "parts", "forecast"):
        assert {f"{kind}-weak", f"{kind}-strong"} <= names
    assert {"layers", "roofline", "ranks", "pop-step"} <= names
    assert len(names) == len(plots)


@pytest.mark.more
def test_an_svg_is_whole_and_its_text_is_text(plots: list[Plot]) -> None:
    for plot in plots:
        root = ElementTree.fromstring(plot.svg)
        assert root.findtext(f"{SVG}title") == plot.title
        assert root.findtext(f"{SVG}desc") == plot.alt
        texts = [element.text for element in root.iter(f"{SVG}text")]
        assert plot.title in texts
        assert len(texts) > 5
        assert "<image" not in plot.svg


@pytest.mark.more
def test_a_colour_is_one_of_the_roles(plots: list[Plot]) -> None:
    # Any other would stay as it is where the reader's screen is dark.
    for plot in plots:
        assert set(re.findall(r"#[0-9a-f]{6}\b", plot.svg)) <= set(LIGHT.values()), plot.name
        assert not re.findall(r"#[0-9a-f]{6}\b", inline(plot)), plot.name


@pytest.mark.more
def test_plots_can_stand_in_one_page(plots: list[Plot]) -> None:
    inlined = [inline(plot) for plot in plots]
    found = [set(re.findall(r'\bid="([^"]+)"', text)) for text in inlined]
    assert all(not one & other for one, other in combinations(found, 2))
    for ids, text in zip(found, inlined, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', text)) <= ids
        assert "<style" not in text


@pytest.mark.more
def test_a_png_is_a_picture_of_it(plots: list[Plot]) -> None:
    for plot in plots:
        picture = np.asarray(Image.open(io.BytesIO(plot.png)).convert("RGB"))
        assert picture.shape[1] > 3 * WIDTH
        drawn = (picture != 255).any(axis=2).mean()
        assert 0.01 < drawn < 0.9, plot.name


def luminance(colour: str) -> float:
    """Relative luminance; source: WCAG 2.2, "relative luminance"."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_parts_can_be_told_apart_without_colour(palette: dict[str, str]) -> None:
    # 4.5 is WCAG's least for text, AA. Neighbours in a bar have no text, but must be seen to end;
    # a white line besides separates them.
    assert contrast(palette["ink"], palette["paper"]) >= 4.5
    assert contrast(palette["faint"], palette["paper"]) >= 4.5
    for one, other in pairwise(PARTS.values()):
        assert contrast(palette[one], palette[other]) >= 1.5, (one, other)
    assert set(LIGHT) == set(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT)


def test_a_study_is_not_needed_to_have_two_ways(tmp_path: Path) -> None:
    write_study(tmp_path, Law(), (1,))
    study = Study.read(tmp_path / "study.json")
    assert {"efficiency-weak", "parts-weak"} <= {plot.name for plot in study_plots(study)}


def test_files_have_the_conditions_below_the_plot_and_the_page_has_not() -> None:
    drawn = draw_plot(
        "p", "Title", "y", lambda axes: axes.plot([1, 2]), caption="", alt="A plot <of> x & y."
    )
    text = 'Training of <model0> & "more" on digits. ' * 4 + "Other programs used 1.5 cores."
    root = ElementTree.fromstring(svg_with(drawn, text))
    below = list(root.findall(f"{SVG}text"))
    assert " ".join(element.text or "" for element in below) == text
    _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
    original = ElementTree.fromstring(drawn.svg).attrib["viewBox"].split()
    assert (width, [float(original[3]) < float(e.attrib["y"]) < height for e in below]) == (
        float(original[2]), [True] * len(below),
    )  # fmt: skip
    assert "Other programs" not in inline(drawn)
    before, after = (Image.open(io.BytesIO(png)) for png in (drawn.png, png_with(drawn, text)))
    assert after.info["Software"] == "dptrain report"
    assert after.width == before.width
    same = after.convert("RGB").crop((0, 0, *before.size))
    assert same.tobytes() == before.convert("RGB").tobytes()
    added = np.asarray(after.convert("L"))[before.height :]
    assert added.shape[0] >= 30
    assert added.min() < 200
