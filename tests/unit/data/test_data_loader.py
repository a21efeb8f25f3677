"""Batches read ahead: their samples, the reuse of memory, and the end of the thread."""

import sys
import threading
import time

import numpy as np
import pytest

from dptrain.data import (
    Augmentation,
    CropWindowLoader,
    Loader,
    Sampler,
    Samples,
    open_data,
)
from dptrain.data.loading.crop_windows import SPANS_AHEAD
from dptrain.data.loading.loader import SWITCH_INTERVAL_S
from dptrain.data.loading.sharding import minibatch, shard, steps_per_epoch
from dptrain.data.stored import CachedSamples
from dptrain.errors import UserError


class Numbers(Samples):
    """Sample i is the number i; reading may fail or wait."""

    def __init__(self, count, *, fail_at=None, gate=None):
        self.count, self.fail_at, self.gate, self.reads = count, fail_at, gate, 0

    def __len__(self):
        return self.count

    def read(self, indices, x, y):
        if self.gate is not None:
            self.gate.wait()
        self.reads += 1
        if self.fail_at is not None and self.fail_at in indices:
            raise UserError(f"sample {self.fail_at} is damaged")
        x[...] = indices[:, None]
        y[...] = indices


def loader(samples, *, windows=False, **changes):
    settings = {
        "input_shape": (2,), "target_shape": (), "batch_size": 4, "seed": 3, "rank": 0, "size": 1,
        "first_step": 0, "last_step": 10,
    }  # fmt: skip
    settings |= changes
    names = ("batch_size", "seed", "rank", "size")
    passes = settings.pop("passes", 1)
    sampler = Sampler(len(samples), *(settings.pop(name) for name in names), passes=passes)
    steps = range(settings.pop("first_step"), settings.pop("last_step"))
    kind = CropWindowLoader if windows else Loader
    return kind(samples, sampler, steps, **settings)


