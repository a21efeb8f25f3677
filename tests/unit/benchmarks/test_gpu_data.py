"""Training on images, as far as it needs no GPU."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import data, streaming, suite
from benchmarks.gpu.data import DataResult, data_headline, data_table, generated_images
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.peers import data_peers
from benchmarks.gpu.peers.theirs import GPUMode
from benchmarks.gpu.streaming import StreamResult, stream_headline, stream_table
from benchmarks.progress import Progress
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
from dptrain.training.callbacks import AfterStep

pytestmark = pytest.mark.more

NETWORK = Network((3, 24, 24), [Conv2d(2), ReLU(), MaxPool2d(4), Flatten(), Dense(3)], name="small")


def test_epochs_of_training_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "IMAGES", 48)
    monkeypatch.setattr(suite, "STREAMED", 75)
    monkeypatch.setattr(suite, "DECODED", 75)
    monkeypatch.setattr(streaming, "available_cores", lambda: 1)
    monkeypatch.setattr(suite, "find_network", lambda name: NETWORK)
    settings = suite.Settings(
        sections=("data",), networks=(), data=suite.Cases(("small",), (16,), ("fp32",), ())
    )
    results = suite.run(settings, Machine(("numba",), 0, None, ()), Progress(), lambda _: None)
    assert results.complete
    (found,) = results.data
    assert len(found.us) == data.EPOCHS - 2
    assert min(*found.us, found.bare_us) > 0.0
    assert found.ratio is None
    assert [stream.source for stream in results.streams] == ["memory-mapped", "PNG files"]
    for stream in results.streams:
        assert len(stream.us) == streaming.EPOCHS - 2
        assert min(*stream.us, stream.bare_us, stream.reading_us) > 0.0


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


def test_share_and_speedup() -> None:
    result = DataResult(
        "cifar", 32, "bf16", "cuda", (50.0, 52.0, 51.0), 49.0,
        {"bf16 graph": (300.0, 310.0), "tf32 graph": (400.0,)},
    )  # fmt: skip
    assert result.share == pytest.approx(49 / 51)
    assert result.best == "bf16 graph"
    assert result.ratio == pytest.approx(305 / 51)
    table = data_table([result])
    assert table.rows[0][-1] == "reached"
    assert len(table.rows[0]) == len(table.columns)
    assert data_headline([result]) == [
        "training on images reaches 0.96 to 0.96 of the bare step; 5.98 to 5.98 times as fast as "
        "PyTorch"
    ]


def test_a_stream_is_compared_with_its_slowest_part() -> None:
    result = StreamResult(
        "PNG files", "cifar", 128, "bf16", "cuda", (170.0, 160.0), 140.0, 8.0, 150.0, "no limit, 2%"
    )
    assert result.limit == "reading"
    assert result.share == pytest.approx(150 / 165)
    table = stream_table([result])
    assert table.rows[0][-1] == "reached"
    assert len(table.rows[0]) == len(table.columns)
    assert stream_headline([result]) == [
        "training on streamed images reaches 0.91 to 0.91 of what its slowest part allows"
    ]
