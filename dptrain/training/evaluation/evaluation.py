"""Evaluation of a network by all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import CropWindowReplica, Replica
from dptrain.batch import Batch
from dptrain.comm.agreement import agree
from dptrain.comm.collective import call_on_all_ranks
from dptrain.comm.world import AgreedError, World
from dptrain.data import Preprocessing, absolute
from dptrain.data.base import Dataset, Samples
from dptrain.data.fingerprint import data_fingerprint
from dptrain.data.loading.augmentation import centred_windows
from dptrain.data.loading.sharding import shard
from dptrain.data.loading.workers import read_by_workers
from dptrain.data.sources.objects import dataset_from
from dptrain.data.spec import have_same_samples
from dptrain.data.weights import checked_weights
from dptrain.network.network import Network
from dptrain.plan.shares import Counts
from dptrain.training.evaluation.metrics import MetricCollector, Metrics
from dptrain.training.evaluation.quality import Collector, Quality, make_collector

if TYPE_CHECKING:
    from dptrain.training.evaluation.model import TrainedModel

Item = TypeVar("Item")


@dataclass(frozen=True)
class Score:
    """Quality of a network's predictions.

    Attributes:
        loss: mean over samples, by their weights if they have some.
        accuracy: share of correct predictions, likewise; None if targets are values.
        samples: number of samples.
        metrics: results of the user's metrics by name; None for one that is not finite.
    """

    loss: float
    accuracy: float | None
    samples: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        own = f"loss {self.loss:.4g}" if self.accuracy is None else f"{self.accuracy:.1%}"
        found = [f"{name} {value:.4g}" for name, value in self.metrics.items() if value is not None]
        return ", ".join([own, *found])


def batches_of(
    replica: Replica, samples: Samples, indices: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[Any]]]:
    """Yield samples in batches of at most the replica's batch size, in arrays that are reused."""
    network, size = replica.plan.network, replica.plan.batch_size
    x, y = np.zeros((size, *network.input_shape), np.float32), _targets(network, size)
    for start in range(0, len(indices), size):
        chosen = indices[start : start + size]
        n = len(chosen)
        samples.read(chosen, x[:n], y[:n])
        yield chosen, x[:n], y[:n]


def pixel_batches_of(
    replica: Replica, samples: Samples, indices: NDArray[np.int64]
) -> Iterator[Batch] | None:
    """Return batches of parts of 8-bit images, in arrays that are reused.

    Returns:
        None if the samples have no such images, or the replica cannot load them.
    """
    if not isinstance(replica, CropWindowReplica):
        return None
    samples = images_for(replica, samples)
    shape, pixels = samples.readable_shape, samples.pixels
    if shape is None or pixels.dtype != "uint8":
        return None
    if not replica.accepts_images(shape, pixels):
        return None
    network, size = replica.plan.network, replica.plan.batch_size
    x, y = np.zeros((size, *shape), pixels.dtype), _targets(network, size)
    converted = pixels.converted_shape(shape)
    windows = centred_windows(network.input_shape, converted, np.arange(size))

    def batches() -> Iterator[Batch]:
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            n = len(chosen)
            samples.read_kept(chosen, x[:n], y[:n])
            yield Batch.of_windows(windows[:n], y[:n], images=x[:n])._replace(samples=chosen)

    return batches()


def kept_batches(
    replica: Replica, samples: Samples, indices: NDArray[np.int64], first: int
) -> list[Batch]:
    """Return batches of images that the replica keeps.

    Args:
        first: number of the first of the samples' images among those that it keeps.
    """
    assert isinstance(replica, CropWindowReplica)
    assert replica.image_format is not None
    shape, pixels = replica.image_format
    targets, size = samples.known_targets(), replica.plan.batch_size
    assert targets is not None, "their images were in memory"
    inputs = replica.plan.network.input_shape
    windows = centred_windows(inputs, pixels.converted_shape(shape), first + indices)
    spans = [slice(start, start + size) for start in range(0, len(indices), size)]
    return [
        Batch.of_windows(windows[span], targets[indices[span]])._replace(samples=indices[span])
        for span in spans
    ]