def threads():
    """Threads of loaders; compute threads of other tests have numbers."""
    kinds = ("dptrain-loader", "dptrain-order", "dptrain-windows")
    return [t for t in threading.enumerate() if t.name.startswith(kinds)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(("count", "batch_size"), [(10, 4), (3, 8), (12, 3), (1, 1)])
def test_ranks_together_read_the_minibatches_of_every_step(count, batch_size, size):
    last = 2 * steps_per_epoch(count, batch_size) + 1
    parts = {step: [] for step in range(1, last)}
    for rank in range(size):
        changes = {"batch_size": batch_size, "rank": rank, "size": size}
        with loader(Numbers(count), first_step=1, last_step=last, **changes) as batches:
            for step, batch in zip(range(1, last), batches, strict=True):
                everyone = minibatch(count, batch_size, 3, step)
                np.testing.assert_array_equal(
                    batch.samples, everyone[shard(len(everyone), rank, size)]
                )
                np.testing.assert_array_equal(batch.x[:, 0], batch.samples)
                np.testing.assert_array_equal(batch.y, batch.samples)
                assert batch.step == step
                assert batch.epoch == step // steps_per_epoch(count, batch_size)
                assert batch.global_count == len(everyone)
                parts[step] += list(batch.samples)
    for step, used in parts.items():
        assert used == list(minibatch(count, batch_size, 3, step))


@pytest.mark.parametrize(("count", "batch_size"), [(10, 4), (13, 9), (3, 8)])
@pytest.mark.parametrize(("size", "passes"), [(1, 2), (1, 3), (2, 2), (3, 4)])
def test_a_pass_has_the_same_samples_on_any_number_of_ranks(count, batch_size, size, passes):
    last = steps_per_epoch(count, batch_size)
    read = {}
    for rank in range(size):
        changes = {"batch_size": batch_size, "rank": rank, "size": size, "passes": passes}
        with loader(Numbers(count), last_step=last, **changes) as batches:
            found = list(batches)
        assert [(b.step, b.part) for b in found] == [
            (step, part) for step in range(last) for part in range(passes)
        ]
        for batch in found:
            np.testing.assert_array_equal(batch.x[:, 0].shape, batch.samples.shape)
            read.setdefault((batch.step, batch.part), []).extend(batch.samples.tolist())
    for step in range(last):
        everyone = minibatch(count, batch_size, 3, step)
        for part in range(passes):
            expected = everyone[shard(len(everyone), part, passes)]
            assert sorted(read[step, part]) == sorted(expected.tolist())


@pytest.mark.parametrize(("together", "passes"), [(1, 1), (9, 1), (1 << 16, 1), (9, 2)])
@pytest.mark.parametrize(
    ("shape", "crop", "contrast"),
    [((3,), 0, 0), ((2, 4, 5), 0, 0), ((2, 4, 5), 1, 0), ((2, 4, 5), 0, 0.5), ((2, 4, 5), 1, 0.5)],
)
def test_windows_contain_the_pixels_that_the_other_loader_reads(
    shape, crop, contrast, together, passes, monkeypatch
):
    """Of several epochs, each in one piece or in some."""
    monkeypatch.setattr("dptrain.data.loading.crop_windows.SAMPLES_PER_PIECE", together)
    random = np.random.default_rng(0)
    x = random.standard_normal((9, *shape), dtype=np.float32)
    samples = CachedSamples(x, random.integers(0, 5, 9).astype(np.int32), count=18)
    change = Augmentation(crop=crop, contrast=contrast) if crop or contrast else None
    settings = {
        "input_shape": shape, "augmentation": change, "rank": 1, "size": 2, "passes": passes
    }  # fmt: skip
    with loader(samples, **settings) as read, loader(samples, windows=True, **settings) as others:
        for one, other in zip(read, others, strict=True):
            assert other.x is None
            assert one.part == other.part
            np.testing.assert_array_equal(one.y, other.y)
            np.testing.assert_array_equal(one.samples, other.samples)
            assert (other.recolourings is None) == (contrast == 0.0)
            for i, (row, top, left, mirrored) in enumerate(other.crop_windows):
                padded = np.pad(
                    x[row].reshape(shape[0], *(shape[1:] or (1, 1))), ((0, 0), (2, 2), (2, 2))
                )
                height, width = shape[1:] or (1, 1)
                seen = padded[:, 2 + top : 2 + top + height, 2 + left : 2 + left + width]
                if contrast:
                    factor, added = other.recolourings[i]
                    mean = seen.mean(axis=(1, 2), keepdims=True, dtype=np.float64)
                    mean = mean.astype(np.float32)
                    seen = (seen - mean) * factor + (mean + added)
                    assert added == 0.0
                np.testing.assert_array_equal(one.x[i], seen.reshape(shape))
                assert not mirrored
    assert not threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("per_read", [1, 4, 8, 12, 64])
@pytest.mark.parametrize("rank", [0, 2])
def test_small_minibatches_that_are_read_together_stay_while_they_are_used(
    depth, per_read, rank, monkeypatch
):
    """Minibatches have 4, 4 and 2 samples, of which the last of three ranks has 1, 1 and 0."""
    monkeypatch.setattr("dptrain.data.loading.loader.SAMPLES_PER_READ", per_read)
    samples, kept = Numbers(10), []
    changes = {"rank": rank, "size": 3, "last_step": 40, "keeps_pixels": True, "depth": depth}
    with loader(samples, **changes) as batches:
        for step, batch in enumerate(batches):
            assert batch.step == step
            kept = [*kept[-(depth - 1) :], batch] if depth > 1 else [batch]
            for other in kept:
                np.testing.assert_array_equal(other.y, other.samples)
                np.testing.assert_array_equal(other.x, np.stack([other.samples] * 2, axis=1))
    assert step == 39
    assert samples.reads <= 40 if per_read == 1 else samples.reads < 30


def test_windows_are_computed_on_a_thread_until_the_loader_is_closed():
    samples = CachedSamples(np.zeros((9, 2, 4, 5), np.float32), np.zeros(9, np.int32))
    batches = loader(samples, input_shape=(2, 4, 5), windows=True, last_step=40)
    assert [next(batches).step for _ in range(5)] == list(range(5))
    assert len(threads()) == 1
    batches.close()
    batches.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize(
    ("together", "first", "second"),
    # Nine samples are two minibatches of four and a smaller one. The use of the smaller one
    # alone would take less time than the computation of the next piece.
    [(1 << 16, (0, range(3)), (1, range(3, 6))), (8, (0, range(2)), (0, range(2, 3)))],
)
def test_the_next_windows_are_computed_while_the_present_ones_are_used(
    together, first, second, monkeypatch
):
    monkeypatch.setattr("dptrain.data.loading.crop_windows.SAMPLES_PER_PIECE", together)
    made, make = [], CropWindowLoader._make_pieces

    def noted(self, epoch, steps):
        made.append((epoch, steps))
        return make(self, epoch, steps)

    monkeypatch.setattr(CropWindowLoader, "_make_pieces", noted)
    samples = CachedSamples(np.zeros((9, 3), np.float32), np.zeros(9, np.int32))
    with loader(samples, input_shape=(3,), windows=True, last_step=40) as batches:
        next(batches)
        deadline = time.monotonic() + 60
        while len(made) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert made[:2] == [first, second]


def test_pieces_of_an_epoch_are_about_equally_large(monkeypatch):
    """22 minibatches, of which 21 could be made together."""
    monkeypatch.setattr("dptrain.data.loading.crop_windows.SAMPLES_PER_PIECE", 21 * 4)
    samples = CachedSamples(np.zeros((86, 3), np.float32), np.zeros(86, np.int32))
    with loader(samples, input_shape=(3,), windows=True, last_step=44) as batches:
        pieces = list(batches._spans())
    assert pieces == [(0, range(11)), (0, range(11, 22)), (1, range(22, 33)), (1, range(33, 44))]


@pytest.mark.parametrize("count", [3, 10])
def test_without_reading_ahead_batches_are_the_same_and_no_thread_reads(count):
    seen = []
    for depth in (0, 2):
        with loader(Numbers(count), depth=depth, last_step=40) as batches:
            names = {thread.name.partition("_")[0] for thread in threads()}
            assert "dptrain-loader" in names if depth else not names
            seen.append([(b.step, b.epoch, b.global_count, *b.x[:, 0], *b.y) for b in batches])
    assert len(seen[0]) == 40
    assert seen[0] == seen[1]


def test_the_order_of_the_next_epoch_is_computed_while_this_one_is_read(monkeypatch):
    computed, order = [], Sampler.order

    def noted(self, epoch):
        computed.append((epoch, threading.current_thread().name.startswith("dptrain-order")))
        return order(self, epoch)

    monkeypatch.setattr(Sampler, "order", noted)
    with loader(Numbers(100), last_step=10**6) as batches:
        next(batches)
        deadline = time.monotonic() + 60
        while len(computed) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)  # A loader that went on would compute more now.
        assert computed == [(0, True), (1, True)]
    assert not threads()


