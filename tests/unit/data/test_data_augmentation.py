"""Random changes of images, and their dependence on seed, epoch and sample."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.data import Augmentation
from dptrain.errors import UserError
from dptrain.native.threads import ThreadPool

EVERYTHING = Augmentation(crop=3, flip=True, brightness=0.3, contrast=0.5, cutout=3)


def random_images(n, channels=2, height=7, width=9):
    return np.random.default_rng(0).normal(size=(n, channels, height, width)).astype(np.float32)


def changed(augmentation, x, samples=None, *, seed=1, epoch=2, source=None):
    x = x.copy()
    ids = np.arange(len(x)) if samples is None else np.asarray(samples)
    augmentation.apply(x, seed=seed, epoch=epoch, samples=ids, source=source)
    return x


@given(st.lists(st.integers(0, 39), max_size=12), st.integers(0, 2**62), st.integers(0, 99))
def test_an_image_depends_on_seed_epoch_and_sample_alone(samples, seed, epoch):
    x = random_images(40)
    whole = changed(EVERYTHING, x, seed=seed, epoch=epoch)
    part = changed(EVERYTHING, x[samples], samples, seed=seed, epoch=epoch)
    np.testing.assert_array_equal(part, whole[samples])


def test_seed_epoch_and_sample_all_matter():
    x = np.repeat(random_images(1), 2, axis=0)
    first, second = changed(EVERYTHING, x)
    assert (first != second).any()
    assert (changed(EVERYTHING, x, seed=2)[0] != first).any()
    assert (changed(EVERYTHING, x, epoch=3)[0] != first).any()
    assert (changed(EVERYTHING, x, seed=1 + 2**32)[0] != first).any()


def test_nothing_asked_for_changes_nothing():
    x = random_images(5)
    np.testing.assert_array_equal(changed(Augmentation(), x), x)


def test_half_of_the_images_are_flipped():
    x = random_images(400)
    y = changed(Augmentation(flip=True), x)
    flipped = (y == x[..., ::-1]).all(axis=(1, 2, 3))
    same = (y == x).all(axis=(1, 2, 3))
    assert (flipped ^ same).all()
    # Binomial, 400 and ½: deviation 10.
    assert 150 < flipped.sum() < 250


def test_crops_are_windows_of_the_image_with_zeros_around():
    x = random_images(300)
    padded = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)))
    y = changed(Augmentation(crop=2), x)
    places = set()
    for i in range(300):
        windows = {
            (top, left): padded[i, :, top : top + 7, left : left + 9]
            for top in range(5)
            for left in range(5)
        }
        found = [place for place, window in windows.items() if (window == y[i]).all()]
        assert len(found) == 1
        places.update(found)
    assert len(places) == 25


def test_crops_take_what_lies_around_where_it_is_known():
    source = random_images(20, height=11, width=13)
    x = np.full((20, 2, 7, 9), np.nan, np.float32)
    y = changed(Augmentation(crop=2), x, source=source)
    inside = np.lib.stride_tricks.sliding_window_view(source, (7, 9), axis=(2, 3))
    for i in range(20):
        assert (inside[i].transpose(1, 2, 0, 3, 4) == y[i]).all(axis=(2, 3, 4)).any()


@pytest.mark.parametrize("size", [(3, 5), (7, 9), (6, 10), (16, 4)])
def test_windows_far_over_the_edge_show_what_there_is_and_zeros(size):
    source = random_images(60, height=size[0], width=size[1])
    around = np.pad(source, ((0, 0), (0, 0), (40, 40), (40, 40)))
    augmentation = Augmentation(crop=12, flip=True)
    x = np.full((60, 2, 7, 9), np.nan, np.float32)
    draws = np.random.default_rng(3).random((8, 60))
    rows = np.random.default_rng(4).permutation(60)
    augmentation.change(x, draws, source, rows)
    for i in range(60):
        top, left = (
            40 - 12 + (size[axis] - x.shape[2 + axis]) // 2 + int(draws[axis, i] * 25)
            for axis in (0, 1)
        )
        window = around[rows[i], :, top : top + 7, left : left + 9]
        mirrored = window[:, :, ::-1] if draws[2, i] < 0.5 else window
        np.testing.assert_array_equal(x[i], mirrored)


def test_brightness_adds_one_number_to_an_image():
    x = random_images(200)
    added = (changed(Augmentation(brightness=0.3), x) - x).reshape(200, -1)
    np.testing.assert_allclose(added, added[:, :1].repeat(added.shape[1], 1), atol=1e-5)
    assert abs(added).max() <= 0.3 + 1e-5
    assert added.min() < -0.2
    assert added.max() > 0.2


def test_contrast_keeps_means_and_scales_distances():
    x = random_images(200)
    y = changed(Augmentation(contrast=0.5), x)
    np.testing.assert_allclose(y.mean(axis=(2, 3)), x.mean(axis=(2, 3)), atol=1e-5)
    factors = y.std(axis=(2, 3)) / x.std(axis=(2, 3))
    np.testing.assert_allclose(factors[:, 0], factors[:, 1], rtol=1e-4)
    assert 0.5 - 1e-4 < factors.min() < 0.6
    assert 1.4 < factors.max() < 1.5 + 1e-4


def test_cutout_sets_a_square_around_any_pixel_to_zero():
    x = random_images(600) + 100.0
    y = changed(Augmentation(cutout=4), x)
    centres = set()
    for image, before in zip(y, x, strict=True):
        cut = (image == 0).all(axis=0)
        np.testing.assert_array_equal(image[:, ~cut], before[:, ~cut])
        rows, columns = (np.flatnonzero(cut.any(axis=axis)) for axis in (1, 0))
        assert cut.sum() == len(rows) * len(columns)
        assert 2 <= len(rows) <= 4
        assert 2 <= len(columns) <= 4
        # Rows c - 2 to c + 1 are cut, as far as they exist.
        centres.add(tuple(int(part[0]) + 2 if part[0] else int(part[-1]) - 1
                          for part in (rows, columns)))  # fmt: skip
    assert centres == {(row, column) for row in range(7) for column in range(9)}


def test_cutout_follows_other_changes_and_leaves_them_unchanged():
    x = random_images(50)
    everything = {"crop": 3, "flip": True, "brightness": 0.3, "contrast": 0.5}
    y, cut = (
        changed(Augmentation(**everything), x),
        changed(Augmentation(**everything, cutout=3), x),
    )
    is_cut = (cut == 0).all(axis=1) & (y != 0).any(axis=1)
    assert is_cut.any(axis=(1, 2)).all()
    kept = np.broadcast_to(~is_cut[:, None], y.shape)
    np.testing.assert_array_equal(cut[kept], y[kept])


def test_a_cutout_must_fit():
    Augmentation(cutout=13).check((1, 7, 9))
    with pytest.raises(UserError, match=r"cutout is 14 pixels, .* 7×9; expected at most 13"):
        Augmentation(cutout=14).check((1, 7, 9))


def test_an_empty_batch_is_no_trouble():
    assert changed(EVERYTHING, random_images(0)).shape == (0, 2, 7, 9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"crop": -1}, "crop is -1"),
        ({"brightness": -0.1}, "brightness is -0.1"),
        ({"brightness": float("nan")}, "brightness is nan"),
        ({"brightness": 1e300}, "brightness is 1e\\+300; expected 0 to 100"),
        ({"contrast": 1.5}, "contrast is 1.5"),
        ({"cutout": -1}, "cutout is -1"),
        ({"contrast": float("nan")}, "contrast is nan"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Augmentation(**settings)


def test_draws_of_many_samples_are_those_of_each():
    change, samples = Augmentation(crop=1, brightness=0.1), np.arange(10_000)[::-1]
    draws = change.draw(1, 2, samples)
    assert draws.shape == (8, 10_000)
    for i in (0, 4095, 4096, 9_999):
        np.testing.assert_array_equal(draws[:, i], change.draw(1, 2, samples[i : i + 1])[:, 0])


@pytest.mark.parametrize("kernel", ["_draw", "_shift", "_erase"])
def test_threads_that_share_an_augmentation_launch_one_at_a_time(monkeypatch, kernel):
    running, most = [], []

    def launch(*args):
        running.append(args)
        time.sleep(0.01)
        most.append(len(running))
        running.pop()

    monkeypatch.setattr(ThreadPool, "bind", lambda *args, **options: launch)
    run = getattr(Augmentation(crop=1), kernel)
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(run, range(8)))
    assert most == [1] * 8
