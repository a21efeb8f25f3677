"""All ranks find the same differences between their settings, and refuse to train."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import dptrain
from dptrain.comm import agreement
from dptrain.comm.agreement import agree, describe_differences
from dptrain.comm.world import AgreedError, World
from dptrain.errors import UserError


class Gathered(World):
    """One rank of several, with what all ranks have sent."""

    def __init__(self, reports: Sequence[Any]) -> None:
        super().__init__(None, None, 1.0)
        self.reports = reports

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the prepared values, of which this rank sends one."""
        assert value in self.reports
        return list(self.reports)


def reports(
    facts: Sequence[Mapping[str, Any]], errors: Sequence[str | None] = ()
) -> list[dict[str, Any]]:
    own = {"version": dptrain.__version__}
    padded = [*errors, *[None] * (len(facts) - len(errors))]
    return [
        {"error": error, "facts": {**own, **values}}
        for values, error in zip(facts, padded, strict=True)
    ]


def refused(facts: Sequence[Mapping[str, Any]], errors: Sequence[str | None] = ()) -> str:
    """The error, the same on every rank."""
    everything = reports(facts, errors)
    messages = set()
    for values, report in zip(facts, everything, strict=True):
        error = None if report["error"] is None else UserError(report["error"])
        with pytest.raises(AgreedError) as caught:
            agree(Gathered(everything), values, error)
        messages.add(str(caught.value))
    (message,) = messages
    assert "\n" not in message
    return message


def test_equal_ranks_agree() -> None:
    facts = {"learning_rate": 0.1, "data": "digits", "crop": None, "filters": [1, 2]}
    agree(Gathered(reports([facts] * 3)), facts)
    agree(World.single(), facts)


def test_a_difference_names_the_setting_its_values_and_ranks() -> None:
    rates = [0.02, 0.05, 0.02, 0.02]
    assert refused([{"learning_rate": rate, "seed": 0} for rate in rates]) == (
        "the ranks differ in learning_rate: 0.02 on ranks 0, 2-3; 0.05 on rank 1; "
        "start all ranks with the same flags, DPTRAIN_* variables and files"
    )


def test_many_differences_are_counted() -> None:
    message = refused([{f"s{i}": i for i in range(7)}, {f"s{i}": -1 for i in range(7)}])
    assert "s0: 0 on rank 0; -1 on rank 1" in message
    assert "s2: 2 on rank 0" in message
    assert "s3" not in message
    assert "and 4 more" in message


def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, version = reports([{}]), re.escape(dptrain.__version__)
    monkeypatch.setattr(dptrain, "__version__", "9.9.1")
    everything += reports([{}])
    with pytest.raises(
        AgreedError, match=rf"differ in version: {version} on rank 0; 9\.9\.1 on rank 1"
    ):
        agree(Gathered(everything), {})


def test_a_setting_that_a_rank_lacks_differs() -> None:
    assert "crop: 4 on rank 0; not set on rank 1;" in refused([{"crop": 4}, {}])
    assert "crop: not set on rank 0; 4 on rank 1;" in refused([{}, {"crop": 4}])
    assert describe_differences([{"a": "not set"}, {}]) is not None


def test_the_error_of_one_rank_comes_first_and_names_the_rank() -> None:
    message = refused([{"seed": 1}, {"seed": 2}], [None, "No such option: --wrong"])
    assert message == "rank 1: No such option: --wrong"
    assert refused([{}, {}], ["bad", "bad"]) == "bad"
    with pytest.raises(AgreedError, match=r"^bad$"):
        agree(World.single(), {}, UserError("bad"))


def test_long_values_are_cut_where_they_differ() -> None:
    folder = "/scratch/" + 200 * "x"
    message = refused([{"data": f"npz:{folder}/a.npz"}, {"data": f"npz:{folder}/b.npz"}])
    assert "/a.npz on rank 0" in message
    assert "/b.npz on rank 1" in message
    assert len(message) < 300


def random_value(draw: random.Random) -> Any:
    return draw.choice([
        None, True, False, draw.randint(-3, 3), draw.random(), -0.0, 0.0, "", "0", "true",
        "none", "null", "not set", "digits", "npz:/data/" + draw.choice("ab") * draw.randint(1, 90),
        [draw.randint(0, 2)], {"kind": draw.choice("ab")},
    ])  # fmt: skip


def is_same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)


def test_100_random_pairs_are_refused_by_name() -> None:
    draw = random.Random(16)
    names = ["seed", "learning_rate", "data", "network", "steps", "crop", "digest"]
    trials = 0
    while trials < 100:
        common = {name: random_value(draw) for name in names}
        changed = draw.sample(names, draw.randint(1, len(names)))
        other = {**common, **{name: random_value(draw) for name in changed}}
        different = [name for name in names if not is_same(common[name], other[name])]
        if not different:
            continue
        trials += 1
        message = refused([common, other])
        listed = different[: agreement.MAX_LISTED]
        for name in listed:
            assert f"{name}: " in message, (common, other, message)
        more = len(different) - len(listed)
        assert (f"and {more} more" in message) == (more > 0)