def test_without_reading_ahead_a_batch_is_read_when_it_is_requested():
    samples = Numbers(50)
    with loader(samples, depth=0, last_step=40) as batches:
        for count in range(1, 20):
            batch = next(batches)
            assert samples.reads == count
            np.testing.assert_array_equal(batch.x[:, 0], batch.samples)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_batch_is_unchanged_until_depth_further_ones_are_requested(depth):
    with loader(Numbers(50), depth=depth, last_step=40) as batches:
        kept = []
        for batch in batches:
            kept = [*kept[-depth + 1 :], batch] if depth > 1 else [batch]
            time.sleep(0.001)
            for old in kept:
                np.testing.assert_array_equal(old.x[:, 0], old.samples)


def test_memory_is_reused():
    with loader(Numbers(50), last_step=40) as batches:
        addresses = {batch.x.ctypes.data for batch in batches}
    assert len(addresses) <= 4


def test_no_more_than_the_buffers_are_read_ahead():
    samples = Numbers(50)
    with loader(samples, depth=3, last_step=40) as batches:
        next(batches)
        time.sleep(0.05)
        assert samples.reads <= 6


def test_an_epochs_order_is_computed_once(monkeypatch):
    from dptrain.data.loading import sharding as module

    epochs = []
    order = module.epoch_order

    def counted(count, seed, epoch):
        epochs.append(epoch)
        return order(count, seed, epoch)

    monkeypatch.setattr(module, "epoch_order", counted)
    with loader(Numbers(12), first_step=1, last_step=9) as batches:
        assert len(list(batches)) == 8
    assert epochs == [0, 1, 2]


def test_the_thread_ends_with_the_steps():
    with loader(Numbers(10), last_step=2) as batches:
        assert len(list(batches)) == 2
        batches._thread.join(60)
        assert not threads()
        with pytest.raises(StopIteration):
            next(batches)


