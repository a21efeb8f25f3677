"""Two studies are held against each other point by point."""

from __future__ import annotations

from benchmarks.agreement import agreement, compare
from dptrain.scaling.analysis import analyse
from tests.unit.scaling.synthetic import Law, make_launches


def test_the_same_law_agrees_and_another_does_not() -> None:
    one = analyse(make_launches(Law(noise=0.02), seed=1))
    two = analyse(make_launches(Law(noise=0.02), seed=2))
    found = compare(one, two)
    assert [c.name for c in found] == [
        "weak-r2-t1", "weak-r4-t1", "strong-r2-t1", "strong-r4-t1",
    ]  # fmt: skip
    assert agreement(found) >= 0.75
    slower = analyse(make_launches(Law(noise=0.02, imbalance=4), seed=2))
    assert agreement(compare(one, slower)) == 0
