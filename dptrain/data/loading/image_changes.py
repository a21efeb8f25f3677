"""How the images of minibatches are changed by the replica that loads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.data.loading.augmentation import Augmentation, centred_windows
from dptrain.network.layers import Shape

Encode = Callable[
    [
        NDArray[np.int64],
        NDArray[np.int64],
        NDArray[np.float32] | None,
        NDArray[np.float32] | None,
    ],
    NDArray[np.uint8],
]
"""Encodes samples, crop windows, recolourings and mixings, (steps, n, …), as `Batch.message`."""

Messages = list[NDArray[np.uint8] | None]
"""`Batch.message` of some steps, (steps, bytes) for each pass of a step."""


class ImageChanges(NamedTuple):
    """Changes of images, with the shape (n, k), or (steps, n, k).

    Attributes:
        windows, recolourings, mixings: as in `Batch`, but all of them have the partners of the last
            samples of the passes.
    """

    windows: NDArray[np.int64]
    recolourings: NDArray[np.float32] | None
    mixings: NDArray[np.float32] | None

    @classmethod
    def of(
        cls,
        augmentation: Augmentation | None,
        draws: NDArray[np.float64] | None,
        rows: NDArray[np.int64],
        shapes: tuple[Shape, Shape],
        mixings: NDArray[np.float32] | None,
    ) -> ImageChanges:
        """Return the random changes of images.

        Args:
            augmentation: the kinds of changes; None takes the centres of images.
            draws: (rows, n), from `Augmentation.draw`.
            rows: int64 (n,), index of each image.
            shapes: of inputs, (C, H, W) or (F,), and of images.
            mixings: from `Augmentation.mixings`; None if samples are not mixed.
        """
        if augmentation is None or draws is None:
            return cls(centred_windows(*shapes, rows), None, None)
        windows, recolourings = augmentation.crop_windows(shapes[0], draws, shapes[1], rows), None
        if augmentation.recolours:
            recolourings = augmentation.recolourings(draws, shapes[0][0])
        return cls(windows, recolourings, mixings)

    def by_step(self, span: slice, steps: int) -> ImageChanges:
        """Return the changes (n, k) of the images of a span as (steps, n, k)."""

        def divided(part: NDArray[Any]) -> NDArray[Any]:
            return part[span].reshape(steps, -1, part.shape[1])

        rest = (None if part is None else divided(part) for part in self[1:])
        return ImageChanges(divided(self.windows), *rest)

    def of_pass(self, step: int | slice, span: slice) -> ImageChanges:
        """Return what a `Batch` has of the changes (steps, n, k).

        Args:
            step: index of a step, or a slice of steps.
            span: samples of the pass, `Sampler.pass_spans`, with the partner of the last one.
        """
        windows, recolourings, mixings = self
        return ImageChanges(
            windows[step, span],
            None if recolourings is None else recolourings[step, span],
            None if mixings is None else mixings[step, own_span(span, mixes=True)],
        )


def own_span(span: slice, *, mixes: bool) -> slice:
    """Return the span of a pass without the partner of the last sample, if samples are mixed."""
    return slice(span.start, span.stop - mixes)


def encoded_passes(
    encode: Encode | None,
    spans: Sequence[slice],
    samples: NDArray[np.int64],
    changes: ImageChanges | None,
) -> Messages:
    """Return the messages of steps with minibatches of equal size.

    Args:
        encode: encodes them; None if the replica has no form of its own.
        spans: samples of each pass, `Sampler.pass_spans`.
        samples: (steps, n), see `Batch`; with the partners of the last samples of the passes.
        changes: (steps, n, …); None if the minibatches consist of inputs.
    """
    if encode is None or changes is None:
        return [None] * len(spans)
    mixes = changes.mixings is not None
    return [
        encode(samples[:, own_span(span, mixes=mixes)], *changes.of_pass(slice(None), span))
        for span in spans
    ]
