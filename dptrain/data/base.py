"""The interface of data sets: samples that can be read, and their splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.pixels import INPUTS, PixelFormat
from dptrain.data.preprocessing.classes import Classes
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.network.layers import Shape
from dptrain.network.losses import TargetKind

AugmentFunction = Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]
"""Returns a changed image, of the shape and type of the one that it receives with a generator."""


class Samples(ABC):
    """One split of a data set, preprocessed for one network."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        """Fill `x` and `y` with the samples `indices`.

        A sample depends on its index only, not on the other samples that are read with it.

        Args:
            indices: int64 (n,), each in [0, len(self)).
            x: float32 (n, C, H, W) or (n, F), contiguous or not. If `readable_shape` is larger
                than the network's input, x may have any height and width up to that size; it
                receives the central part.
            y: int32 (n,) class labels, or float32 (n, F).

        Raises:
            UserError: a file is damaged or missing, or a value is out of range.
        """

    @property
    def readable_shape(self) -> Shape | None:
        """Largest (C, H, W) that `read` can fill; None if it is the network's input shape."""
        return None

    @property
    def decodes(self) -> bool:
        """True if reading a sample takes more than a copy, so that worker processes can help."""
        return False

    @property
    def changes_by_epoch(self) -> bool:
        """True if samples change: index e · len(self) + i is then sample i of epoch e."""
        return False

    @property
    def pixels(self) -> PixelFormat:
        """The form that `read_kept` fills, and its conversion to inputs."""
        return INPUTS

    def read_kept(self, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]) -> None:
        """Fill `x` and `y` as `read` does, with pixels that are not converted to inputs.

        Args:
            indices: as in `read`.
            x: (n, C, H, W) or (n, F) of the type of `pixels`, with the size of `readable_shape`.
            y: as in `read`.
        """
        self.read(indices, x, y)

    def as_stored(self) -> Samples | None:
        """Return the samples with images as they are stored, which `pixels` resizes.

        Returns:
            None if images are not resized, or are kept as inputs in less memory.
        """
        return None

    def known_targets(self) -> NDArray[Any] | None:
        """Return the targets of all samples, or None if they are not in memory."""
        return None

    def known_weights(self) -> NDArray[np.float64] | None:
        """Return the weight of each sample that the data states, float64 (n,); None without."""
        return None

    def subset(self, indices: NDArray[np.int64]) -> Samples:
        """Return the samples `indices`, int64 (n,), in this order."""
        return Subset(self, indices)

    def content(
        self, indices: NDArray[np.int64], input_shape: Shape, target_shape: Shape
    ) -> Iterator[bytes]:
        """Yield bytes that represent the content of samples, for a digest.

        Args:
            indices: int64 (n,).
            input_shape: of the network.
            target_shape: of one target: () for class labels, else (F,).
        """
        x = np.zeros((len(indices), *input_shape), np.float32)
        y = np.zeros((len(indices), *target_shape), np.float32 if target_shape else np.int32)
        self.read(indices, x, y)
        yield x.tobytes()
        yield y.tobytes()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self):,} samples>"


@dataclass(frozen=True, repr=False)
class Subset(Samples):
    """Some of other samples.

    Attributes:
        samples: the other samples.
        indices: int64 (n,), which of them.
    """

    samples: Samples
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        self.samples.read(self.indices[indices], x, y)

    @property
    def readable_shape(self) -> Shape | None:
        return self.samples.readable_shape

    def known_targets(self) -> NDArray[Any] | None:
        targets = self.samples.known_targets()
        return None if targets is None else targets[self.indices]

    def known_weights(self) -> NDArray[np.float64] | None:
        weights = self.samples.known_weights()
        return None if weights is None else weights[self.indices]

    @property
    def decodes(self) -> bool:
        return self.samples.decodes

    @property
    def pixels(self) -> PixelFormat:
        return self.samples.pixels

    def read_kept(self, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]) -> None:
        self.samples.read_kept(self.indices[indices], x, y)

    def content(
        self, indices: NDArray[np.int64], input_shape: Shape, target_shape: Shape
    ) -> Iterator[bytes]:
        return self.samples.content(self.indices[indices], input_shape, target_shape)


@dataclass(frozen=True, repr=False)
class Dataset:
    """A data set that is preprocessed for a network.

    Attributes:
        name: of the source, such as ``digits``.
        train, test: splits for training and for the test at the end. No sample is in both, unless
            the data set was opened with ``split=False``: then both contain all samples.
        input_shape: (C, H, W) or (F,), the network's input.
        targets: kind of the targets, see `Loss.targets`.
        classes: names of the classes, in the order of the labels; None if there are none.
        description: one line: origin, number of samples, conversion.
        num_outputs: F, numbers in the network's output.
        preprocessing: conversion of raw samples, which is saved with the model.
        has_split: True if the data set defines its test split; False if dptrain chose one.
        validation: split for evaluations during training; None if there is none.
        gap: samples of a time series that must be left out between two splits, so that they share
            no measurement; None if the samples have no order.
        notes: a line for each thing that a user should know: what is left out, what was converted
            by which rule.
        augment: changes each training image in each epoch; None if no function does.
    """

    name: str
    train: Samples
    test: Samples
    input_shape: Shape
    targets: TargetKind
    classes: tuple[str, ...] | None
    description: str
    num_outputs: int
    preprocessing: Preprocessing
    has_split: bool = True
    validation: Samples | None = None
    gap: int | None = None
    notes: tuple[str, ...] = ()
    augment: AugmentFunction | None = None

    @property
    def splits(self) -> tuple[Samples, ...]:
        """The splits for training and test, and for validation if there is one."""
        more = () if self.validation is None else (self.validation,)
        return (self.train, self.test, *more)

    def with_splits(self, splits: Sequence[Samples]) -> Dataset:
        """Return the data set with other splits, in the order of `splits`."""
        train, test, *more = splits
        return replace(self, train=train, test=test, validation=more[0] if more else None)

    @property
    def target_shape(self) -> Shape:
        """Shape of one target: () for class labels, else (F,)."""
        return () if self.targets == "classes" else (self.num_outputs,)

    @property
    def class_list(self) -> Classes | None:
        """The classes; None for values, and for several labels of a sample."""
        return Classes.of(self.targets, self.num_outputs, self.classes)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.input_shape))
        counts = count_text(len(self.train), len(self.test), len(self.validation or ()))
        return f"<Dataset {self.name}: {counts} samples of {shape}>"


def count_text(train: int, test: int, validation: int = 0) -> str:
    """Return the sizes of the splits in words; 0 validation samples are left out."""
    between = f", {validation:,} validation and" if validation else " and"
    return f"{train:,} training{between} {test:,} test"


def name_of(function: Any) -> str:
    """Return the name of a function, or of the class of another object that can be called."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))
