"""The selection of kernels among candidates."""

from __future__ import annotations

from dptrain.plan.selection import KernelSelection, RankedSelection, worthwhile

RANKED = [(3.0, "c"), (2.0, "a"), (2.5, "b"), (2.0, "a"), (2.6, "d"), (2.1, "e"), (2.2, "f")]


def test_candidates_near_the_lowest_estimate_are_worthwhile() -> None:
    assert worthwhile(RANKED) == [(2.0, "a"), (2.1, "e"), (2.2, "f"), (2.5, "b")]


def test_the_lowest_estimate_is_picked_unless_another_candidate_is_named() -> None:
    def fail() -> list[tuple[float, str]]:
        raise AssertionError("no candidates are needed")

    assert KernelSelection().pick("conv1.forward", "a", fail) == "a"
    named = KernelSelection((("conv1.forward", "c"), ("conv2.forward", "missing")))
    assert named.pick("conv1.forward", "a", lambda: RANKED) == "c"
    assert named.pick("conv2.forward", "a", lambda: RANKED) == "a"
    assert named.pick("conv3.forward", "a", fail) == "a"


def test_a_ranked_selection_records_the_candidates() -> None:
    selection = RankedSelection(rank=1)
    assert selection.pick("conv1.forward", "a", lambda: RANKED) == "e"
    assert selection.pick("conv2.forward", "a", lambda: RANKED[:1]) == "a"
    assert selection.found["conv2.forward"] == [(3.0, "c")]
    assert selection.found["conv1.forward"] == worthwhile(RANKED)
