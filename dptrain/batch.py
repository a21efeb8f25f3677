"""A minibatch as it is passed from a data source to a replica."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Batch(NamedTuple):
    """This rank's shard of one global minibatch, or of a part of it; it may be empty.

    Attributes:
        step: global step number, from 0; it selects the dropout masks.
        epoch: from 0.
        x: inputs, float32 (n, C, H, W) or (n, F); with `crop_windows`, images of the type of
            `Samples.pixels`, of which the inputs are parts; None if these images are cached.
        y: int32 (n,) or float32 (n, F); None if no loss is computed.
        samples: int64 (n,), indices into the training split; each selects a dropout mask.
        global_count: samples of the whole minibatch, all ranks together, over which loss and
            gradients are averaged.
        crop_windows: int64 (n, 4), (n, 8) or (n, 16), the part of an image of `x`, or of a cached
            image, that each input is, see `CropWindowReplica`; None if `x` contains the inputs.
        recolourings: float32 (n, 2) or (n, 11), how the colours of crop windows change; None if
            they stay.
        part: number of the pass, if gradients accumulate over several passes of a step.
        message: uint8 (bytes,), samples, crop windows and recolourings in the form of the replica;
            None if it has none.
        weights: (n,), the factor of each sample's loss and gradient; None if all are 1.
        mixings: float32 (n, 1) or (n, 5), how each crop window is mixed with the next one, see
            `dptrain.data.loading.mixup.mixup_weights` and `cutmix_boxes`; None if they are not
            mixed. Otherwise there is one more crop window, recolouring and image of `x`, at the
            end: the partner of the last sample.
    """

    step: int
    epoch: int
    x: NDArray[Any] | None
    y: NDArray[Any] | None
    samples: NDArray[np.int64]
    global_count: int
    crop_windows: NDArray[np.int64] | None = None
    recolourings: NDArray[np.float32] | None = None
    part: int = 0
    message: NDArray[np.uint8] | None = None
    weights: NDArray[np.float32] | None = None
    mixings: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, x: NDArray[Any], y: NDArray[Any] | None = None, *, step: int = 0) -> Batch:
        """Return a whole minibatch, whose samples are 0 … n − 1."""
        return cls(step, 0, x, y, np.arange(len(x), dtype=np.int64), len(x))

    @classmethod
    def of_windows(
        cls,
        crop_windows: NDArray[np.int64],
        y: NDArray[Any] | None = None,
        *,
        images: NDArray[Any] | None = None,
        recolourings: NDArray[np.float32] | None = None,
        mixings: NDArray[np.float32] | None = None,
    ) -> Batch:
        """Return a whole minibatch of parts of images, by default of cached ones."""
        whole = cls.of(crop_windows if mixings is None else mixings, y)
        return whole._replace(
            x=images, crop_windows=crop_windows, recolourings=recolourings, mixings=mixings
        )

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def part_of(self, start: int, stop: int) -> Batch:
        """Return the samples start … stop; arrays are views.

        Example:
            >>> Batch.of(np.arange(8.0).reshape(4, 2)).part_of(1, 3).samples
            array([1, 2])
        """
        more = self.mixings is not None  # The partner of the last sample.

        def cut(array: NDArray[Any] | None, end: int) -> NDArray[Any] | None:
            return None if array is None else array[start:end]

        return self._replace(
            x=cut(self.x, stop + more),
            y=cut(self.y, stop),
            samples=self.samples[start:stop],
            crop_windows=cut(self.crop_windows, stop + more),
            recolourings=cut(self.recolourings, stop + more),
            weights=cut(self.weights, stop),
            mixings=cut(self.mixings, stop),
            message=None,
        )
