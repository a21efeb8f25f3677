"""Roofs: the product of an independent library, its threads, and the highest rates."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.measure import roofs
from dptrain.measure.machine import blas
from dptrain.measure.machine.blas import OpenBlas, product_rate
from dptrain.measure.profile.profile import Roofs
from dptrain.measure.profile.rooflines import highest_roofs
from dptrain.network.layers import Dense
from dptrain.network.network import Network
from dptrain.plan.plan import Plan, make_plan


def plan_of(backend_name: str, threads: int) -> Plan:
    network = Network((8,), [Dense(4)], name="small")
    return make_plan(network, load_backend(backend_name), 4, threads=threads)


@pytest.fixture
def library() -> OpenBlas:
    found = OpenBlas.find()
    if found is None:
        pytest.skip("NumPy has another BLAS library")
    return found


def test_a_product_has_the_threads_of_the_rank(
    library: OpenBlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, product, used = library.threads, np.matmul, set[int]()

    def counted(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        used.add(library.threads)
        return product(a, b, out=out)

    monkeypatch.setattr(blas.np, "matmul", counted)
    for threads in (1, 2):
        used.clear()
        rate = product_rate(64, np.float32, threads)
        assert rate is not None
        assert rate > 0.1
        assert used == {threads}
        assert library.threads == before


def test_the_number_of_threads_is_restored_after_an_error(library: OpenBlas) -> None:
    before = library.threads
    during = []

    def fail() -> None:
        with library.with_threads(before + 1):
            during.append(library.threads)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (during, library.threads) == ([before + 1], before)


def test_another_library_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(blas, "_MAPS", tmp_path / "missing")
    assert product_rate(64, np.float32, 1) is None
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 0 00:00 0 /usr/lib/libmkl_rt.so\n")
    monkeypatch.setattr(blas, "_MAPS", tmp_path / "maps")
    assert product_rate(64, np.float32, 1) is None
    monkeypatch.setattr(roofs, "_product_rate", lambda *_: 7.0)
    found = roofs._host_products(load_backend("numba"), plan_of("numba", 1))
    assert found == (("numba", 7.0),)


@pytest.mark.parametrize(("own", "theirs", "peak"), [(80.0, 100.0, 100.0), (120.0, 100.0, 120.0)])
def test_the_faster_product_is_the_roof(
    own: float, theirs: float, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofs, "_product_rate", lambda *_: own)
    monkeypatch.setattr(roofs, "product_rate", lambda *_: theirs)
    monkeypatch.setattr(roofs, "bandwidths", lambda sizes, _: ((sizes[-1], 10.0),))
    plan = plan_of("numba", 1)
    backend = load_backend("numba")
    found = roofs.measure_roofs(backend, plan, backend.make_replica(plan).memory)
    assert found.gflops == peak
    assert found.products == (("numba", own), ("OpenBLAS", theirs))
    assert f"numba {own:.1f} GFLOP/s and OpenBLAS {theirs:.1f} GFLOP/s" in found.how


def test_the_rank_with_the_highest_rate_describes_it() -> None:
    of_ranks = [
        Roofs(peak, 10.0, f"measured {peak}", ((8, 10.0),), (("numba", peak),))
        for peak in (90.0, 110.0, 100.0)
    ]
    found = highest_roofs(of_ranks)
    assert (found.gflops, found.how) == (110.0, "measured 110.0")
    assert found.products == (("numba", 110.0),)


def test_double_precision_is_compared_with_double_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set()

    def rate(size: int, dtype: type, threads: int) -> float:
        seen.add((dtype, threads))
        return 1.0

    monkeypatch.setattr(roofs, "_product_rate", lambda *_: 1.0)
    monkeypatch.setattr(roofs, "product_rate", rate)
    network = Network((8,), [Dense(4)], name="small")
    backend = load_backend("reference")
    for precision in ("fp32", "fp64"):
        roofs._host_products(backend, make_plan(network, backend, 4, precision=precision))
    assert {dtype for dtype, _ in seen} == {np.float32, np.float64}
