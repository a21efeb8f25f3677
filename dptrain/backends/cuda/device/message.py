"""The message that carries the minibatch of a step to a GPU: its layout and its encoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.network.layers import RandomMask
from dptrain.network.network import Network
from dptrain.plan.lowering import Setting

HYPERPARAMETERS = 6
"""Numbers that change from step to step; ``hyperparameters.cuh`` names them."""

WINDOW = 4
"""Numbers that describe a crop window: image, first row, first column, mirrored."""

CUTOUT = 4
"""Numbers that describe a cutout: first row and column, and the row and column after the last."""

MAP = 8
"""Numbers that describe an affine map, `dptrain.data.loading.geometry.fixed_point`."""

RECOLOURING, MATRIX = 2, 9
"""Numbers that describe how its colours change: factor of distances from the mean and added number,
and the matrix of the channels."""

CHANGES = WINDOW + CUTOUT + MAP + RECOLOURING + MATRIX
"""Most numbers that describe a sample."""

MIXING = 5
"""Most numbers that describe how a sample is mixed with the next one: the weight of that one in a
box, and the box."""

ALIGNMENT = 256

SMALL_BYTES, MAX_SLOTS = 1 << 20, 4
"""Messages up to this size have four staging slots instead of two: a step of few samples takes a
GPU less time than the host occasionally needs to prepare one, so several should be enqueued."""

SERIES_STEPS, SERIES_BYTES, SERIES_IMAGE_BYTES = 8, 16 << 10, 512 << 10
"""Steps of a series, and its largest messages without and with images. Kernels read messages
without images from host memory, each sample with a few reads, while the step before runs."""


@dataclass(frozen=True)
class Message:
    """The message of a step: offsets of its parts in bytes.

    Attributes:
        batch_size: largest number of samples.
        target_words, weight_words, sample_words: 32-bit words per sample of targets, of weights,
            and of sample identities.
        targets, weights, samples, batch: where each part begins; hyperparameters are first.
        nbytes: size.
    """

    batch_size: int
    target_words: int
    weight_words: int
    sample_words: int
    targets: int
    weights: int
    samples: int
    batch: int
    nbytes: int

    @classmethod
    def of(cls, network: Network, setting: Setting) -> Message:
        """Return the layout for training steps of `network`."""
        n = setting.batch_size
        target_words = 1 if network.loss.targets == "classes" else network.num_outputs
        drops = any(isinstance(node.layer, RandomMask) for node in network.nodes)
        sample_words = 2 if drops and setting.training else 0
        weight_words = int(setting.weighted)
        targets = ALIGNMENT
        weights = targets + _aligned(4 * n * target_words)
        samples = weights + _aligned(4 * n * weight_words)
        batch = samples + _aligned(4 * n * sample_words)
        # With maps and matrices, windows and 8-bit images may take more than inputs. If samples are
        # mixed, there is one image more.
        entries = max(math.prod(network.input_shape), CHANGES) + MAP + MATRIX
        nbytes = batch + _aligned(4 * (n + 1) * entries + 4 * n * MIXING)
        words = target_words, weight_words, sample_words
        return cls(n, *words, targets, weights, samples, batch, nbytes)

    @property
    def slots(self) -> int:
        """Number of staging slots."""
        return MAX_SLOTS if self.nbytes <= SMALL_BYTES else 2

    def series_bytes(self, image_bytes: int) -> int:
        """Return the size of the message of a step in series.

        Args:
            image_bytes: bytes of an image that the message contains; 0 if images are cached.

        Returns:
            0 if it is too long, so that steps are not enqueued in series.
        """
        # Maps, matrices and mixings are rare: messages without them decide.
        words = WINDOW + CUTOUT + RECOLOURING
        usual = self.batch + self.batch_size * (4 * words + image_bytes)
        # Slots follow one another, and kernels read several numbers at once.
        most = self.batch + _aligned(self.window_bytes(image_bytes))
        return most if usual <= (SERIES_IMAGE_BYTES if image_bytes else SERIES_BYTES) else 0

    def window_bytes(self, image_bytes: int) -> int:
        """Return the most bytes of crop windows, and of images if they have any."""
        n = self.batch_size
        return (n + 1) * (4 * CHANGES + image_bytes) + 4 * n * MIXING

    def encode(
        self,
        samples: NDArray[np.int64],
        windows: NDArray[np.int64],
        recolourings: NDArray[np.float32] | None,
        mixings: NDArray[np.float32] | None = None,
    ) -> NDArray[np.uint8]:
        """Return what follows the targets in the messages of steps, except for images.

        Args:
            samples, windows, recolourings, mixings: (steps, n, …), see `Batch`.

        Returns:
            (steps, bytes).
        """
        steps, first = len(samples), self.samples
        nothing = np.zeros((steps, 0, 0), np.float32)
        colours = nothing if recolourings is None else recolourings
        mixed = nothing if mixings is None else mixings
        size = 4 * (windows.size + colours.size + mixed.size) // max(steps, 1)
        message = np.zeros((steps, self.batch - first + size), np.uint8)

        def put(begin: int, values: NDArray[Any]) -> int:
            part = np.ascontiguousarray(values.reshape(steps, -1)).view(np.uint8)
            message[:, begin - first : begin - first + part.shape[1]] = part
            return begin + int(part.shape[1])

        if self.sample_words:
            put(self.samples, samples)
        begin, whole = self.batch, windows.astype(np.int32)
        for part in (
            *np.split(whole, [WINDOW, WINDOW + CUTOUT], axis=2),
            *np.split(colours, [RECOLOURING], axis=2),
            mixed,
        ):
            begin = put(begin, part)
        return message


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Slot(NamedTuple):
    """Views of a staging slot in host memory, as different types."""

    hyperparameters: NDArray[np.float32]
    hyperparameter_bits: NDArray[np.uint32]
    targets: NDArray[Any]
    weights: NDArray[np.float32]
    samples: NDArray[np.int64]
    batch: NDArray[np.float32]
    message: NDArray[np.uint8]

    @classmethod
    def of(cls, host: NDArray[np.uint8], message: Message, target: Any) -> Slot:
        """Return views of `host`."""
        return cls(
            hyperparameters=host[: 4 * HYPERPARAMETERS].view(np.float32),
            hyperparameter_bits=host[: 4 * HYPERPARAMETERS].view(np.uint32),
            targets=host[message.targets : message.weights].view(target),
            weights=host[message.weights : message.samples].view(np.float32),
            samples=host[message.samples : message.batch].view(np.int64),
            batch=host[message.batch :].view(np.float32),
            message=host,
        )
