"""Training on images, as far as it needs no GPU."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import data, sections, streaming
from benchmarks.gpu.cases import GpuRun
from benchmarks.gpu.data import generated_images
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.peers import data_peers
from benchmarks.gpu.peers.theirs import GPUMode
from benchmarks.progress import Progress
from benchmarks.session import Cases, Session, Settings
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
from dptrain.training.callbacks import AfterStep

pytestmark = pytest.mark.more

NETWORK = Network((3, 24, 24), [Conv2d(2), ReLU(), MaxPool2d(4), Flatten(), Dense(3)], name="small")


def test_epochs_of_training_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("IMAGES", 48), ("STREAMED", 75), ("DECODED", 75)):
        monkeypatch.setattr(sections, name, count)
    monkeypatch.setattr(streaming, "available_cores", lambda: 1)
    monkeypatch.setattr(sections, "find_network", lambda name: NETWORK)
    monkeypatch.setattr(sections, "CASES", {"data": Cases(("small",), (16,))})
    session = Session(Settings(("data",)), Progress())
    sections.train_on_images(GpuRun(session, Machine(("numba",), 0, None, ()), None))
    assert not session.report.missing
    (found,) = session.report.rows["data"]
    assert len(found["medians_ms"]) == data.EPOCHS - 2
    assert min(*found["medians_ms"], found["bare_ms"]) > 0.0
    streams = session.report.rows["streams"]
    assert [stream["source"] for stream in streams] == ["memory-mapped", "PNG files"]
    for stream in streams:
        assert len(stream["medians_ms"]) == streaming.EPOCHS - 2
        assert set(stream["limits_ms"]) == {"step", "link", "reading"}
        assert min(stream["limits_ms"]["step"], stream["limits_ms"]["reading"]) > 0.0


def test_training_that_ends_early_is_an_error() -> None:
    clock = data.EpochClock()
    with data.images_file(NETWORK, 48) as images:
        trainer = data.make_trainer(NETWORK, images, "numba", "fp32", 16, clock)
        trainer.callbacks.append(AfterStep(lambda *_: signal.raise_signal(signal.SIGTERM), 4))
        with pytest.raises(RuntimeError, match=r"ended after SIGTERM after 5 of 18 steps"):
            data.fit(trainer)


def test_pytorch_reads_every_image_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    images, labels = generated_images(NETWORK, 48)
    mode = GPUMode("fp32 eager", precision="fp32", graph=False)
    steps = data_peers.AugmentedSteps(NETWORK, images, labels, 16, mode)
    read: list[int] = []
    augmented = steps.augmented

    def record(index: torch.Tensor) -> Any:
        read.extend(index.tolist())
        return augmented(index)

    monkeypatch.setattr(steps, "augmented", record)
    assert len(steps.epochs_us()) == data.EPOCHS - 2
    for epoch in np.array(read).reshape(data.EPOCHS, 48):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(48))


def test_pytorch_crops_and_mirrors_parts_of_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    for name in ("BRIGHTNESS", "CONTRAST"):
        monkeypatch.setattr(data_peers, name, 0.0)
    images, labels = generated_images(NETWORK, 16)
    mode = GPUMode("fp32 eager", precision="fp32", graph=False)
    steps = data_peers.AugmentedSteps(NETWORK, images, labels, 16, mode)
    for image, crop in zip(images, steps.augmented(torch.arange(16)).numpy(), strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(image / 127.5 - 1.0, (3, 24, 24))[0]
        distance = min(np.abs(windows - x).max((2, 3, 4)).min() for x in (crop, crop[..., ::-1]))
        assert distance < 1e-5
