"""Digests are equal over backends and find what `dptrain.backends.digests` promises."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dptrain import make_replica
from dptrain.backends.digests import StateDigests, numpy_digests
from dptrain.backends.replica import Replica
from dptrain.network import BatchNorm2d, Conv2d, Dense, Flatten, Network
from dptrain.plan import SGD
from tests.unit.cuda.launching import launch_in_every_order

NETWORK = Network((3, 7, 5), [Conv2d(5), BatchNorm2d(), Flatten(), Dense(3)], name="digested")

BOUNDS = np.array([0, 16, 1040, 70_016], np.int64)


def random_words(seed: int = 0, size: int = int(BOUNDS[-1])) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 2**32, size, np.uint32)


def by_definition(words: NDArray[np.uint32], bounds: NDArray[np.int64], first: int) -> list[int]:
    """Return Σ x_i (2 i + 1) modulo 2⁶⁴, in Python's integers."""
    odd = [(2 * (first + i) + 1) % 2**32 for i in range(words.size)]
    terms = [x * m for x, m in zip(words.tolist(), odd, strict=True)]
    return [sum(terms[a:b]) % 2**64 for a, b in pairwise(bounds.tolist())]


def replica(backend: str) -> Replica:
    return make_replica(
        NETWORK, batch_size=2, backend=backend, precision="fp32", optimizer=SGD(momentum=0.9)
    )


@pytest.mark.parametrize("first", [0, 12_345, 2**31 - 5, 2**33 + 1])
@pytest.mark.parametrize("backend", ["reference", "numba", "cuda"])
def test_backends_compute_the_digests_of_the_definition(backend: str, first: int) -> None:
    made, words = replica(backend), random_words()
    flat = made.memory.zeros((words.size,), "float32")
    made.memory.upload(flat.view("uint32"), words)
    found = made.backend.bind_digests(made, flat, BOUNDS, first)
    expected = by_definition(words, BOUNDS, first)
    assert found().tolist() == expected
    assert found().tolist() == expected, "a second call begins anew"


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_kernel_is_independent_of_blocks_and_order(blocks: int) -> None:
    words, bounds = random_words(), BOUNDS
    _, _, partials = launch_in_every_order(
        "digests.cu", "digest_parts", blocks * 256, words, bounds,
        np.zeros(3 * blocks, np.uint64), np.uint32(7), columns=3,
    )  # fmt: skip
    sums = partials.reshape(3, blocks).sum(axis=1, dtype=np.uint64)
    assert sums.tolist() == by_definition(words, bounds, 7)


@pytest.mark.parametrize("backend", ["reference", "numba", "cuda"])
def test_every_tensor_of_the_state_has_a_digest(backend: str) -> None:
    made = replica(backend)
    digests = StateDigests(made)
    state = {"parameters": made.parameters, "momentum": made.state["momentum"]}
    named: dict[str, Any] = {**state, "statistics": made.statistics}
    assert {tuple(each) for each in digests.tensors} == {
        (array, name) for array, values in named.items() for name in values
    }
    before = digests.compute()
    for number, (array, name) in enumerate(digests.tensors):
        values = named[array][name].copy()
        values.reshape(-1)[-1] += 1.0
        named[array][name] = values
        after = digests.compute()
        assert np.flatnonzero(after != before).tolist() == [number]
        before = after


@pytest.mark.parametrize("backend", ["numba", "cuda"])
def test_digests_of_slices_add_up(backend: str) -> None:
    """A slice may begin within a tensor; the ranks of a node own such slices."""
    made = replica(backend)
    size = made.plan.trained.size
    whole = StateDigests(made, slice(0, size))
    sums = dict.fromkeys(whole.tensors, 0)
    for part in (slice(0, 48), slice(48, 160), slice(160, size)):
        slices = StateDigests(made, part)
        for tensor, value in zip(slices.tensors, slices.compute().tolist(), strict=True):
            sums[tensor] = (sums[tensor] + value) % 2**64
    assert list(sums.values()) == whole.compute().tolist()


WORD = st.integers(0, 2**32 - 1)
PLACE = st.tuples(st.integers(0, 2**20 - 1), st.integers(0, 31))


def digest_of(changes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the digests before and after changes of single words, of all words at once."""
    size = 2**20
    before = random_words(3, size)
    after = before.copy()
    for at, (old, new) in changes.items():
        before[at], after[at] = old, new
    bounds = np.array([0, size])
    return int(numpy_digests(before, bounds, 0)()[0]), int(numpy_digests(after, bounds, 0)()[0])


@given(st.integers(0, 2**20 - 1), WORD, WORD)
def test_any_change_of_a_word_is_found(at: int, old: int, new: int) -> None:
    before, after = digest_of({at: (old, new)})
    assert (before == after) == (old == new)


@given(st.sets(PLACE, min_size=2, max_size=2), WORD, WORD)
def test_any_two_flipped_bits_are_found(places: set[tuple[int, int]], one: int, other: int) -> None:
    words: dict[int, tuple[int, int]] = {}
    for (at, bit), value in zip(sorted(places), (one, other), strict=True):
        old, new = words.get(at, (value, value))
        words[at] = old, new ^ (1 << bit)
    before, after = digest_of(words)
    assert before != after


@given(st.data(), st.integers(0, 30))
def test_an_odd_number_of_flips_of_the_lowest_bit_is_found(data: st.DataObject, bit: int) -> None:
    number = 2 * data.draw(st.integers(0, 3)) + 1
    lowest = st.sets(st.integers(0, 2**20 - 1), min_size=number, max_size=number)
    higher = st.sets(st.tuples(st.integers(0, 2**20 - 1), st.integers(bit + 1, 31)), max_size=8)
    words: dict[int, tuple[int, int]] = {}
    for at, flipped in [(at, bit) for at in data.draw(lowest)] + sorted(data.draw(higher)):
        old, new = words.get(at, (0xA5A5A5A5, 0xA5A5A5A5))
        words[at] = old, new ^ (1 << flipped)
    before, after = digest_of(words)
    assert before != after
