"""The list of published classifiers, and what its checks say about networks of known kinds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import checks
from benchmarks.zoo.__main__ import (
    CHECKS,
    OTHER_FILES,
    check,
    passes,
    read_rows,
    summary,
    write_rows,
)
from benchmarks.zoo.sources import minibatch
from tests.lazy import LazyModule

torch = LazyModule("torch")

ROW = {
    "library": "torchvision",
    "name": "small",
    "size": "8",
    **dict.fromkeys((*CHECKS, *OTHER_FILES), ""),
}


def small(*last: Any) -> Any:
    """Return a classifier of four layers, and what is put before its last one."""
    nn = torch.nn
    torch.manual_seed(2)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), *last, nn.Flatten())
    return nn.Sequential(*layers, nn.LazyLinear(5))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces every classifier by another one."""

    def replace(module: Any) -> None:
        module(torch.zeros(2, 3, 8, 8))
        monkeypatch.setattr(zoo, "make_module", lambda *arguments: module.eval())

    return replace


def test_each_classifier_is_in_the_list_once() -> None:
    rows = read_rows()
    names = [(row["library"], row["name"]) for row in rows]
    assert len(set(names)) == len(names)
    assert {library for library, _ in names} == {"torchvision", "timm"}
    assert all(set(row) == {"library", "name", "size", *CHECKS, *OTHER_FILES} for row in rows)


def test_the_page_counts_the_list() -> None:
    rows = read_rows()
    counts = [
        (sum(row["read"] == "yes" for row in rows if row["library"] == library),
         sum(row["library"] == library for row in rows))
        for library in ("torchvision", "timm")
    ]  # fmt: skip
    steps = [passes("step", row["step"]) for row in rows if row["step"]]
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "interchange.md").read_text("utf-8")
    stated = re.findall(r"(\d+) of (\d+)", page.partition("### Published classifiers")[2])
    assert [(int(a), int(b)) for a, b in stated[:3]] == [*counts, (sum(steps), len(steps))]


def test_only_missing_results_are_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        {**ROW, "name": "done", "read": "yes", "step": "1"},
        {**ROW, "name": "new", "read": "yes"},
        {**ROW, "name": "other", "read": "refused: why"},
    ]
    file = tmp_path / "list.csv"
    write_rows(rows, file)
    monkeypatch.setattr(zoo, "check", lambda row, *others: {**row, "step": "2"})
    options = ["--file", str(file), "--until", "step", "--missing"]
    CliRunner().invoke(zoo.main, options, catch_exceptions=False)
    assert [row["step"] for row in read_rows(file)] == ["1", "2", ""]


@pytest.mark.filterwarnings("ignore")
def test_a_network_passes_every_check(make: Any, tmp_path: Path) -> None:
    make(small())
    found = check(ROW, "exported", "torchscript", tmp_path)
    assert found["read"] == "yes"
    assert all(passes(name, found[name]) for name in CHECKS[1:]), list(found.values())


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_that_differs_does_not_pass(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(small())
    exact = zoo.gradient_error

    def with_larger_epsilon(found: Any, module: Any, *others: Any) -> Any:
        module[1].eps += 0.01
        return exact(found, module, *others)

    assert passes("step", check(ROW, "step", "torchscript", tmp_path)["step"])
    monkeypatch.setattr(zoo, "gradient_error", with_larger_epsilon)
    found = check(ROW, "step", "torchscript", tmp_path)["step"]
    assert not passes("step", found), found


@pytest.mark.filterwarnings("ignore")
def test_kinks_that_are_not_found_are_left_out(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(small(torch.nn.ReLU()))
    exact = zoo.gradient_error

    def with_kinks(found: Any, module: Any, *others: Any) -> Any:
        error = exact(found, module, *others)
        has_kinks = any(isinstance(each, torch.nn.ReLU) for each in module.modules())
        return replace(error, own=100 * error.theirs) if has_kinks else error

    monkeypatch.setattr(zoo, "gradient_error", with_kinks)
    found = check(ROW, "step", "torchscript", tmp_path)["step"]
    assert passes("step", found), found
    assert found.endswith(" if smooth, otherwise 1e+02"), found


@pytest.mark.filterwarnings("ignore")
def test_fixed_and_computed_weights_are_compared(make: Any, tmp_path: Path) -> None:
    class Standardised(torch.nn.Conv2d):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), keepdim=True)
            self.fixed: Any
            weight = (self.weight - mean) / std
            return torch.conv2d(torch.conv2d(x, weight), self.fixed, groups=4)

    layer = Standardised(4, 4, 3)
    layer.register_buffer("fixed", torch.full((4, 1, 2, 2), 0.25))
    make(small(layer))
    found = check(ROW, "step", "torchscript", tmp_path)
    assert passes("step", found["step"]), found