def images_for(replica: Replica, samples: Samples) -> Samples:
    """Return samples with images as they are stored if the replica resizes them."""
    resizes = isinstance(replica, CropWindowReplica) and replica.resizes_images
    return (samples.as_stored() if resizes else None) or samples


def _targets(network: Network, count: int) -> NDArray[Any]:
    """Return memory for the targets of samples."""
    if network.loss.targets == "classes":
        return np.zeros(count, np.int32)
    return np.zeros((count, network.num_outputs), np.float32)


def score(
    replica: Replica,
    samples: Samples,
    world: World,
    collectors: Sequence[Collector] = (),
    counts: Counts = (),
    weights: NDArray[np.float64] | None = None,
    *,
    first: int | None = None,
) -> Score:
    """Return the score of all samples; each rank evaluates its shard, all receive the result.

    With micro-shards, the score does not depend on the number of ranks and threads.

    Args:
        replica: of this rank.
        samples: all samples.
        world: the ranks; every rank calls this function.
        collectors: receive the outputs of the shard of this rank.
        counts: shares of the ranks; empty if they are equal.
        weights: (samples,), of the loss and the accuracy; None if all are equal.
        first: number of the first of their images among those that the replica keeps; None if it
            keeps none of them.
    """
    mine = shard(len(samples), world.rank, world.size, counts)
    if replica.plan.setting.shards or weights is not None:
        return _exact_score(replica, samples, world, mine, collectors, weights)

    def collect(batch: Batch) -> None:
        for collector in collectors:
            assert batch.y is not None
            collector.add(batch.samples, replica.output(), batch.y)

    indices = np.arange(len(samples), dtype=np.int64)[mine]

    def batches() -> Iterable[Batch]:
        if first is not None:
            return kept_batches(replica, samples, indices, first)
        found = pixel_batches_of(replica, samples, indices) or (
            Batch.of(x, y)._replace(samples=chosen)
            for chosen, x, y in batches_of(replica, samples, indices)
        )
        return _counted(found, world)

    key = None if first is None else _kept_key(first, mine)
    totals = np.array(replica.score(batches, collect if collectors else None, key=key))
    world.all_reduce(totals)
    count = len(samples)
    has_labels = replica.plan.network.loss.targets != "values"
    accuracy = float(totals[1]) / count if has_labels else None
    return Score(float(totals[0]) / count, accuracy, count)


def _counted(batches: Iterable[Item], world: World) -> Iterator[Item]:
    """Yield minibatches, and count each when it was evaluated."""
    for batch in batches:
        yield batch
        world.activity.count_batch()


def prepare_score(
    replica: Replica, samples: Samples, world: World, counts: Counts, first: int
) -> None:
    """Let a replica capture what `score` repeats in each evaluation, on this rank alone.

    Args:
        replica, samples, world, counts, first: as for `score`, without collectors and weights.
    """
    mine = shard(len(samples), world.rank, world.size, counts)
    indices = np.arange(len(samples), dtype=np.int64)[mine]
    assert isinstance(replica, DeviceReplica), "a replica on the host keeps no validation images"
    replica.prepare_score(
        lambda: kept_batches(replica, samples, indices, first), key=_kept_key(first, mine)
    )


def _kept_key(first: int, mine: slice) -> tuple[int, int, int]:
    """Return what identifies a shard of the images that a replica keeps."""
    return first, mine.start, mine.stop


