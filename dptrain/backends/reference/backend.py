"""Lowering, losses and update rules of the reference backend; `operations` has the layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Backend
from dptrain.backends.reference.normalization import BatchNormalization
from dptrain.backends.reference.operations import operation_of
from dptrain.backends.reference.shards import OperationFactory, sharded_kernels
from dptrain.backends.replica import Arrays, Context, GradientAddition, Kernel, Replica, segments
from dptrain.network.expressions import evaluate
from dptrain.network.losses import ElementwiseLoss, Loss, SoftmaxSquaredError
from dptrain.network.normalization import BatchNorm2d
from dptrain.network.outputs import are_right, most_probable
from dptrain.plan.lowering import Group, GroupNeeds, Phase, Precision, Setting
from dptrain.plan.optimizers import SGD, Adam, AdamW, RMSProp, applied_rule
from dptrain.plan.shards import add_in_order


class ReferenceBackend(Backend):
    """NumPy in float64 or float32."""

    name = "reference"
    supports_shards = True
    precisions: ClassVar[Mapping[str, Precision]] = {
        "fp64": Precision("float64", "float64"),
        "fp32": Precision("float32", "float32"),
    }

    def needs(self, group: Group, setting: Setting) -> GroupNeeds:
        return operation_of(group.head.layer).needs(group, setting)

    def bind(
        self, group: Group, phases: Collection[Phase], arrays: Arrays, replica: Replica
    ) -> Mapping[Phase, Kernel]:
        operation: OperationFactory = partial(operation_of(group.head.layer), group)
        if isinstance(group.head.layer, BatchNorm2d):
            # The attribute is read in each step, because several engines may assign it.
            operation = partial(
                BatchNormalization,
                group,
                sum_statistics=lambda parts, totals: replica.sum_statistics(parts, totals),
            )
        if replica.plan.setting.shards:
            return sharded_kernels(operation, phases, arrays)
        return operation(arrays).kernels(phases)

    def bind_additions(self, replica: Replica, additions: Sequence[GradientAddition]) -> Kernel:
        def run(context: Context) -> None:
            n = context.n
            for target, source, copies in additions:
                target[:n] = source[:n] if copies else target[:n] + source[:n]

        return run

    def bind_loss(
        self,
        replica: Replica,
        output: NDArray[Any],
        target: NDArray[Any],
        gradient: NDArray[Any] | None,
        sums: NDArray[Any],
    ) -> Kernel:
        function = _losses_of(replica.plan.network.loss)
        merges, smoothing = replica.plan.merges, replica.plan.setting.label_smoothing
        weights = replica.sample_weights

        def run(context: Context) -> None:
            parts = []
            for start, stop in pairwise(context.bounds.tolist()):
                losses, correct, dz = function(output[start:stop], target[start:stop])
                if smoothing and context.training:
                    losses += _smooth_labels(output[start:stop], target[start:stop], dz, smoothing)
                if weights is not None and context.training:
                    losses *= weights[start:stop]
                    dz *= weights[start:stop, None]
                loss = float(np.sum(losses)) * context.scale
                parts.append(np.array([loss, correct], sums.dtype))
                if context.training and gradient is not None:
                    gradient[start:stop] = dz * context.scale
            for slot, total in enumerate(add_in_order(parts, merges)):
                replica.slot_sums[slot, :2] = total

        return run

    def bind_update(self, replica: Replica, elements: slice) -> Kernel:
        w, g = replica.flat_parameters[elements], replica.flat_gradients[elements]
        state = {name: flat[elements] for name, flat in replica.flat_state.items()}
        runs, rule = segments(replica.plan, elements), applied_rule(replica.plan.optimizer)

        def decayed() -> NDArray[Any]:
            d: NDArray[Any] = g.copy()
            for start, stop, decay, _ in runs:
                d[start:stop] += decay * w[start:stop]
            return d

        def subtract(change: NDArray[Any], learning_rate: float) -> None:
            for start, stop, _, factor in runs:
                w[start:stop] -= learning_rate * factor * change[start:stop]

        def sgd(context: Context) -> None:
            assert isinstance(rule, SGD)
            d = decayed()
            if rule.momentum:
                v = state["momentum"]
                v[:] = rule.momentum * v + d
                d = d + rule.momentum * v if rule.nesterov else v
            subtract(d, context.learning_rate)

        def adam(context: Context) -> None:
            assert isinstance(rule, Adam)
            is_decoupled = isinstance(rule, AdamW)
            t, d = replica.updates, g if is_decoupled else decayed()
            m, v = state["first_moment"], state["second_moment"]
            m[:] = rule.beta1 * m + (1.0 - rule.beta1) * d
            v[:] = rule.beta2 * v + (1.0 - rule.beta2) * d * d
            mean, square = m / (1.0 - rule.beta1**t), v / (1.0 - rule.beta2**t)
            for start, stop, decay, factor in runs if is_decoupled else ():
                w[start:stop] *= 1.0 - context.learning_rate * factor * decay
            subtract(mean / (np.sqrt(square) + rule.epsilon), context.learning_rate)

        def rmsprop(context: Context) -> None:
            assert isinstance(rule, RMSProp)
            d, v = decayed(), state["second_moment"]
            v[:] = rule.decay * v + (1.0 - rule.decay) * d * d
            d = d / (np.sqrt(v) + rule.epsilon)
            if rule.momentum:
                state["momentum"][:] = d = rule.momentum * state["momentum"] + d
            subtract(d, context.learning_rate)

        return {"sgd": sgd, "rmsprop": rmsprop}.get(rule.kind, adam)


Losses = tuple[NDArray[Any], int, NDArray[Any]]
"""Loss of each sample, number of correct predictions, and gradients of the losses."""


def _losses_of(loss: Loss) -> Callable[[NDArray[Any], NDArray[Any]], Losses]:
    """Return the function of outputs and targets that computes a loss."""
    if isinstance(loss, ElementwiseLoss):
        return partial(_elementwise, loss)
    return _softmax_squared if isinstance(loss, SoftmaxSquaredError) else _softmax


def _softmax(z: NDArray[Any], labels: NDArray[Any]) -> Losses:
    rows = np.arange(len(z))
    shifted = z - z.max(axis=1, keepdims=True)
    e = np.exp(shifted)
    total = e.sum(axis=1, keepdims=True)
    losses = np.log(total[:, 0]) - shifted[rows, labels]
    dz = e / total
    dz[rows, labels] -= 1
    return losses, int(np.sum(most_probable(z) == labels)), dz


def _smooth_labels(
    z: NDArray[Any], labels: NDArray[Any], dz: NDArray[Any], smoothing: float
) -> NDArray[Any]:
    """Change the gradients to those of smoothed labels; return the changes of the losses."""
    rows = np.arange(len(z))
    dz -= smoothing / z.shape[1]
    dz[rows, labels] += smoothing
    change: NDArray[Any] = smoothing * (z[rows, labels] - z.mean(axis=1))
    return change


def _softmax_squared(z: NDArray[Any], labels: NDArray[Any]) -> Losses:
    rows, classes = np.arange(len(z)), z.shape[1]
    powers = np.exp(z - z.max(axis=1, keepdims=True))
    total = powers.sum(axis=1, keepdims=True)
    p = powers / total
    # p − onehot, for the label as −Σ of the others, which does not cancel for p close to 1.
    powers[rows, labels] = 0.0
    d = powers / total
    d[rows, labels] = -d.sum(axis=1)
    dz = 2.0 * p * (d - np.sum(p * d, axis=1, keepdims=True)) / classes
    return np.mean(d * d, axis=1), int(np.sum(most_probable(z) == labels)), dz


def _elementwise(loss: ElementwiseLoss, z: NDArray[Any], y: NDArray[Any]) -> Losses:
    arrays = {"z": z, "y": y}
    losses = np.broadcast_to(evaluate(loss.value, arrays), z.shape).mean(axis=1)
    correct = int(np.sum(are_right(z, y))) if loss.targets == "binary" else 0
    slope = np.broadcast_to(evaluate(loss.slope, arrays), z.shape)
    return losses, correct, slope / z.shape[1]