@pytest.mark.parametrize("requested", [0, 1, 5])
def test_the_thread_ends_when_the_loader_is_closed_early(requested):
    batches = loader(Numbers(10), last_step=10**9)
    for _ in range(requested):
        next(batches)
    batches.close()
    batches.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(batches)


def test_the_thread_ends_when_the_consumer_fails():
    def consume():
        with loader(Numbers(10)) as batches:
            return next(batches).step // 0

    with pytest.raises(ZeroDivisionError):
        consume()
    assert not threads()


def test_threads_pass_the_interpreters_lock_on_while_a_loader_is_open():
    intervals = [sys.getswitchinterval()]
    with loader(Numbers(10)):
        with loader(Numbers(10)):
            intervals.append(sys.getswitchinterval())
        intervals.append(sys.getswitchinterval())
    intervals.append(sys.getswitchinterval())
    # The interpreter counts microseconds.
    short, before = SWITCH_INTERVAL_S, intervals[0]
    assert intervals == pytest.approx([before, short, short, before], abs=2e-6)


def test_the_last_of_several_loaders_restores_the_switch_interval():
    before = sys.getswitchinterval()
    first, second = loader(Numbers(10)), loader(Numbers(10))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S, abs=2e-6)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before, abs=2e-6)


def test_closing_wakes_a_consumer_that_waits():
    gate = threading.Event()
    batches = loader(Numbers(10, gate=gate))
    ended = threading.Event()

    def consume():
        list(batches)
        ended.set()

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    time.sleep(0.02)
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    assert ended.wait(60)
    gate.set()
    closing.join(60)
    consumer.join(60)
    assert not threads()


def test_closing_waits_only_for_the_present_read():
    gate = threading.Event()
    samples = Numbers(10, gate=gate)
    batches = loader(samples)
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    time.sleep(0.02)
    gate.set()
    closing.join(60)
    assert not threads()
    assert samples.reads <= 1


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_is_raised_instead_of_its_batch(depth):
    bad = int(minibatch(20, 4, 3, 3)[1])
    with loader(Numbers(20, fail_at=bad), depth=depth, last_step=5) as batches:
        for step in range(3):
            assert next(batches).step == step
        for _ in range(2):
            with pytest.raises(UserError, match=f"sample {bad} is damaged"):
                next(batches)
    assert not threads()


def test_no_steps_and_no_samples_for_this_rank():
    with loader(Numbers(10), first_step=4, last_step=4) as batches:
        assert list(batches) == []
    with loader(Numbers(2), rank=5, size=6, last_step=3) as batches:
        assert [(len(b.x), len(b.y), b.global_count) for b in batches] == [(0, 0, 2)] * 3


def test_targets_have_the_type_of_the_loss(net):
    for targets, outputs, shape, dtype in (
        ("classes", 3, (), np.int32),
        ("values", 2, (2,), np.float32),
    ):
        data = open_data("synthetic?samples=8", net((5,), outputs, targets))
        changes = {"input_shape": (5,), "target_shape": data.target_shape}
        with loader(data.train, **changes) as batches:
            batch = next(batches)
            assert batch.y.shape == (4, *shape)
            assert batch.y.dtype == dtype


@pytest.mark.parametrize("moves", [{"crop": 3}, {"crop": 3, "flip": True}, {"flip": True}, {}])
@pytest.mark.parametrize("shape", [(3, 24, 24), (3, 29, 27), (3, 32, 32)])
def test_images_from_files_and_from_memory_are_changed_alike(net, cifar, shape, moves):
    data = open_data(f"cifar10:{cifar[0]}?fit=crop", net(shape))
    assert isinstance(data.train, CachedSamples)

    class Files(Samples):
        """The same samples without the type of cached samples."""

        readable_shape = data.train.readable_shape

        def __len__(self):
            return len(data.train)

        def read(self, indices, x, y):
            data.train.read(indices, x, y)

    seen = []
    for samples in (data.train, Files()):
        changes = {"input_shape": shape, "augmentation": Augmentation(brightness=0.1, **moves)}
        with loader(samples, last_step=12, **changes) as batches:
            seen.append([(batch.x.copy(), batch.y.copy()) for batch in batches])
    for (x, y), (other_x, other_y) in zip(*seen, strict=True):
        np.testing.assert_array_equal(x, other_x)
        np.testing.assert_array_equal(y, other_y)


