"""Descriptions of networks: layers, stages, operations and memory, from plans alone."""

from __future__ import annotations

from typing import Any

from dptrain.backends import load_backend
from dptrain.data import open_data
from dptrain.errors import UserError
from dptrain.measure.profile.profile import Roofs
from dptrain.measure.profile.rooflines import is_low, least_work
from dptrain.network.adaptation import resize
from dptrain.network.files import get_network
from dptrain.network.network import Network
from dptrain.network.zoo import NETWORKS, recipe
from dptrain.plan.freezing import planned_nodes, trained_nodes
from dptrain.plan.lowering import Phase
from dptrain.plan.optimizers import SGD, Optimizer, make_optimizer
from dptrain.plan.plan import Plan, make_plan, with_selection


def network_for(name: str, data: str | None = None) -> Network:
    """Return a network; with data, the one that would be trained on it.

    Args:
        name: of a network, or a .toml or .onnx file.
        data: a data specification, see `dptrain.data.open_data`.

    Raises:
        UserError: the network or the data does not exist, or they do not fit.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/a.npz", x=np.zeros((8, 3, 32, 32)), y=np.arange(8) % 4)
        ...     network = network_for("model0", f"npz:{folder}/a.npz")
        >>> network_for("model0").num_outputs, network.num_outputs
        (10, 4)
    """
    network = get_network(name)
    if data is None:
        return network
    found = open_data(data, network)
    return resize(network, found.input_shape, found.num_outputs)


