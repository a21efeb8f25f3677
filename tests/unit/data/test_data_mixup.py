"""Mixup: averages of samples of a minibatch, the same on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.data.loading.augmentation import Augmentation
from dptrain.data.loading.loader import Loader
from dptrain.data.loading.mixup import cutmix_boxes, partner_weights, pixel_weights, target_weights
from dptrain.data.loading.sharding import Sampler
from dptrain.data.stored import CachedSamples
from dptrain.errors import UserError
from dptrain.plan.shards import MicroShards

COUNT, BATCH, SEED = 22, 6, 3
EVENLY = (np.arange(100_000) + 0.5) / 100_000


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 4.0])
def test_weights_have_the_moments_of_their_distributions(alpha):
    """Of Beta(α, α + 1), and of Beta(α, α) for targets that are mixed."""
    for mixes, a, b in ((False, alpha, alpha + 1.0), (True, alpha, alpha)):
        weights = partner_weights(EVENLY, alpha, mixes_targets=mixes).astype(np.float64)
        assert weights.min() >= 0.0
        assert weights.max() <= 1.0
        assert weights.mean() == pytest.approx(a / (a + b), rel=1e-3)
        variance = a * b / ((a + b) ** 2 * (a + b + 1.0))
        assert weights.var() == pytest.approx(variance, rel=2e-3)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_own_labels_have_the_expected_gradient_of_mixed_labels(alpha):
    """Of softmax regression, over both orders of a pair of samples."""
    random = np.random.default_rng(0)
    x, labels, w = random.normal(size=(2, 3)), np.eye(4)[[1, 3]], random.normal(size=(3, 4))

    def mean_gradient(weights, mixes):
        total = np.zeros_like(w)
        for i, j in ((0, 1), (1, 0)):
            m = weights[:, None].astype(np.float64)
            mixed = (1 - m) * x[i] + m * x[j]
            target = (1 - m) * labels[i] + m * labels[j] if mixes else labels[i]
            z = np.exp(mixed @ w)
            total += mixed.T @ (z / z.sum(axis=1, keepdims=True) - target) / len(m)
        return total

    own, mixed = (mean_gradient(partner_weights(EVENLY, alpha, mixes_targets=mixes), mixes)
                  for mixes in (False, True))  # fmt: skip
    np.testing.assert_allclose(own, mixed, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("mixes", [False, True])
def test_boxes_of_cutmix_have_shares_of_a_beta_distribution(mixes):
    """The sample that keeps its label is the one that a random pixel shows."""
    uniform = np.random.default_rng(0).random((4, 4000))
    weights, means = boxes_of(uniform, (16, 12), mixes=mixes)
    assert weights.shape == (4000, 1, 16, 12)
    assert set(np.unique(weights)) == {0.0, 1.0}
    np.testing.assert_allclose(means, weights.mean(axis=(1, 2, 3)))
    # Boxes are cut at the border, which is why their mean share is less than a half.
    boxes, shares = boxes_of(uniform, (16, 12), mixes=True)
    swapped = (weights != boxes).all(axis=(1, 2, 3))
    assert ((weights == boxes).all(axis=(1, 2, 3)) | swapped).all()
    assert swapped.mean() == pytest.approx(0.0 if mixes else shares.mean(), abs=0.03)
    for box in boxes[:50, 0]:
        rows, columns = (box.any(axis=axis) for axis in (1, 0))
        np.testing.assert_array_equal(box, np.outer(rows, columns))
        assert (np.diff(np.flatnonzero(rows)) == 1).all()


@pytest.mark.parametrize("labels", [True, False])
def test_cutmix_replaces_a_box_by_that_of_the_next_sample(labels):
    mixed = batches(Augmentation(flip=True, cutmix=1.0), labels=labels)
    plain = batches(Augmentation(flip=True), labels=labels)
    for (x, y, _, _), (own, own_y, *_) in zip(mixed, plain, strict=True):
        other = np.roll(own, -1, axis=0)
        shows_other = (x == other).all(axis=1)
        assert (shows_other | (x == own).all(axis=1)).all()
        if labels:
            np.testing.assert_array_equal(y, own_y)
        else:
            share = shows_other.mean(axis=(1, 2))[:, None]
            expected = (1 - share) * own_y + share * np.roll(own_y, -1, axis=0)
            np.testing.assert_allclose(y, expected, atol=1e-6)


def boxes_of(uniform, size, *, mixes):
    """Return the weights of pixels and of targets that CutMix draws."""
    mixings = cutmix_boxes(uniform, 1.0, size, mixes_targets=mixes)
    return pixel_weights(mixings, (1, *size)), target_weights(mixings, (1, *size))


def batches(change, *, labels, rank=0, size=1, depth=0, shards=0, shape=(2, 5, 4)):
    random = np.random.default_rng(1)
    x = random.normal(size=(COUNT, *shape)).astype(np.float32)
    y = random.integers(0, 5, COUNT).astype(np.int32)
    if not labels:
        y = random.normal(size=(COUNT, 2)).astype(np.float32)
    micro = MicroShards.of_rank(shards, rank, size) if shards else None
    sampler = Sampler(COUNT, BATCH, SEED, rank, size, micro)
    target_shape = () if labels else (2,)
    with Loader(CachedSamples(x, y), sampler, range(1, 9), shape, target_shape,
                augmentation=change, depth=depth) as loader:  # fmt: skip
        return [(b.x.copy(), b.y.copy(), b.samples.copy(), b.epoch) for b in loader]


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("everything", [True, False])
def test_a_sample_is_mixed_with_the_next_one_of_its_minibatch(labels, everything):
    changes = {"crop": 1, "flip": True, "contrast": 0.3, "cutout": 2} if everything else {}
    mixed = batches(Augmentation(**changes, mixup=0.4), labels=labels)
    plain = batches(Augmentation(**changes), labels=labels)
    for (x, y, samples, epoch), (own, own_y, own_samples, _) in zip(mixed, plain, strict=True):
        np.testing.assert_array_equal(samples, own_samples)
        draws = Augmentation(mixup=0.4).draw(SEED, epoch, samples)
        weights = partner_weights(draws[7], 0.4, mixes_targets=not labels)
        assert (weights > 0).any()
        m = weights[:, None, None, None]
        np.testing.assert_allclose(x, (1 - m) * own + m * np.roll(own, -1, axis=0), atol=1e-6)
        if labels:
            np.testing.assert_array_equal(y, own_y)
        else:
            m = weights[:, None]
            expected = (1 - m) * own_y + m * np.roll(own_y, -1, axis=0)
            np.testing.assert_allclose(y, expected, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shards", [0, 6])
@pytest.mark.parametrize(
    "mixing", [{"mixup": 0.4}, {"cutmix": 1.0, "rotate": 20.0, "contrast": 0.5}]
)
def test_ranks_have_parts_of_what_one_rank_has(size, shards, mixing):
    change = Augmentation(flip=True, **mixing)
    whole = batches(change, labels=False)
    ranks = [batches(change, labels=False, rank=rank, size=size, depth=rank, shards=shards)
             for rank in range(size)]  # fmt: skip
    for step, (x, y, samples, _) in enumerate(whole):
        for index, expected in ((0, x), (1, y), (2, samples)):
            parts = [rank[step][index] for rank in ranks]
            np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_vectors_are_mixed_but_not_cropped():
    (x, *_), *_ = batches(Augmentation(mixup=1.0), labels=False, shape=(3,))
    assert x.shape == (BATCH, 3)
    with pytest.raises(UserError, match="takes vectors"):
        batches(Augmentation(mixup=1.0, crop=1), labels=False, shape=(3,))


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), 101.0])
def test_a_parameter_out_of_range(alpha):
    with pytest.raises(UserError, match="augmentation mixup is"):
        Augmentation(mixup=alpha)
