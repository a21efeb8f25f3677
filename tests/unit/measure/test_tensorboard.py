"""Files for TensorBoard, read back by TensorBoard's own reader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain import Trainer
from dptrain.backends.numba import create as create_numba
from dptrain.backends.replica import group_outputs
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.metrics import MetricsFile
from dptrain.measure.tensorboard import FOLDER, TensorBoard, tag_of
from dptrain.network import get_network
from dptrain.plan import make_plan
from dptrain.training.profiling.profiling import ProfileOptions, profile
from dptrain.training.run import train
from dptrain.training.settings import load_settings
from dptrain.vocabulary import SECTIONS, find_term


def read(folder: Path) -> Any:
    """What the package's reader makes of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def test_numbers_come_back(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.record({"step": 3, "loss": 0.25, "test_accuracy": None})
    board.record({"step": 4, "loss": 0.125})
    values = np.array([-1.0, 0.0, 0.5, 2.0, np.nan, np.inf])
    board.histogram(4, "conv1.weight", values)
    board.histogram(4, "empty", np.array([np.nan]))
    board.graph(get_network("model0"))
    board.close()
    found = read(tmp_path)
    tag = "train/minibatch_loss"
    assert [(event.step, event.value) for event in found.Scalars(tag)] == [(3, 0.25), (4, 0.125)]
    assert found.Tags()["scalars"] == [tag]
    assert found.Tags()["histograms"] == ["conv1.weight"]
    (event,) = found.Histograms("conv1.weight")
    histogram = event.histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (-1.0, 2.0, 4)
    assert (histogram.sum, histogram.sum_squares) == (1.5, 5.25)
    assert sum(histogram.bucket) == 4
    assert histogram.bucket_limit[-1] == 2.0
    nodes = {node.name: node for node in found.Graph().node}
    assert list(nodes["conv1/conv"].input) == ["input", "conv1/weight", "conv1/bias"]
    assert nodes["conv1/conv"].op == "Conv2d"
    shape = nodes["pool2"].attr["_output_shapes"].list.shape[0]
    assert [dimension.size for dimension in shape.dim] == [-1, 32, 8, 8]
    assert all(name in nodes for node in nodes.values() for name in node.input)


def test_a_run_that_goes_on_says_steps_once(tmp_path: Path) -> None:
    for done, last in ((0, 30), (10, 40)):
        board = TensorBoard(tmp_path, done=done)
        for step in range(done + 10, last + 10, 10):
            board.record({"step": step, "loss": float(last)})
        board.close()
    found = [(event.step, event.value) for event in read(tmp_path).Scalars("train/minibatch_loss")]
    assert found == [(10, 30.0), (20, 40.0), (30, 40.0), (40, 40.0)]


def test_training_writes_what_the_metrics_file_has(tmp_path: Path) -> None:
    flags = {"network": "model-small", "run_dir": str(tmp_path / "run"), "steps": 50}
    config = load_settings({**flags, "tensorboard": True, "baseline_steps": 0, "threads": 1}, {})
    train(config, World.single())
    found = read(tmp_path / "run" / FOLDER)
    records = MetricsFile(tmp_path / "run" / "metrics.jsonl").read()
    for tag in ("loss", "learning_rate", "samples_per_s", "step_ms", "test_loss", "test_accuracy"):
        expected = [(r["step"], np.float32(r[tag])) for r in records if tag in r]
        assert expected
        assert [(event.step, event.value) for event in found.Scalars(tag_of(tag))] == expected
    (event,) = found.Scalars("time/conv1+relu1+pool1.forward")[:1]
    assert event.step == 10
    assert event.value > 0
    # An epoch has 36 steps.
    assert [e.step for e in found.Histograms("parameters/conv1.weight")] == [36]
    histograms = found.Tags()["histograms"]
    outputs = [tag for tag in histograms if tag.startswith("activations/")]
    assert len(histograms) - len(outputs) == len(get_network("model-small").parameters)
    assert found.Graph().node
    names = {tag_of(term.name) for section in SECTIONS.values() for term in section}
    for tag in found.Tags()["scalars"]:
        # A stage's phase is the word; a stage that stands alone is called by it.
        name = tag.removeprefix("time/")
        known = tag in names or find_term(name) or find_term(name.rpartition(".")[2])
        assert known or tag.replace("zeros/", "activations/") in outputs


