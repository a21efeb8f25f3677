"""Tables of algorithms: selection by estimates, by name, and what is listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dptrain.backends import load_backend
from dptrain.backends.numba.convolution import algorithms, direct_convolution
from dptrain.backends.numba.dense.algorithms import DENSE
from dptrain.describe import plan_for
from dptrain.measure.profile.explanations import explain_stages
from dptrain.network import get_network
from dptrain.network.zoo import NETWORKS
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import with_selection
from dptrain.plan.selection import (
    Algorithm,
    KernelSelection,
    RankedSelection,
    alone,
    fastest,
    rank,
    select,
)

FORWARD = (Phase.FORWARD,)


def algorithm(name: str, *times: float, phases: tuple[Phase, ...] = FORWARD) -> Algorithm[int]:
    """Return an algorithm for even numbers, with a configuration for each of several times."""
    configurations = [(time, f"{name} {number}") for number, time in enumerate(times)]
    estimates = configurations if len(times) > 1 else alone(*times)
    return Algorithm(name, phases, lambda n: n % 2 == 0, lambda n: estimates, lambda n: name)


TABLE = (algorithm("slow", 9.0), algorithm("tiles", 6.0, 5.0), algorithm("same", 4.0))


def test_the_lowest_estimate_of_those_that_support_the_case_is_selected() -> None:
    assert str(select(TABLE, Phase.FORWARD, 2)) == "same"
    assert str(select(TABLE[:2], Phase.FORWARD, 2)) == "tiles 1"
    assert [str(each) for each in rank(TABLE, Phase.FORWARD, 2)] == [
        "same", "tiles 1", "tiles 0", "slow",
    ]  # fmt: skip
    assert not rank(TABLE, Phase.FORWARD, 3)
    assert not rank(TABLE, Phase.BACKWARD_INPUT, 2)


def test_the_first_of_equal_estimates_is_selected() -> None:
    both = algorithm("first", 4.0), algorithm("same", 4.0)
    assert str(select(both, Phase.FORWARD, 2)) == "first"
    assert str(select(both[::-1], Phase.FORWARD, 2)) == "same"


def test_a_selection_names_an_algorithm_or_a_configuration() -> None:
    for name, expected in (("tiles 0", "tiles 0"), ("slow", "slow"), ("of no table", "same")):
        selection = KernelSelection((("conv1.forward", name),))
        assert str(select(TABLE, Phase.FORWARD, 2, selection, "conv1.forward")) == expected
        assert str(select(TABLE, Phase.FORWARD, 2, selection, "conv2.forward")) == "same"


def test_each_algorithm_is_listed_once() -> None:
    found = fastest(TABLE, Phase.FORWARD, 2)
    assert [(each.algorithm.name, each.estimate) for each in found] == [
        ("same", 4.0), ("tiles", 5.0), ("slow", 9.0),
    ]  # fmt: skip


def test_a_row_adds_an_algorithm_which_is_selected_and_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dummy computes as the implicit GEMM does, and estimates a part of its time."""
    for share, first in ((0.01, True), (100.0, False)):
        dummy = Algorithm(
            "dummy", FORWARD, lambda case: case.shape.maps[2] > 3,
            lambda case, share=share: alone(share * case.direct_ns), direct_convolution.plan,
        )  # fmt: skip
        table = (*algorithms.CONVOLUTION, dummy)
        with monkeypatch.context() as patch:
            patch.setattr(algorithms, "CONVOLUTION", table)
            rows = explain_stages(plan_for(get_network("model2"), backend="numba", batch_size=4))
        found = {(row.layers, row.phase): row for row in rows}
        row = found["conv2+relu2+pool2", "forward"]
        assert (row.algorithm == "dummy") is first
        assert ("dummy" in dict(row.others)) is not first
        # It supports no colour images and no other phase.
        others = [row for key, row in found.items() if key != ("conv2+relu2+pool2", "forward")]
        third = found["conv3+relu3+pool3", "forward"]
        assert all("dummy" not in (row.algorithm, *dict(row.others))
                   for row in others if row is not third)  # fmt: skip


def test_a_selection_fixes_an_algorithm_of_numba() -> None:
    plan = plan_for(get_network("model2"), backend="numba", batch_size=32)
    ranked = RankedSelection(rank=1)
    with_selection(plan, load_backend("numba"), ranked)
    stage = "conv2+relu2+pool2.forward"
    assert [str(each) for _, each in ranked.found[stage]][:1] == ["Winograd F(4×4, 3×3)"]
    setting = replace(plan.setting, selection=KernelSelection(((stage, "implicit GEMM"),)))
    rows = explain_stages(replace(plan, setting=setting))
    [row] = [row for row in rows if f"{row.layers}.{row.phase}" == stage]
    assert (row.algorithm, row.reason) == ("implicit GEMM", "fixed by the selection")


@pytest.mark.parametrize("table", [algorithms.CONVOLUTION, DENSE], ids=["convolution", "dense"])
def test_rows_have_distinct_names_and_serve_networks_of_the_zoo(
    table: tuple[Algorithm[object], ...],
) -> None:
    assert len({row.name for row in table}) == len(table)
    for row in table:
        assert all(gain.network in NETWORKS and gain.conditions for gain in row.serves)
        assert not row.serves or max(gain.factor for gain in row.serves) >= 1.03
