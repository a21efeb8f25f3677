"""Event files for TensorBoard, written with the package ``tensorboard``, without TensorFlow.

Tags are the names of `dptrain.vocabulary` in the groups ``train``, ``validation``, ``test``
and ``time``, see `tag_of`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.files import writing
from dptrain.network.network import Network

FOLDER = "tensorboard"
"""Name of the directory of the files, in a run directory or the directory of a profile."""

BINS = 30
PRODUCER = 22
"""Least version of the graph format that the viewer accepts."""

GROUPS = ("train", "validation", "test")
"""Beginnings of names of metrics that are groups of tags."""

TAGS = {
    "loss": "train/minibatch_loss",
    "learning_rate": "train/learning_rate",
    "epoch": "train/epoch",
    "step_ms": "time/step_ms",
    "samples_per_s": "time/samples_per_s",
}
"""Tags of metrics whose names do not begin with their group."""

METRICS = ("train/loss", "validation/loss", "validation/accuracy", "test/loss", "test/accuracy")
"""Columns of the table of hyperparameters."""


def tag_of(name: str) -> str:
    """Return the tag of a metric: its group, a slash and the rest of its name.

    Example:
        >>> tag_of("validation_accuracy"), tag_of("step_ms")
        ('validation/accuracy', 'time/step_ms')
    """
    group, _, rest = name.partition("_")
    return TAGS.get(name, f"{group}/{rest}" if group in GROUPS and rest else name)


class TensorBoard:
    """An event file.

    Args:
        folder: directory of the file.
        done: number of steps already made; later values in earlier files are discarded.
        flag: flag of the directory, for error messages.

    Raises:
        UserError: the package is missing, or the folder cannot be written.
    """

    def __init__(self, folder: Path, *, done: int = 0, flag: str = "--run-dir") -> None:
        self._library = library = import_tensorboard()
        with writing(folder, flag):
            self._writer = library.EventFileWriter(str(folder))
        self._nodes: dict[str, str] = {}
        start = library.SessionLog(status=library.SessionLog.START)
        self._add(step=done + 1, session_log=start)

    def record(self, values: Mapping[str, float | None]) -> None:
        """Write the metrics of a step: numbers by name, with the key ``step``; None is omitted."""
        numbers = {name: value for name, value in values.items() if value is not None}
        step = numbers.pop("step")
        value = self._library.Summary.Value
        found = [value(tag=tag_of(name), simple_value=x) for name, x in numbers.items()]
        self._add(step=int(step), summary=self._library.Summary(value=found))

    def histogram(self, step: int, tag: str, values: NDArray[Any]) -> None:
        """Write a histogram of the finite values."""
        numbers = np.asarray(values, np.float64).reshape(-1)
        numbers = numbers[np.isfinite(numbers)]
        if not len(numbers):
            return
        counts, edges = np.histogram(numbers, BINS)
        library = self._library
        histogram = library.HistogramProto(
            min=numbers.min(),
            max=numbers.max(),
            num=len(numbers),
            sum=numbers.sum(),
            sum_squares=np.square(numbers).sum(),
            bucket_limit=edges[1:],
            bucket=counts,
        )
        value = library.Summary.Value(tag=tag, histo=histogram)
        self._add(step=step, summary=library.Summary(value=[value]))

    def graph(self, network: Network) -> None:
        """Write the network: its layers with their inputs and parameters, and the loss."""
        shown = self._nodes = {"input": "input"}
        nodes = [self._node("input", "Input", (), network.input_shape)]
        for node in network.nodes:
            parameters = [p.name.replace(".", "/") for p in node.parameters]
            for name, parameter in zip(parameters, node.parameters, strict=True):
                nodes.append(self._node(name, "Parameter", (), parameter.shape, batch=False))
            kind = type(node.layer).__name__
            # The viewer shows a layer with parameters as a folder that holds them and the layer.
            name = f"{node.name}/{node.layer.kind}" if parameters else node.name
            inputs = (*(shown[i] for i in node.inputs), *parameters)
            nodes.append(self._node(name, kind, inputs, node.output_shape))
            shown[node.name] = name
        loss = type(network.loss).__name__
        nodes.append(self._node("loss", loss, (name,), (), batch=False))
        library = self._library
        versions = library.VersionDef(producer=PRODUCER)
        graph = library.GraphDef(node=nodes, versions=versions)
        self._add(graph_def=graph.SerializeToString())

    def layers(
        self, step: int, times_ms: Mapping[str, float], memory_bytes: Mapping[str, int]
    ) -> None:
        """Write the time and the memory of layers, by which the viewer colours the graph.

        Args:
            step: number of completed steps.
            times_ms, memory_bytes: by layer of the network that `graph` has written.
        """
        library, stats = self._library, []
        for name, node in self._nodes.items():
            memory = library.AllocatorMemoryUsed(total_bytes=memory_bytes.get(name, 0))
            microseconds = round(1e3 * times_ms.get(name, 0.0))
            stats.append(
                library.NodeExecStats(
                    node_name=node,
                    all_start_micros=1,
                    op_end_rel_micros=microseconds,
                    all_end_rel_micros=microseconds,
                    memory=[memory],
                )
            )
        devices = [library.DeviceStepStats(device="rank 0", node_stats=stats)]
        found = library.RunMetadata(step_stats=library.StepStats(dev_stats=devices))
        data = library.TaggedRunMetadata(tag=f"step {step}", run_metadata=found.SerializeToString())
        self._add(step=step, tagged_run_metadata=data)

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Write settings for the table of hyperparameters, which compares runs.

        Args:
            values: numbers, flags and texts by name; others are written as text.
        """
        library = self._library
        metrics = [
            library.MetricInfo(name=library.MetricName(tag=tag), display_name=tag)
            for tag in METRICS
        ]
        experiment = library.Experiment(
            hparam_infos=[library.HParamInfo(name=name) for name in values],
            metric_infos=metrics,
        )
        start = library.SessionStartInfo(start_time_secs=time.time())
        for name, value in values.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = str(value)
        hparams = library.hparams
        self._add_hparams(hparams.EXPERIMENT_TAG, experiment=experiment)
        self._add_hparams(hparams.SESSION_START_INFO_TAG, session_start_info=start)

    def end_session(self) -> None:
        """Mark the run in the table of hyperparameters as complete."""
        library = self._library
        end = library.SessionEndInfo(status="STATUS_SUCCESS", end_time_secs=time.time())
        self._add_hparams(library.hparams.SESSION_END_INFO_TAG, session_end_info=end)

    def _add_hparams(self, tag: str, **what: Any) -> None:
        library = self._library
        hparams = library.hparams
        content = library.HParamsPluginData(version=hparams.PLUGIN_DATA_VERSION, **what)
        data = library.SummaryMetadata.PluginData(
            plugin_name=hparams.PLUGIN_NAME, content=content.SerializeToString()
        )
        metadata = library.SummaryMetadata(plugin_data=data)
        value = library.Summary.Value(tag=tag, metadata=metadata)
        self._add(summary=library.Summary(value=[value]))

    def close(self) -> None:
        """Write all events and close the file."""
        self._writer.close()

    def _add(self, **what: Any) -> None:
        self._writer.add_event(self._library.Event(wall_time=time.time(), **what))

    def _node(
        self,
        name: str,
        operation: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        *,
        batch: bool = True,
    ) -> Any:
        """Return a node; its first dimension is the batch, with unknown size."""
        library = self._library
        sizes = (-1, *shape) if batch else shape
        dimensions = [library.TensorShapeProto.Dim(size=size) for size in sizes]
        shapes = library.AttrValue.ListValue(shape=[library.TensorShapeProto(dim=dimensions)])
        attributes = {"_output_shapes": library.AttrValue(list=shapes)}
        return library.NodeDef(name=name, op=operation, input=inputs, attr=attributes)


