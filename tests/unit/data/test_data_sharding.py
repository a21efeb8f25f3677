"""Which sample goes where."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dptrain.data.loading.sharding import epoch_order, minibatch, shard, steps_per_epoch

samples = st.integers(1, 200)
batches = st.integers(1, 64)
seeds = st.integers(0, 2**63)


@given(samples, batches, st.integers(1, 9), seeds, st.integers(0, 5))
def test_every_sample_is_used_exactly_once_an_epoch(n, batch, size, seed, epoch):
    used = []
    steps = steps_per_epoch(n, batch)
    for step in range(epoch * steps, (epoch + 1) * steps):
        everyone = minibatch(n, batch, seed, step)
        used += [i for rank in range(size) for i in everyone[shard(len(everyone), rank, size)]]
    assert sorted(used) == list(range(n))


@given(samples, batches, seeds, st.integers(0, 400))
def test_minibatches_are_full_but_for_the_last_of_an_epoch(n, batch, seed, step):
    steps = steps_per_epoch(n, batch)
    last = step % steps == steps - 1
    assert len(minibatch(n, batch, seed, step)) == (n - (steps - 1) * batch if last else batch)


@given(st.integers(0, 300), st.integers(1, 40))
def test_shards_are_disjoint_contiguous_and_level(count, size):
    spans = [shard(count, rank, size) for rank in range(size)]
    assert [i for span in spans for i in range(count)[span]] == list(range(count))
    lengths = [span.stop - span.start for span in spans]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(samples, batches, seeds, st.integers(0, 400))
def test_a_minibatch_is_a_pure_function(n, batch, seed, step):
    state = np.random.get_state()[1].copy()
    first = minibatch(n, batch, seed, step)
    minibatch(n, batch, seed + 1, step + 1)
    np.testing.assert_array_equal(first, minibatch(n, batch, seed, step))
    np.testing.assert_array_equal(state, np.random.get_state()[1])


def test_orders_differ_between_epochs_and_seeds():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_first_sample_is_uniform():
    # 2,000 draws from 10: each count is binomial with mean 200 and deviation 13.4; five of those.
    counts = np.bincount([epoch_order(10, 7, epoch)[0] for epoch in range(2000)], minlength=10)
    assert abs(counts - 200).max() < 67


def test_the_order_is_the_documented_one_for_ever():
    # The words of Philox are fixed by its paper: sorting them needs no NumPy generator.
    words = np.random.Philox(key=np.array([3, 5], np.uint64)).random_raw(6)
    assert list(epoch_order(6, 3, 5)) == sorted(range(6), key=lambda i: words[i])


def test_equal_random_numbers_keep_the_order_of_the_samples(monkeypatch):
    words = np.arange(500, dtype=np.uint64) % 3

    class Equal:
        def __init__(self, key):
            pass

        def random_raw(self, count):
            return words[:count]

    monkeypatch.setattr(np.random, "Philox", Equal)
    assert list(epoch_order(500, 0, 0)) == sorted(range(500), key=lambda i: words[i])