def score_in_detail(
    replica: Replica,
    samples: Samples,
    world: World,
    preprocessing: Preprocessing,
    counts: Counts = (),
    metrics: Metrics = MappingProxyType({}),
    *,
    quality: bool = True,
    first: int | None = None,
    weights: NDArray[np.float64] | None = None,
) -> tuple[Score, Quality | None]:
    """Return the score of all samples, and the quality of their predictions.

    Args:
        replica, samples, world, counts, first: as for `score`.
        preprocessing: of the model, which names its outputs.
        metrics: of the user, part of the score.
        quality: False leaves out the quality, which is None then.
        weights: of the samples, as for `score`; errors of values have them, too.
    """
    count, network = len(samples), replica.plan.network
    collector = make_collector(count, network, preprocessing, weights) if quality else None
    own = MetricCollector(metrics, count, network, preprocessing) if metrics else None
    collectors = [each for each in (collector, own) if each is not None]
    found = score(replica, samples, world, collectors, counts, weights, first=first)
    if own is not None:
        found = replace(found, metrics=own.result(world))
    return found, None if collector is None else collector.result(world)


def _exact_score(
    replica: Replica,
    samples: Samples,
    world: World,
    mine: slice,
    collectors: Sequence[Collector],
    weights: NDArray[np.float64] | None,
) -> Score:
    """Return the score with the exact sum of the losses of all samples, rounded once.

    Args:
        mine: the samples that this rank evaluates.
        collectors, weights: as for `score`.
    """
    count = len(samples)
    # Loss, and 1 if the prediction is correct. The rows of other ranks are zero until the
    # all-reduce, which therefore rounds nothing.
    table = np.zeros((count, 2))
    indices = np.arange(count, dtype=np.int64)[mine]
    for chosen, x, y in _counted(batches_of(replica, samples, indices), world):
        table[chosen, 0], table[chosen, 1] = replica.evaluate_samples(x, y)
        for collector in collectors:
            collector.add(chosen, replica.output(), y)
    world.all_reduce(table)
    if weights is not None:
        table *= weights[:, None]
    total = count if weights is None else math.fsum(weights)
    has_labels = replica.plan.network.loss.targets != "values"
    accuracy = math.fsum(table[:, 1]) / total if has_labels else None
    return Score(math.fsum(table[:, 0]) / total, accuracy, count)


def weights_of(
    samples: Samples, world: World, given: Any, *, is_passed: bool
) -> NDArray[np.float64] | None:
    """Return the weights of samples that are evaluated; every rank calls this function.

    Args:
        samples: all samples.
        world: the ranks.
        given: an array of numbers (n,), which replaces weights that the data states; None without.
        is_passed: True if the user passed the data, whose weights then count; weights of the
            training data act on the training loss alone.

    Raises:
        UserError: they are no weights, all are 0, or ranks have others; on every rank.
    """

    def check() -> NDArray[np.float64] | None:
        if given is None:
            return samples.known_weights() if is_passed else None
        return checked_weights(given, len(samples), "sample_weight")

    weights = call_on_all_ranks(world, check)
    hashed = None if weights is None else hashlib.sha256(weights.tobytes()).hexdigest()
    agree(world, {"sample_weight": hashed})
    if weights is not None and not weights.any():
        raise AgreedError("sample_weight is 0 for every sample; expected a weight above 0")
    return weights


def open_test_data(
    data: Any,
    trained_on: str,
    network: Network,
    preprocessing: Preprocessing,
    world: World,
    *,
    seed: int,
    classes: Any = None,
) -> tuple[Samples, str, tuple[str, ...]]:
    """Open the samples on which a trained network is evaluated; every rank calls this function.

    Other data than the training data is used as a whole if it has no split of its own.

    Args:
        data: a spec or an object, see `dataset_from`; None for the data that the network was
            trained on.
        trained_on: spec of the training data with absolute paths.
        network: that was trained.
        preprocessing: saved with the network.
        world: the ranks.
        seed: of the run.
        classes: names of the labels of an object, see `dataset_from`.

    Returns:
        The samples, a description of them such as "all 120 samples of folder:shapes", and the notes
        of the data set.

    Raises:
        UserError: the data cannot be read, does not match the network, or differs between ranks;
            on every rank.
    """
    own = data is None
    if isinstance(data, str):
        own = have_same_samples(absolute(data), trained_on)
    chosen = trained_on if data is None else data

    def open_whole() -> tuple[Dataset, dict[str, Any]]:
        dataset = dataset_from(
            chosen,
            network,
            seed=seed,
            ranks_per_node=world.local_size,
            preprocessing=preprocessing,
            split=own,
            classes=classes,
        )
        return dataset, data_fingerprint(dataset)

    dataset, fingerprint = call_on_all_ranks(world, open_whole)
    agree(world, {f"data {name}": value for name, value in fingerprint.items()})
    name = chosen if isinstance(chosen, str) else dataset.name
    return dataset.test, describe_scored(dataset, name, whole=not own), dataset.notes