@pytest.mark.more
def test_a_run_has_hyperparameters_and_a_graph_with_time_and_memory(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    flags = {"network": "model-small", "run_dir": str(tmp_path / "run"), "epochs": 1}
    train(load_settings({**flags, "tensorboard": True, "threads": 1}, {}), World.single())
    found = read(tmp_path / "run" / FOLDER)
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["batch_size"].number_value == 32
    assert hparams["optimizer"].string_value == "sgd"
    assert not hparams["flip"].bool_value
    assert "run_dir" not in hparams
    content = found.SummaryMetadata("_hparams_/experiment").plugin_data.content
    metrics = HParamsPluginData.FromString(content).experiment.metric_infos
    assert {metric.name.tag for metric in metrics} <= {*found.Tags()["scalars"]}
    (tag,) = found.Tags()["run_metadata"]
    assert tag == "step 36"
    (device,) = found.RunMetadata(tag).step_stats.dev_stats
    stats = {node.node_name: node for node in device.node_stats}
    assert stats.keys() <= {node.name for node in found.Graph().node}
    plan = make_plan(get_network("model-small"), create_numba(), 32, threads=1)
    assert stats["pool1"].memory[0].total_bytes == plan.buffers["pool1"].nbytes
    assert stats["conv1/conv"].all_end_rel_micros > 0


@pytest.mark.more
def test_activations_are_the_outputs_of_the_network(tmp_path: Path) -> None:
    with Trainer("model-small", "digits", epochs=1, run_dir=tmp_path / "run", tensorboard=True,
                 baseline_steps=0, threads=1, best_by="none") as trainer:  # fmt: skip
        trainer.fit()
        samples = trainer.job.dataset.validation
        indices = np.arange(32) * len(samples) // 32
        x = np.zeros((32, *trainer.job.dataset.input_shape), np.float32)
        samples.read(indices, x, np.zeros(32, np.int32))
        outputs = dict(group_outputs(trainer.job.replica, x))
        last = list(outputs)[-1]
        found = outputs[last].reshape(32, 10)
        np.testing.assert_array_equal(found, trainer.job.replica.forward(x))
    found = read(tmp_path / "run" / FOLDER)
    (event,) = found.Histograms(f"activations/{last}")
    assert event.histogram_value.num == 320
    expected = outputs[last].sum(dtype=np.float64)
    np.testing.assert_allclose(event.histogram_value.sum, expected, rtol=1e-6)
    (share,) = found.Scalars("zeros/conv1+relu1+pool1")
    assert 0.0 < share.value < 1.0


def test_a_profile_has_a_line_a_step(tmp_path: Path) -> None:
    flags = {"network": "mlp-5", "backend": "reference", "batch_size": 100, "tensorboard": True}
    options = ProfileOptions(steps=3, skip=1, output=tmp_path / "p", roofs=False)
    record = profile(load_settings(flags, {}), World.single(), options, quiet=True)
    assert record is not None
    found = read(tmp_path / "p" / FOLDER)
    times = tuple(event.value for event in found.Scalars("time/step_ms"))
    assert times == pytest.approx(record.step_times_ms, rel=1e-6)
    stage = record.stages[1]
    values = [event.value for event in found.Scalars(f"time/{stage.name}")]
    # Kept as float32.
    assert np.mean(values) == pytest.approx(stage.time_ms.mean, rel=1e-6)
    assert found.Graph().node


def test_without_the_package_one_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(UserError, match=r"needs the package tensorboard.*\.\[tensorboard\]"):
        TensorBoard(tmp_path)
    flags = {"network": "mlp-5", "backend": "reference", "tensorboard": True, "steps": 1}
    config = load_settings({**flags, "run_dir": str(tmp_path / "run")}, {})
    with pytest.raises(UserError, match="needs the package"):
        train(config, World.single())


def test_a_profile_for_tensorboard_needs_a_folder() -> None:
    config = load_settings({"network": "mlp-5", "tensorboard": True}, {})
    with pytest.raises(UserError, match=r"--tensorboard writes files.*--output"):
        profile(config, World.single(), ProfileOptions(), quiet=True)
