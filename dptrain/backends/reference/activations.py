"""Functions of single elements and their derivatives."""

from __future__ import annotations

import numpy as np

from dptrain.backends.reference.operation import Operation
from dptrain.backends.replica import Context
from dptrain.network.derivatives import times
from dptrain.network.elementwise import DY, Activation, Formula
from dptrain.network.expressions import Expression, evaluate
from dptrain.plan.lowering import Access, Group, GroupNeeds, Phase, Setting


class ActivationOperation(Operation[Activation]):
    """A function of each element, computed from its expression."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if group.gradients:
            reads = group.head.layer_of(Activation).formula.reads
            phases[Phase.BACKWARD] = Access(("dy", reads), group.gradients)
        return GroupNeeds(phases)

    def forward(self, context: Context) -> None:
        self._assign("y", self._formula.forward, context.n, "x")

    def backward(self, context: Context) -> None:
        formula = self._formula
        dx = times(DY, formula.slope, first=True)
        self._assign("dx", dx, context.n, "dy", formula.reads)

    @property
    def _formula(self) -> Formula:
        return self.layer.formula

    def _assign(self, result: str, expression: Expression, n: int, *inputs: str) -> None:
        """Evaluate an expression of arrays for the first n samples."""
        # Parameters are float64: in fp32, results are rounded once.
        values = {name: np.float64(value) for name, value in self._formula.values.items()}
        arrays = {name: self.arrays[name][:n] for name in inputs}
        self.arrays[result][:n] = evaluate(expression, {**arrays, **values})