def describe_scored(dataset: Dataset, spec: str, *, whole: bool) -> str:
    """Return a description of the samples in `dataset.test`.

    Args:
        dataset: from `open_data`.
        spec: specification of the data set; the description omits its options.
        whole: True if the data set was opened with ``split=False``.
    """
    count, name = len(dataset.test), spec.partition("?")[0]
    if whole and not dataset.has_split:
        return f"all {count:,} samples of {name}"
    return f"the test split of {name}, {count:,} samples"


def scored_text(scored: str, weights: NDArray[np.float64] | None) -> str:
    """Return the description of the samples that were evaluated, with their weights or without."""
    return scored if weights is None else f"{scored}, by their weights"


def results_of(score: Score, quality: Quality | None) -> dict[str, Any]:
    """Return all results as plain JSON values.

    Returns:
        samples, loss, accuracy if there are labels, and metrics of the user; top5_accuracy for more
        than ten classes, auc for up to 100, mean_f1, classes and confusion, and unpredicted if
        outputs for so many samples contain NaN; label_accuracy, mean_f1 and labels for several
        labels of a sample; mae, rmse and r2 for values.
    """
    accuracy = {} if score.accuracy is None else {"accuracy": score.accuracy}
    more = {} if quality is None else quality.to_dict()
    return {"samples": score.samples, "loss": score.loss, **accuracy, **more, **score.metrics}


def evaluate_model(
    model: TrainedModel,
    data: Any,
    world: World,
    *,
    workers: int = 0,
    classes: Any = None,
    sample_weight: Any = None,
) -> tuple[dict[str, Any], Quality]:
    """Evaluate a trained model on a data set; every rank calls this function.

    The data is preprocessed as the model's saved preprocessing requires. Its classes and columns
    are matched by name, and labels without names by their value, see
    `dptrain.data.preprocessing.classes`.

    Args:
        model: the trained model, on every rank.
        data: None for the test split of the data that the model was trained on; else a data spec or
            an object, see `dptrain.data.sources.objects`.
        world: the ranks.
        workers: processes of each rank that decode samples; 0 decodes in the rank itself.
        classes: names of the labels of an object, see `dataset_from`.
        sample_weight: as for `Trainer.evaluate`.

    Returns:
        The same on every rank: network, data, step, scored (a description of the samples), notes
        of the data if there are any, samples, loss, accuracy unless the network predicts values,
        and what `results_of` adds; and the quality of the predictions.

    Raises:
        UserError: the data cannot be read, or does not match the model.
    """
    trained_on = model.facts.data
    samples, scored, notes = open_test_data(
        data,
        trained_on,
        model.network,
        model.preprocessing,
        world,
        seed=model.facts.seed,
        classes=classes,
    )
    network, is_passed = model.network, data is not None
    weights = weights_of(samples, world, sample_weight, is_passed=is_passed)
    target_shape = () if network.loss.targets == "classes" else (network.num_outputs,)
    with read_by_workers(samples, workers, network.input_shape, target_shape) as read:
        result, quality = score_in_detail(
            model.replica, read, world, model.preprocessing, weights=weights
        )
    assert quality is not None
    found = {
        "network": model.network.name,
        "data": data if isinstance(data, str) else trained_on if data is None else "arrays",
        "step": model.step,
        "scored": scored_text(scored, weights),
        **({"notes": list(notes)} if notes else {}),
        **results_of(result, quality),
    }
    return found, quality
