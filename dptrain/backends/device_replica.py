"""A replica on a device whose stages return before they have run: what `DeviceEngine` needs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.replica import CropWindowReplica, Kernel, Listener, one_thread_at_a_time
from dptrain.batch import Batch
from dptrain.plan.flat import CORRECT, LOSS, SUMS
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Stage

SumsFuture = Callable[[float], list[float]]
"""Waits at most so many seconds for a step (`TimeoutError`) and returns its loss sums."""


@dataclass(eq=False)
class SummedStatistics:
    """Statistics of a stage that are summed over the ranks.

    Attributes:
        array: float64, in device memory: two sums of each channel, for the forward pass after the
            number of pixels.
        channels: number of channels.
        column_channels: channels that a block of the kernel adds.
        compile: starts to compile the kernel that computes them and adds them over the ranks.
        arguments: last arguments of this kernel (``rank_sums.cuh``), which the sum over GPUs sets.
    """

    array: NDArray[Any]
    channels: int
    column_channels: int
    compile: Callable[[], Any]
    arguments: Sequence[Any] = ()

    @property
    def has_count(self) -> bool:
        """True if the number of pixels comes before the sums."""
        return self.array.size > 2 * self.channels


EnqueueStatisticsSum = Callable[[SummedStatistics], None]
"""Enqueues the sum of statistics over all ranks, in place.