@pytest.mark.parametrize("fit", ["crop", "resize"])
@pytest.mark.parametrize("shape", [(3, 24, 24), (3, 29, 27)])
def test_augmented_batches_are_the_same_for_any_number_of_ranks(net, cifar, fit, shape):
    data = open_data(f"cifar10:{cifar[0]}?fit={fit}", net(shape))
    augmentation = Augmentation(crop=3, flip=True, brightness=0.1, contrast=0.2)
    seen = []
    for size in (1, 3):
        images = {}
        for rank in range(size):
            changes = {"input_shape": shape, "rank": rank, "size": size, "batch_size": 7}
            with loader(data.train, augmentation=augmentation, last_step=3, **changes) as batches:
                for batch in batches:
                    images |= dict(zip(batch.samples.tolist(), batch.x.copy(), strict=True))
        seen.append(images)
    assert set(seen[0]) == set(range(20))
    for sample in range(20):
        np.testing.assert_array_equal(seen[0][sample], seen[1][sample])


def test_random_crops_show_true_pixels_around_the_centre(net, read, cifar):
    data = open_data(f"cifar10:{cifar[0]}?fit=crop", net((3, 24, 24)))
    whole, _ = read(data, shape=(3, 32, 32))
    changes = {"input_shape": (3, 24, 24), "augmentation": Augmentation(crop=4)}
    with loader(data.train, last_step=5, **changes) as batches:
        for batch in batches:
            for x, sample in zip(batch.x, batch.samples, strict=True):
                views = np.lib.stride_tricks.sliding_window_view(whole[sample, 0], (24, 24))
                assert (views == x[0]).all(axis=(2, 3)).any()


@pytest.mark.parametrize(("size", "crop"), [(24, 4), (27, 1), (27, 9), (32, 2)])
def test_the_centre_crop_equals_the_input_of_evaluation(net, read, cifar, monkeypatch, size, crop):
    shape = (3, size, size)
    data = open_data(f"cifar10:{cifar[0]}?fit=crop", net(shape))
    plain, _ = read(data)

    def middle(self, seed, epoch, samples):
        return np.full((8, len(samples)), 0.5)

    monkeypatch.setattr(Augmentation, "draw", middle)
    changes = {"input_shape": shape, "augmentation": Augmentation(crop=crop), "last_step": 5}
    with loader(data.train, **changes) as batches:
        for batch in batches:
            np.testing.assert_array_equal(batch.x, plain[batch.samples])


def test_vectors_cannot_be_augmented():
    with pytest.raises(UserError, match=r"augmentation changes images.*\(2,\)"):
        loader(Numbers(10), augmentation=Augmentation(flip=True))


@pytest.mark.parametrize("crop", [4, 50])
def test_a_crop_that_moves_the_window_off_the_image_is_refused(crop):
    changes = {"input_shape": (1, 8, 4), "augmentation": Augmentation(crop=crop)}
    for windows in (False, True):
        with pytest.raises(
            UserError, match=f"crop is {crop} pixels, but .* 8×4; expected at most 3"
        ):
            loader(
                CachedSamples(np.zeros((9, 1, 8, 4), np.float32), np.zeros(9, np.int32)),
                windows=windows, **changes,
            )  # fmt: skip


def test_windows_are_not_computed_ahead_without_limit(monkeypatch):
    """A consumer that pauses leaves no queue that grows."""
    monkeypatch.setattr("dptrain.data.loading.crop_windows.SAMPLES_PER_PIECE", 4)
    samples = CachedSamples(np.zeros((9, 3), np.float32), np.zeros(9, np.int32))
    made, make = [], CropWindowLoader._make_pieces

    def noted(self, epoch, steps):
        made.append(steps)
        return make(self, epoch, steps)

    monkeypatch.setattr(CropWindowLoader, "_make_pieces", noted)
    with loader(samples, input_shape=(3,), windows=True, last_step=10**6) as batches:
        next(batches)
        deadline = time.monotonic() + 60
        while len(made) < 1 + SPANS_AHEAD and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.1)  # A loader that went on would make more now.
        assert len(made) == 1 + SPANS_AHEAD
