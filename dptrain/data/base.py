"""What the rest of the house sees of data: samples that can be read, and two splits of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.network.layers import Shape
from dptrain.network.losses import TargetKind


class Samples(ABC):
    """One split of a data set, ready for one network."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        """Fill `x` and `y` with the samples `indices`; what a sample holds depends on nothing else.

        Args:
            indices: int64 (n,), each in [0, len(self)).
            x: float32 (n, C, H, W) or (n, F); contiguous or not. Where `canvas` is larger than the
                network's input, maps up to that size may be asked for: always the central part.
            y: int32 (n,) class numbers, or float32 (n, F).

        Raises:
            UserError: a file is damaged or has gone.
        """

    @property
    def canvas(self) -> Shape | None:
        """Largest (C, H, W) that `read` can fill; None where it is the network's input shape."""
        return None


@dataclass(frozen=True)
class Dataset:
    """A data set brought to a network: what goes in, what it is compared with.

    Attributes:
        name: of the source, ``digits``.
        train, test: the two splits; no sample is in both.
        input_shape: (C, H, W) or (F,), as the network takes it.
        targets: what a target is, see `Loss.targets`.
        classes: names of the classes, where there are any.
        description: one line: where from, how many, what was done to them.
        num_outputs: F, numbers in the network's output.
    """

    name: str
    train: Samples
    test: Samples
    input_shape: Shape
    targets: TargetKind
    classes: tuple[str, ...] | None
    description: str
    num_outputs: int = 1

    @property
    def target_shape(self) -> Shape:
        """Shape of one target: () for class numbers, else (F,)."""
        return () if self.targets == "classes" else (self.num_outputs,)
