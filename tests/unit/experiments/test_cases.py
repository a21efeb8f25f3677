"""Which cases a bench has."""

from __future__ import annotations

import itertools

import pytest

from dptrain.cli.bench import list_sizes
from dptrain.errors import UserError
from dptrain.experiments.cases import (
    INFERENCE,
    LARGEST,
    PERCEPTRONS,
    SAMPLES,
    TRAINING,
    BenchSettings,
    flops,
    list_cases,
)


def test_the_perceptrons_are_30_with_the_batches_of_the_study() -> None:
    cases, networks = list_cases(BenchSettings((PERCEPTRONS,)))
    assert len(networks) == 30
    widest = (50, 25600, 12800, 6656, 1)
    parameters = sum((a + 1) * b for a, b in itertools.pairwise(widest))
    assert max(n.num_parameters for n in networks.values()) == parameters
    trained = [(c.network, c.samples) for c in cases if c.task == TRAINING]
    assert len(trained) == len(set(trained)) == 90
    assert {samples for _, samples in trained} == {100, 500, 1000}
    assert {c.samples for c in cases if c.task == INFERENCE} == set(SAMPLES)


def test_solar_has_the_batches_of_the_study() -> None:
    cases, _ = list_cases(BenchSettings(("solar",)))
    assert [c.samples for c in cases if c.task == TRAINING] == [2, 8, 32, 64, 128, 256, 512, 1024]


def test_what_answers_soonest_comes_first_and_searches_come_last() -> None:
    cases, networks = list_cases(BenchSettings(("solar", "model0", PERCEPTRONS), largest=True))
    timed = [case for case in cases if not case.searches]
    work = [flops(networks[case.network], case) for case in timed]
    assert work == sorted(work)
    assert all(case.searches for case in cases[len(timed) :])
    assert len(cases) - len(timed) == 2 * len(networks)
    assert {case.task for case in cases[len(timed) :]} == {LARGEST + TRAINING, LARGEST + INFERENCE}


def test_the_largest_batches_alone_need_no_timed_case() -> None:
    cases, _ = list_cases(BenchSettings(("solar",), batch_sizes=(), samples=(), largest=True))
    assert [case.task for case in cases] == [LARGEST + INFERENCE, LARGEST + TRAINING]
    assert list_sizes(None, None, largest=True) == ((), ())
    assert list_sizes("none", None, largest=True) == ((), SAMPLES)
    assert list_sizes(None, "3", largest=True) == (None, (3,))
    assert list_sizes(None, None, largest=False) == (None, SAMPLES)


def test_keys_tell_cases_apart() -> None:
    settings = BenchSettings(
        ("solar", "model0"),
        backends=("numba", "reference"),
        precisions=("fp32", "fp64"),
        threads=(1, 2),
        largest=True,
    )
    cases, _ = list_cases(settings)
    assert len({case.key for case in cases}) == len(cases)
    # fp64 is the reference's alone, and threads are numba's alone.
    assert {case.configuration for case in cases} == {
        ("numba", "fp32", 1),
        ("numba", "fp32", 2),
        ("reference", "fp32", 1),
        ("reference", "fp64", 1),
    }


def test_each_backend_has_a_precision_of_its_own_where_none_is_named() -> None:
    cases, _ = list_cases(BenchSettings(("model0",), backends=("numba", "reference", "cuda")))
    assert {case.configuration[:2] for case in cases} == {
        ("numba", "fp32"),
        ("reference", "fp64"),
        ("cuda", "fp32"),
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (BenchSettings(("model9",)), "no network 'model9'"),
        (
            BenchSettings(("model0",), precisions=("fp8",)),
            "no precision 'fp8' with numba; expected",
        ),
        (BenchSettings(("model0",), backends=("cuda9",)), "no backend 'cuda9'"),
        (BenchSettings(("model0",), batch_sizes=(0,)), "batch size is 0; expected at least 1"),
        (
            BenchSettings(("model0",), batch_sizes=(), samples=()),
            "nothing to measure; pass --batch-sizes",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(settings: BenchSettings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list_cases(settings)
