"""What ranks do together, with answers in closed form. Twice each: first calls set things up."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dptrain.comm import world as world_module
from dptrain.comm.deadline import RankTimeoutError
from dptrain.comm.world import AgreedError, World
from dptrain.errors import UserError

pytestmark = pytest.mark.mpi
TWICE = range(2)


def test_places(world: World) -> None:
    assert 0 <= world.local_rank < world.local_size <= world.size
    assert world.is_rank_zero == (world.rank == 0)
    assert world.first_on_node() == (world.local_rank == 0)
    assert world.local_cores >= 1
    assert world.all_gather_json(world.rank) == list(range(world.size))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5), (1000,)])
def test_all_reduce_of_rank_numbers(world: World, dtype: str, shape: tuple[int, ...]) -> None:
    for _ in TWICE:
        array = np.full(shape, world.rank + 1, dtype)
        world.all_reduce(array)
        expected = world.size * (world.size + 1) // 2
        np.testing.assert_array_equal(array, np.full(shape, expected, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bool", "S3", "int8"])
def test_broadcast_from_every_rank(world: World, dtype: str) -> None:
    for _ in TWICE:
        for root in range(world.size):
            source = (np.arange(12) + root).astype(dtype).reshape(3, 4)
            array = source.copy() if world.rank == root else np.zeros_like(source)
            world.broadcast(array, root)
            np.testing.assert_array_equal(array, source)


def test_arrays_need_not_be_contiguous(world: World) -> None:
    base = np.full((4, 6), float(world.rank))
    world.broadcast(base[:, ::2], world.size - 1)
    assert (base[:, ::2] == world.size - 1).all()
    assert (base[:, 1::2] == world.rank).all(), "elements between the view's are touched"
    base[:] = 1.0
    world.all_reduce(base.T[1])
    assert (base[:, 1] == world.size).all()
    assert (base[:, 2] == 1.0).all()


def test_more_elements_than_one_call_takes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut into pieces, at a size that a test can afford."""
    monkeypatch.setattr(world_module, "PIECE", 7)
    array = np.arange(23.0)
    world.all_reduce(array)
    np.testing.assert_array_equal(array, np.arange(23.0) * world.size)
    array = np.arange(23.0) if world.is_rank_zero else np.zeros(23)
    world.broadcast(array)
    np.testing.assert_array_equal(array, np.arange(23.0))


def test_json_of_different_lengths(world: World) -> None:
    for _ in TWICE:
        value = {"rank": world.rank, "text": "ä" * (5 * world.rank), "list": [1.5, None, True]}
        expected = [
            {"rank": r, "text": "ä" * (5 * r), "list": [1.5, None, True]} for r in range(world.size)
        ]
        assert world.all_gather_json(value) == expected
        assert world.gather_json(value) == (expected if world.is_rank_zero else None)
        assert world.broadcast_json(value) == expected[0]


def test_barriers_hold_everyone(world: World) -> None:
    for slowest in range(world.size):
        if world.rank == slowest:
            time.sleep(0.05)
        arrived = time.time()
        world.barrier()
        left = time.time()
        assert left >= max(world.all_gather_json(arrived)) - 1e-3, "left before the last arrived"
    world.node_barrier()


@pytest.mark.mpi(min_size=2)
def test_the_ranks_of_a_node_wait_longer_for_one_that_compiles(
    connected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connected, "timeout", 0.02)
    if connected.first_on_node():
        time.sleep(0.2)
    connected.node_barrier(60.0)


def test_equal_arrays_pass(world: World) -> None:
    for _ in TWICE:
        world.check_equal(np.arange(5.0), "parameters")
        world.check_equal(np.zeros(0), "nothing")


@pytest.mark.mpi(min_size=2)
def test_unequal_arrays_are_named_with_their_ranks(connected: World) -> None:
    array = np.zeros(1000)
    if connected.rank == connected.size - 1:
        array[999] = np.nextafter(0.0, 1.0)
    with pytest.raises(RuntimeError, match=f"parameters of rank {connected.size - 1} differ"):
        connected.check_equal(array, "parameters")


def test_no_error_is_agreed_silently(world: World) -> None:
    for _ in TWICE:
        world.agree(None)


def test_an_error_of_all_ranks_needs_no_rank(world: World) -> None:
    with pytest.raises(AgreedError, match=r"^no data$"):
        world.agree(UserError("no data"))


@pytest.mark.mpi(min_size=2)
def test_a_process_joins_its_ranks_as_often_as_it_likes(connected: World) -> None:
    """MPICH has 2,048 communicators."""
    assert connected._node is not None
    for _ in range(3):
        again = World.join(connected.timeout)._node
        assert again is not None
        assert again.py2f() == connected._node.py2f()


@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank_reaches_all_with_its_number(connected: World) -> None:
    for bad in range(connected.size):
        with pytest.raises(AgreedError, match=rf"^rank {bad}: no data$"):
            connected.agree(UserError("no data") if connected.rank == bad else None)


@pytest.mark.mpi(min_size=2)
def test_the_lowest_rank_speaks_when_errors_differ(connected: World) -> None:
    with pytest.raises(AgreedError, match=r"^rank 0: mistake 0$"):
        connected.agree(UserError(f"mistake {connected.rank}"))


@pytest.mark.mpi(min_size=2)
def test_a_wait_without_end_ends(connected: World) -> None:
    comm = connected.comm
    assert comm is not None
    short = World(comm, None, timeout=0.2)
    buffer = np.zeros(1)
    request = comm.Irecv(buffer, source=connected.rank, tag=77)
    with pytest.raises(RankTimeoutError, match=r"^waited 0 s for a letter: another rank") as raised:
        short.wait(request, "a letter")
    assert raised.value.rank == connected.rank
    assert not raised.value.is_cause
    request.Cancel()
    request.Wait()
    connected.barrier()  # A rank that ends its program meanwhile would be the cause.