def import_tensorboard() -> Any:
    """Return the classes of the package ``tensorboard`` that are used, by name.

    Raises:
        UserError: it is not installed, or does not load.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorboard.compat.proto.attr_value_pb2 import AttrValue
            from tensorboard.compat.proto.config_pb2 import RunMetadata
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog, TaggedRunMetadata
            from tensorboard.compat.proto.graph_pb2 import GraphDef
            from tensorboard.compat.proto.node_def_pb2 import NodeDef
            from tensorboard.compat.proto.step_stats_pb2 import (
                AllocatorMemoryUsed,
                DeviceStepStats,
                NodeExecStats,
                StepStats,
            )
            from tensorboard.compat.proto.summary_pb2 import (
                HistogramProto,
                Summary,
                SummaryMetadata,
            )
            from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
            from tensorboard.compat.proto.versions_pb2 import VersionDef
            from tensorboard.plugins.hparams import metadata as hparams
            from tensorboard.plugins.hparams.api_pb2 import (
                Experiment,
                HParamInfo,
                MetricInfo,
                MetricName,
            )
            from tensorboard.plugins.hparams.plugin_data_pb2 import (
                HParamsPluginData,
                SessionEndInfo,
                SessionStartInfo,
            )
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UserError(
            f"--tensorboard needs the package tensorboard ({error}); pip install "
            "'.[tensorboard]', or leave --tensorboard out"
        ) from None
    names = (
        AllocatorMemoryUsed, AttrValue, DeviceStepStats, Event, EventFileWriter, Experiment,
        GraphDef, HParamInfo, HParamsPluginData, HistogramProto, MetricInfo, MetricName, NodeDef,
        NodeExecStats, RunMetadata, SessionEndInfo, SessionLog, SessionStartInfo, StepStats,
        Summary, SummaryMetadata, TaggedRunMetadata, TensorShapeProto, VersionDef,
    )  # fmt: skip
    return SimpleNamespace(hparams=hparams, **{item.__name__: item for item in names})