All ranks call it for the same stages, also those without samples."""


class DeviceReplica(CropWindowReplica, ABC):
    """A replica whose calls enqueue work on a device.

    A minibatch, its targets and the hyperparameters of a step reach the device in one message. The
    host writes it to a staging slot; a kernel unpacks it. There are several slots, so that the host
    prepares a step while earlier ones run, and may be several input buffers, so that a message is
    unpacked during the step before.

    Attributes:
        max_steps_in_flight: steps that may be enqueued and not finished when the next one is
            enqueued.
        loads_ahead: True if there are several input buffers.
        series_slots: staging slots of steps that are enqueued in series; none if they are not.
        summed_statistics: what stages sum over the ranks, by group, phase and address.
        statistics_ranks: ranks over which the kernels of stages add their statistics; 0 if stages
            call `enqueue_statistics_sum`.
        enqueue_statistics_sum: enqueues the sum of statistics; None unless stages call it.
    """

    max_steps_in_flight: int
    loads_ahead: bool = False
    series_slots: range = range(0)
    summed_statistics: dict[tuple[str, Phase, int], SummedStatistics]
    statistics_ranks: int = 1
    enqueue_statistics_sum: EnqueueStatisticsSum | None = None

    @property
    def stage_lists(self) -> list[list[tuple[Stage, Kernel]]]:
        """The stages with their kernels, for each input buffer; see `Replica.stages`."""
        return [self.stages]

    @property
    def upload_ms(self) -> float:
        """Mean time in which a message is copied to the device; 0 if kernels read it directly."""
        return 0.0

    @abstractmethod
    def encode_windows(
        self,
        samples: NDArray[np.int64],
        windows: NDArray[np.int64],
        recolourings: NDArray[np.float32] | None,
        mixings: NDArray[np.float32] | None = None,
    ) -> NDArray[np.uint8]:
        """Return the crop windows of several steps as they are staged.

        A thread that prepares minibatches calls this for many steps at once, which saves time when
        a step is staged.

        Args:
            samples, windows, recolourings, mixings: (steps, n, …), see `Batch`.

        Returns:
            (steps, bytes).
        """

    # A step: stage_batch, unpack_staged_batch (within load_stream, or not), run, enqueue_sums_copy,
    # enqueue_update, sums_future.

    @abstractmethod
    def stage_batch(
        self,
        batch: Batch,
        *,
        training: bool = True,
        learning_rate: float | None = None,
        stop: bool = False,
        slot: int | None = None,
    ) -> None:
        """Write a minibatch and the hyperparameters of its step to a staging slot.

        Args:
            batch: the minibatch. Its message, if it has one, is what `encode_windows` returned.
            training, stop: see `Replica.load`.
            learning_rate: of the step's update, if `enqueue_update` makes it before the host reads
                the loss. The minibatch is then not unpacked after a step whose loss is not finite,
                so that the minibatch of that step remains for inspection.
            slot: number of the staging slot, of which no step may be in flight; None for the one
                after the last.
        """

    @abstractmethod
    def move_staged_batch(self, source: int, slot: int) -> None:
        """Move a minibatch from a slot of a series, which is not enqueued, to another slot.

        Args:
            source: its slot. The minibatch has the size of the one that was staged last.
            slot: as for `stage_batch`.
        """

    # Steps in series are staged one after another, and enqueued afterwards: unpack_series_step for
    # the first one; for each one open_series_step, unpack_series_step (ahead) for the one after it,
    # run, enqueue_sums_copy, enqueue_update, end_series_step; finally series_future. The buffers of
    # the steps alternate.

    @abstractmethod
    def unpack_series_step(self, slot: int, *, ahead: bool) -> None:
        """Enqueue the kernel that unpacks a step of a series, with the properties of the last one.

        Args:
            slot: its staging slot.
            ahead: True lets it run during the step that is enqueued next.
        """

    @abstractmethod
    def open_series_step(self, slot: int) -> None:
        """Let `run` and the other calls enqueue the step of a staging slot."""

    @abstractmethod
    def end_series_step(self) -> None:
        """Let what is enqueued next wait for all of the step."""

    @abstractmethod
    def series_future(self) -> Callable[[float], None]:
        """Mark the end of a series, of which the open step is the last.

        Returns:
            A function that waits for it at most so many seconds (`TimeoutError`).
        """

    @abstractmethod
    def staged_sums(self, slot: int) -> list[float]:
        """Return the loss sums of a step of a series that has ended."""

    @abstractmethod
    def staged_time(self, slot: int) -> int:
        """Return the time at which the loss sums of a step were copied, in ns of the device."""

    @property
    @abstractmethod
    def staging_slot(self) -> int:
        """Slot of the staged minibatch. A program that unpacks it is valid for this slot only."""

    @abstractmethod
    def unpack_staged_batch(self) -> None:
        """Enqueue the kernel that copies the staged minibatch to where stages read it.

        Unless the message is of `load`, nothing is copied after a step whose loss is not finite.
        """

    @abstractmethod
    def load_stream(self) -> AbstractContextManager[None]:
        """Enqueue `unpack_staged_batch` within this context to let it overlap with the last step.

        The minibatch must have been staged with a slot. All later work waits for it.
        """

    @abstractmethod
    def select_step(self, slot: int, n: int) -> None:
        """Let the context and the stages be those of an enqueued step, to inspect its minibatch.

        Args:
            slot: staging slot of the step, of which no later minibatch was unpacked.
            n: number of its samples.
        """

    @abstractmethod
    def run(
        self, listener: Listener | None = None, *, overlap: bool = True, early: bool = False
    ) -> None:
        """Enqueue forward, loss and backward for the loaded minibatch.

        Args:
            listener: called after each stage was enqueued.
            overlap: False runs one stage at a time; True lets stages overlap.
            early: True updates some parameters as soon as no later stage reads them;
                `enqueue_update` then updates the rest. This rank's gradients must be the sum.
        """

    @one_thread_at_a_time
    def score(
        self,
        batches: Callable[[], Iterable[Batch]],
        collect: Callable[[Batch], None] | None = None,
        *,
        key: Hashable = None,
    ) -> tuple[float, int]:
        loss, correct = 0.0, 0
        # The host prepares a minibatch while earlier ones run.
        waiting: deque[SumsFuture] = deque()
        with self._kept_sums():
            for batch in chain(batches(), repeat(None, self.max_steps_in_flight)):
                if batch is not None:
                    self.stage_batch(batch._replace(global_count=1), training=False)
                    self.unpack_staged_batch()
                    self.run_forward(loss=True)
                    self.enqueue_sums_copy()
                    waiting.append(self.sums_future())
                    if collect is not None:
                        collect(batch)
                if waiting and (batch is None or len(waiting) > self.max_steps_in_flight):
                    sums = waiting.popleft()(math.inf)
                    loss += sums[LOSS]
                    correct += round(sums[CORRECT])
        return loss, correct

    @abstractmethod
    def prepare_score(self, batches: Callable[[], Iterable[Batch]], *, key: Hashable) -> None:
        """Do the work of the first calls of `score` that later ones do not repeat.

        Args:
            batches, key: as for `score`, of images that the replica keeps.
        """

    @contextmanager
    def _kept_sums(self) -> Iterator[None]:
        """Let the loss sums of training be as before when the context ends."""
        saved = self.memory.zeros(self._loss_sums.shape, self._loss_sums.dtype.name)
        self.memory.copy(saved, self._loss_sums)
        yield
        self.memory.copy(self._loss_sums, saved)

    def reset_loss(self) -> None:
        """Set the loss sums to 0, so that steps are made after a loss that was not finite."""
        self.memory.upload(self._loss_sums, np.zeros(len(SUMS), np.float32))

    @abstractmethod
    def enqueue_sums_copy(self) -> None:
        """Enqueue a copy of the loss sums to the host, for `sums_future`."""

    @abstractmethod
    def enqueue_update(self, *, rest: bool = False) -> None:
        """Enqueue the update of all parameters, with the hyperparameters that were staged.

        Args:
            rest: True leaves out what `run` has updated early.
        """

    @abstractmethod
    def sums_future(self) -> SumsFuture:
        """Mark the end of the step's work. Return what waits for it and returns the loss sums."""

    @abstractmethod
    def upload_hyperparameters(self) -> None:
        """Copy learning rate, update number and step number to the device now."""

    @abstractmethod
    def record_time(self, index: int) -> None:
        """Enqueue a kernel that writes the device clock when all earlier work has run.

        Args:
            index: of the time stamp, below 4 · (number of stages) + 2.
        """

    @abstractmethod
    def recorded_times(self) -> NDArray[np.int64]:
        """Return time stamps in nanoseconds by index, of steps that have ended."""