@pytest.mark.parametrize(
    ("function", "arguments", "point"),
    [("ReLU", (), 0), ("ReLU", (True,), 0), ("ReLU6", (), 6), ("Hardswish", (), -3),
     ("MaxPool2d", (2,), None), ("MaxPool2d", (3, 2, 1), None),
     ("MaxPool2d", (3, 2, 0, 1, False, True), None)],
)  # fmt: skip
def test_an_element_near_a_kink_explains_a_gradient_but_no_other(
    function: str, arguments: tuple[Any, ...], point: float | None
) -> None:
    from benchmarks.zoo.kinks import Distance, Kinks, explain

    class Shifted(torch.nn.Conv2d):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x) + self.shift

    torch.manual_seed(4)
    layer, (x, y) = Shifted(3, 4, 3), minibatch(8, 5)
    layer.register_buffer("shift", torch.zeros(len(x), 4, 6, 6))
    outputs = layer(torch.from_numpy(x)).detach()
    # An element is moved to the kink, or two of one window far above all others.
    for index in (0, 1) if point is None else (0,):
        layer.shift[1, 2, 0, index] = (9.0 if point is None else point) - outputs[1, 2, 0, index]
    nn = torch.nn
    module = nn.Sequential(layer, getattr(nn, function)(*arguments), nn.Flatten(), nn.LazyLinear(5))
    module(torch.from_numpy(x))

    def gradients(kind: str, kinks: Kinks) -> Any:
        return checks._torch_gradients(module, x, y, kind, kinks)[1]

    recorded = Kinks()
    gradients("float32", recorded)
    searched = Kinks(single=recorded.inputs)
    gradients("float64", searched)
    place = 36 * (4 * 1 + 2)
    (kink,) = (each for each in searched.near if each.index in (place, place + 1))
    other = gradients("float64", Kinks({kink}))
    rounding = Distance(dict.fromkeys(searched.first_uses.values(), 1e-20))
    for factor in (1.0, 1.01):

        def distance(moves: frozenset[Any], factor: float = factor) -> Distance:
            found = gradients("float64", Kinks(moves))
            return Distance(
                {
                    searched.first_uses[name]: float(np.sum((factor * values - found[name]) ** 2))
                    for name, values in other.items()
                }
            )

        found = explain(distance, searched.near, rounding, 1.0)
        if factor == 1.0:
            assert found == {kink}
        assert (float(distance(found)) <= 1e-9) == (factor == 1.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", OTHER_FILES[:1])
def test_files_for_training_have_a_column(make: Any, exporter: str, tmp_path: Path) -> None:
    make(small(torch.nn.Dropout(0.2)))
    before = {**ROW, "read": "yes", "step": "1.2"}
    assert check(before, "read", exporter, tmp_path) == {**before, exporter: "yes"}


@pytest.mark.filterwarnings("ignore")
def test_refusals_name_operator_and_node(make: Any, tmp_path: Path) -> None:
    class Sorted(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            return x.sort(dim=1).values

    make(small(Sorted()))
    file = tmp_path / "list.csv"
    write_rows([ROW], file)
    done = CliRunner().invoke(zoo.main, ["--file", str(file)], catch_exceptions=False)
    assert "read refused: node '/3/TopK' (TopK) is no layer of dptrain" in done.output
    assert "torchvision: read 0 of 1" in done.output
    assert "refused by TopK: 1" in done.output
    assert read_rows(file)[0]["read"].startswith("refused: node '/3/TopK' (TopK)")


def test_the_summary_counts_what_passes() -> None:
    results = {"read": "yes", "step": "1.2", "trained": "7.1 to 0.1", "exported": "3e-07"}
    wrong = {"read": "yes", "step": "45", "trained": "0.1 to 7", "exported": "fails: why"}
    rows = [{**ROW, **results}, {**ROW, **wrong}]
    assert summary(rows) == [
        "torchvision: read 2 of 2, step 1 of 2, trained 1 of 2, exported 1 of 2"
    ]
