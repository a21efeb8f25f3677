"""Training samples that a Python function of the user changes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.pixels import PixelFormat
from dptrain.data.base import AugmentFunction, Dataset, Samples, name_of
from dptrain.data.preprocessing.images import centre
from dptrain.errors import UserError
from dptrain.network.layers import Shape

_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, repr=False)
class ChangedSamples(Samples):
    """Samples that a function changes. Index e · len(self) + i is sample i of epoch e.

    Attributes:
        samples: the samples.
        function: see `Dataset.augment`.
        seed: of the run.
        shape: (C, H, W) or (F,), of the images that the function receives.
    """

    samples: Samples
    function: AugmentFunction
    seed: int
    shape: Shape

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def changes_by_epoch(self) -> bool:
        return True

    @property
    def decodes(self) -> bool:
        return True

    @property
    def readable_shape(self) -> Shape:
        return self.shape

    @property
    def pixels(self) -> PixelFormat:
        return self.samples.pixels

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        kept = np.empty((len(indices), *self.shape), self.pixels.dtype)
        self.read_kept(indices, kept, y)
        self.pixels.convert(kept[centre(self.shape, x.shape)] if x.ndim == 4 else kept, x)

    def read_kept(self, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]) -> None:
        epochs, samples = np.divmod(indices, len(self))
        self.samples.read_kept(samples, x, y)
        for image, epoch, sample in zip(x, epochs.tolist(), samples.tolist(), strict=True):
            image[...] = self._changed(image, epoch, sample)

    def _changed(self, image: NDArray[Any], epoch: int, sample: int) -> NDArray[Any]:
        """Return what the function returns for an image, with its shape and type."""
        counter = [0, sample, epoch, 0]
        random = np.random.Generator(np.random.Philox(key=self.seed & _MASK, counter=counter))
        where = f"for training sample {sample} in epoch {epoch + 1}"
        try:
            found = self.function(image, random)
        except Exception as error:
            calls = traceback.extract_tb(error.__traceback__)[1:]
            lines = "; ".join(f"{call.filename}, line {call.lineno}: {call.line}" for call in calls)
            raise UserError(
                f"the function augment={name_of(self.function)} failed {where} with "
                f"{type(error).__name__}: {error} ({lines or 'without a line in Python'})"
            ) from None
        changed = np.asarray(found)
        if changed.shape != image.shape or not np.can_cast(changed.dtype, image.dtype, "same_kind"):
            returned = f"shape {changed.shape} and type {changed.dtype}"
            raise UserError(
                f"the function augment={name_of(self.function)} returned "
                f"{'None' if found is None else returned} {where}; expected an array of shape "
                f"{image.shape} and type {image.dtype}, as it received"
            )
        return changed

    def content(
        self, indices: NDArray[np.int64], input_shape: Shape, target_shape: Shape
    ) -> Iterator[bytes]:
        return self.samples.content(indices, input_shape, target_shape)


def with_changed_samples(dataset: Dataset, seed: int) -> Dataset:
    """Return the data set with training samples that its function changes, if it has one.

    Args:
        dataset: the data set.
        seed: of the run.
    """
    if dataset.augment is None:
        return dataset
    shape = dataset.train.readable_shape or dataset.input_shape
    changed = ChangedSamples(dataset.train, dataset.augment, seed, shape)
    return replace(dataset, train=changed, augment=None)
