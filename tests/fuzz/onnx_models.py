"""ONNX models of other programs and of dptrain, edited and damaged, against ONNX Runtime."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dptrain import make_replica
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.errors import UserError
from dptrain.interchange.onnx_import import OnnxNetwork, read_onnx
from dptrain.network import Network
from dptrain.network.files import read_network
from dptrain.training.evaluation.model import TrainedModel
from dptrain.training.persistence.checkpoints import CheckpointFacts
from tests.fuzz.damage import damage_bytes
from tests.fuzz.network_files import make_case
from tests.fuzz.onnx_graphs import edit, random_graph
from tests.fuzz.outcome import ACCEPTED, COMPARED, Outcome, call, expect, expect_close, refused

SAMPLES = 2
LARGEST = 2**24
"""Elements of a network's input or parameters that are computed."""
OVERFLOWS = 1e12
"""Products of such weights overflow in the network. ONNX does not define the maximum of NaN."""
LIMIT_S = 20
"""Time that ONNX Runtime has for a damaged file."""
FACTS = CheckpointFacts(
    updates=1, network="fuzz", batch_size=4, seed=3, data="npz:x", ranks=1, total_steps=1,
    schedule="constant", spec={}, preprocessing={},
)  # fmt: skip


def trial(random: np.random.Generator, folder: Path) -> Outcome:
    """Read a model, and compare its outputs with those of ONNX Runtime."""
    path = folder / "model.onnx"
    if random.random() < 0.35:
        network = _export(random, folder, path)
        if random.random() < 0.5:
            return _compare_export(random, network, path)
        model, is_valid = onnx.load(path), True
    else:
        model, is_valid = random_graph(random)
    if random.random() < 0.5:
        edit(random, model)
        is_valid = False
        # Of files of dptrain, the preprocessing is not read, and edits of it have no effect.
        model.producer_name = "another program"
    content = model.SerializeToString()
    if random.random() < 0.15:
        content, is_valid = damage_bytes(random, content), False
    path.write_bytes(content)
    if random.random() < 0.1:
        result = call("describe", path, "--json", "--backend", "reference")
        if result.code:
            return result.refusal(is_valid=is_valid)
    try:
        found = read_onnx(path)
    except UserError as error:
        return refused(str(error), is_valid=is_valid)
    return _compare(random, found, path, is_valid=is_valid)


def _compare(
    random: np.random.Generator, found: OnnxNetwork, path: Path, *, is_valid: bool
) -> Outcome:
    """Compare an imported network with ONNX Runtime, if that runs the file."""
    network = found.network
    if network.num_parameters > LARGEST or np.prod(network.input_shape, dtype=float) > LARGEST:
        return ACCEPTED
    x = random.standard_normal((SAMPLES, *network.input_shape)).astype(np.float32)
    try:
        expected = run_onnx(path, x) if is_valid else _run_apart(path, x)
    except Exception as error:
        # The runtime has limits of its own; it must run what is valid.
        if is_valid:
            raise AssertionError("ONNX Runtime refuses a valid model") from error
        return ACCEPTED
    if expected.dtype.kind != "f" or not np.isfinite(expected).all():
        return ACCEPTED
    largest = max((float(np.abs(v).max(initial=0.0)) for v in found.arrays.values()), default=0.0)
    if not largest < OVERFLOWS:
        return ACCEPTED
    mine = _outputs(found, path, x)
    expect(mine.size == expected.size, f"{mine.shape} outputs; ONNX Runtime has {expected.shape}")
    scale = float(np.abs(expected).max(initial=1e-3))
    # Numbers that the file rounds to half precision are not rounded by dptrain.
    nodes = onnx.load(path).graph.node
    is_half = any(each.i == onnx.TensorProto.FLOAT16 for node in nodes for each in node.attribute)
    tolerance = (3e-2 if is_half else 1e-3) * scale + 1e-4
    expect_close(mine.reshape(expected.shape), expected, tolerance, "outputs")
    return COMPARED


def _outputs(found: OnnxNetwork, path: Path, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return what the imported network computes, with the function that ends the file."""
    replica = make_replica(found.network, "reference", len(x), training=False)
    for name, values in found.arrays.items():
        target = replica.parameters if name in replica.parameters else replica.statistics
        target[name] = values
    z = np.asarray(replica.forward(x), np.float64)
    model = onnx.load(path)
    is_own = model.producer_name == "dptrain"
    makers = {name: node for node in model.graph.node for name in node.output}
    node = makers.get(model.graph.output[0].name)
    while node is not None and node.op_type == "Identity":
        node = makers.get(node.input[0])
    end = "" if node is None else node.op_type
    if end in ("Sigmoid", "Reciprocal"):
        return np.asarray(1.0 / (1.0 + np.exp(-z)))
    if (end in ("Softmax", "LogSoftmax") and not is_own) or end == "Softmax":
        shifted = z - z.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return np.asarray(np.exp(logs) if end == "Softmax" else logs)
    return z


def run_onnx(path: Path, x: NDArray[Any]) -> NDArray[Any]:
    """Return the first output of a file for samples."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    output: NDArray[Any] = session.run(None, {given.name: x})[0]
    return output


def _run_apart(path: Path, x: NDArray[Any]) -> NDArray[Any]:
    """Run a damaged file in another process: ONNX Runtime ends with signal 11 for some.

    Raises:
        RuntimeError: the other process found no output.
    """
    output = path.with_name("expected.npy")
    output.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        faulthandler.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        try:
            np.save(output, run_onnx(path, x))
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"ONNX Runtime ended with {os.waitstatus_to_exitcode(status)}")
    found: NDArray[Any] = np.load(output)
    return found


def _export(random: np.random.Generator, folder: Path, path: Path) -> Network:
    """Write the ONNX file of a random network of dptrain."""
    described = folder / "net.toml"
    described.write_text("\n".join(make_case(random).lines) + "\n", encoding="utf-8")
    network = read_network(described)
    replica = make_replica(network, "reference", SAMPLES, training=False)
    for parameter in network.parameters:
        values = np.asarray(replica.parameters[parameter.name])
        noise = 0.2 * random.standard_normal(values.shape)
        replica.parameters[parameter.name] = (values + noise).astype(np.float32)
    for statistic in network.statistics:
        values = np.abs(random.standard_normal(statistic.shape)) + 0.5
        replica.statistics[statistic.name] = values.astype(np.float32)
    shape = network.input_shape
    kind = "image" if len(shape) == 3 else "vector"
    model = TrainedModel(
        network, Preprocessing(kind, shape, stored_shape=shape), replica, FACTS, step=1
    )
    model.export(path)
    x = random.standard_normal((SAMPLES, *shape)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "predicted.npy", model.predict(x))
    return network


def _compare_export(random: np.random.Generator, network: Network, path: Path) -> Outcome:
    """Compare predictions of an exported file, and the network that is read from it."""
    expected = np.load(path.with_name("predicted.npy"))
    found = run_onnx(path, np.load(path.with_name("x.npy")))
    scale = float(np.abs(expected).max(initial=1e-3))
    expect_close(found.reshape(expected.shape), expected, 2e-4 * scale + 1e-5, "predictions")
    read = read_onnx(path).network
    expect(read.num_parameters == network.num_parameters, "another number of parameters is read")
    return _compare(random, read_onnx(path), path, is_valid=True)
