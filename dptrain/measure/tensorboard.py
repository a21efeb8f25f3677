"""Event files for TensorBoard, written with the package ``tensorboard``, without TensorFlow.

Tags are the names of `dptrain.measure.vocabulary`; times of stages have the prefix ``time_ms/``.
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
        start = library.SessionLog(status=library.SessionLog.START)
        self._add(step=done + 1, session_log=start)

    def record(self, values: Mapping[str, float | None]) -> None:
        """Write the metrics of a step: numbers by tag, with the key ``step``; None is omitted."""
        numbers = {tag: value for tag, value in values.items() if value is not None}
        step = numbers.pop("step")
        value = self._library.Summary.Value
        found = [value(tag=tag, simple_value=number) for tag, number in numbers.items()]
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
            min=numbers.min(), max=numbers.max(), num=len(numbers), sum=numbers.sum(),
            sum_squares=np.square(numbers).sum(), bucket_limit=edges[1:], bucket=counts,
        )  # fmt: skip
        value = library.Summary.Value(tag=tag, histo=histogram)
        self._add(step=step, summary=library.Summary(value=[value]))

    def graph(self, network: Network) -> None:
        """Write the network: its layers with their inputs and parameters, and the loss."""
        shown = {"input": "input"}
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
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.graph_pb2 import GraphDef
            from tensorboard.compat.proto.node_def_pb2 import NodeDef
            from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
            from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
            from tensorboard.compat.proto.versions_pb2 import VersionDef
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UserError(
            f"--tensorboard needs the package tensorboard ({error}); pip install "
            "'.[tensorboard]', or leave --tensorboard out"
        ) from None
    names = (AttrValue, Event, EventFileWriter, GraphDef, HistogramProto, NodeDef, SessionLog,
             Summary, TensorShapeProto, VersionDef)  # fmt: skip
    return SimpleNamespace(**{item.__name__: item for item in names})