def plan_for(
    network: Network,
    *,
    backend: str,
    batch_size: int,
    precision: str | None = None,
    optimizer: str | None = None,
    threads: int = 1,
    training: bool = True,
    tune: bool = False,
    recompute: bool = False,
    accumulate: int = 1,
    freeze: str = "",
) -> Plan:
    """Return the plan of a network on one rank.

    Args:
        network: the network.
        backend: name of the backend.
        batch_size: largest number of samples in a step.
        precision: precision of the backend; None for its default.
        optimizer: the name of an update rule; None for that of the network's recipe.
        threads: number of compute threads.
        training: False omits backward, gradients and update.
        tune: use the kernels that are the fastest on the GPU of this machine.
        recompute: compute activations again in the backward pass if this needs less memory.
        accumulate: number of passes in which a step processes its samples.
        freeze: patterns of what is not trained, see `UpdateRule`.

    Raises:
        UserError: the backend or the precision does not exist, a number is less than 1, or a
            pattern matches nothing.
    """
    if not 1 <= accumulate <= max(batch_size, 1):
        raise UserError(
            f"--accumulate is {accumulate}; expected 1 to {max(batch_size, 1)}, the --batch-size"
        )
    chosen = load_backend(backend)
    rule = recipe(network, optimizer)
    update = make_optimizer(rule.optimizer, momentum=rule.momentum, freeze=freeze)
    if tune:
        chosen.require_tuning()
        chosen.choose_device(0)
    plan = make_plan(
        network,
        chosen,
        -(-batch_size // accumulate),
        precision=precision,
        optimizer=update,
        training=training,
        threads=threads,
        recompute=recompute,
        passes=accumulate,
    )
    if not tune:
        return plan
    return with_selection(plan, chosen, chosen.measured_selection(plan, print))


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return layers, stages and memory of `plan` as values for JSON.

    FLOPs of layers are for one sample, FLOPs of stages for a full batch of one pass. Backward FLOPs
    do not include the gradient with respect to the network's input, which is not computed.

    ``estimated_roofline_share`` of a stage is its least time in the roofline model, divided by its
    estimated time, both of the machine for which the backend selects algorithms; None if there is
    no estimate. ``is_low`` marks a share below a third.
    """
    network, shares = plan.network, _estimated_shares(plan)
    return {
        "network": network.name,
        "input_shape": list(network.input_shape),
        "output_shape": list(network.output_shape),
        "loss": network.loss.kind,
        "parameters": network.num_parameters,
        "trained_parameters": plan.num_trained if plan.training else 0,
        "backend": plan.backend,
        "precision": plan.precision,
        "batch_size": plan.batch_size,
        "passes": plan.passes,
        "threads": plan.setting.threads,
        "training": plan.training,
        "optimizer": _optimizer_text(plan.optimizer) if plan.training else None,
        "layers": _layers(plan),
        "memory_bytes": _memory(plan),
        "stages": [
            {
                "name": stage.name,
                "group": stage.group,
                "phase": stage.phase.value,
                "flops": stage.flops,
                "bytes_moved": stage.bytes_moved,
                "estimated_roofline_share": shares.get(stage.name),
                "is_low": is_low(shares.get(stage.name)),
            }
            for stage in plan.stages
        ],
    }


def _estimated_shares(plan: Plan) -> dict[str, float]:
    """Return shares of the roofline by name of the stage, of those with an estimated time."""
    backend, setting, shares = load_backend(plan.backend), plan.setting, dict[str, float]()
    limits = backend.estimated_roofs(setting)
    if limits is None:
        return shares
    gflops, bandwidths = limits
    roofs = Roofs(gflops, bandwidths[-1][1], "estimated", copies=bandwidths)
    groups = {group.name: backend.explain(group, setting.of(group)) for group in plan.groups}
    for stage in plan.stages:
        found = groups.get(stage.group, {}).get(stage.phase)
        if found is not None and found.estimated_ms:
            least_ms = roofs.least_ms(*least_work(plan, stage, found.algorithm))
            shares[stage.name] = min(1.0, least_ms / found.estimated_ms)
    return shares


def _memory(plan: Plan) -> dict[str, int]:
    order = ("parameters", "gradients", "optimizer", "statistics", "buffers")
    assert set(plan.memory) <= set(order)
    by_purpose = {purpose: plan.memory[purpose] for purpose in order if purpose in plan.memory}
    return {**by_purpose, "total": sum(by_purpose.values())}


def _optimizer_text(optimizer: Optimizer) -> str:
    if isinstance(optimizer, SGD):
        return f"sgd, momentum {optimizer.momentum:g}" if optimizer.momentum else "sgd"
    return optimizer.kind


def _layers(plan: Plan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    nodes = planned_nodes(plan.network, plan.optimizer)
    trained = trained_nodes(nodes)
    for node in nodes:
        needs_input_gradient = not trained.isdisjoint(node.inputs)
        trains = any(parameter.is_trained for parameter in node.parameters)
        flops = node.flops
        rows.append({
            "name": node.name,
            "inputs": list(node.inputs),
            "output_shape": list(node.output_shape),
            "parameters": sum(parameter.size for parameter in node.parameters),
            "forward_flops": flops.forward,
            "backward_flops": (flops.backward_weight if trains else 0)
            + (flops.backward_input if needs_input_gradient else 0),
        })  # fmt: skip
    return rows


def group_stages(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sums of FLOPs and bytes moved by group, from the stages of `describe_plan`, and
    whether one of its stages is marked.
    """
    groups: dict[str, dict[str, Any]] = {}
    for stage in stages:
        empty = {"group": stage["group"], "forward_flops": 0, "backward_flops": 0, "bytes_moved": 0}
        row = groups.setdefault(stage["group"], {**empty, "is_low": False})
        row["is_low"] |= stage["is_low"]
        is_backward = stage["phase"].startswith(Phase.BACKWARD.value)
        row["backward_flops" if is_backward else "forward_flops"] += stage["flops"]
        row["bytes_moved"] += stage["bytes_moved"]
    return list(groups.values())


def list_presets() -> list[dict[str, Any]]:
    """Return the presets with their settings."""
    from dptrain.toml import read_toml
    from dptrain.training.presets import presets

    return [
        {"preset": found.name, "description": found.description, "settings": read_toml(found.path)}
        for found in presets()
    ]


def list_networks() -> list[dict[str, Any]]:
    """Return every network of the zoo with its size and its default training settings."""
    rows: list[dict[str, Any]] = []
    for name, entry in NETWORKS.items():
        built = entry.build()
        rows.append({
            "network": name,
            "input_shape": list(built.input_shape),
            "parameters": built.num_parameters,
            "data": entry.recipe.data,
            "optimizer": entry.recipe.optimizer,
            "learning_rate": entry.recipe.learning_rate,
            "description": entry.description,
        })  # fmt: skip
    return rows
