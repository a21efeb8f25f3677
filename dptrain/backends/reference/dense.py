"""Dense layers, and biases as layers of their own."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from dptrain.backends.reference.operation import Operation, WeightedOperation
from dptrain.backends.replica import Context
from dptrain.network.biases import BiasAdd
from dptrain.network.layers import Dense
from dptrain.plan.lowering import Group, GroupNeeds, Setting


class FullyConnected(WeightedOperation[Dense]):
    """y = x Wᵀ + b, row by row."""

    def _rows(self, n: int) -> NDArray[Any]:
        """Return the input as (n, in). The shape is explicit because −1 is ambiguous for n = 0."""
        rows: NDArray[Any] = self.arrays["x"][:n].reshape(n, self.arrays["weight"].shape[1])
        return rows

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        x = self._rows(n)
        a["y"][:n, :, 0, 0] = x @ a["weight"].T + a["bias"]

    def backward_weight(self, context: Context) -> None:
        a, n = self.arrays, context.n
        dy = a["dy"][:n, :, 0, 0]
        a["dweight"][:] = dy.T @ self._rows(n)
        a["dbias"][:] = dy.sum(axis=0)

    def backward_input(self, context: Context) -> None:
        a, n = self.arrays, context.n
        dx = a["dy"][:n, :, 0, 0] @ a["weight"]
        a["dx"][:n] = dx.reshape(a["dx"][:n].shape)


class BiasAddition(Operation[BiasAdd]):
    """y = x + bias of the channel or unit."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        assert not setting.training, "biases are layers only in inference"
        return super().needs(group, setting)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        x = a["x"][:n]
        a["y"][:n] = x + a["bias"].reshape(-1, *(1,) * (x.ndim - 2))
