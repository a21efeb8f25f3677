"""The same network as PyTorch modules: what dptrain is checked against, and timed against.

Each layer is the PyTorch code with which dptrain exports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dptrain.interchange.torch_layers import Code, code_of
from dptrain.network import Dropout, Network, Node, StochasticDepth
from dptrain.network.network import INPUT

LossFunction = Callable[[Tensor, Tensor], Tensor]

LOSSES: Mapping[str, LossFunction] = {
    "classes": functional.cross_entropy,
    "binary": functional.binary_cross_entropy_with_logits,
    "values": functional.mse_loss,
}


class TorchNetwork(nn.Module):
    """A network whose layers read the outputs of any layers before them.

    Its forward pass is one function of a statement for each layer, without the cost of further
    calls. Outputs are released after their last use, so that PyTorch keeps only what it needs.

    Args:
        network: what to build.
        parameters: by name, in canonical layout; they are copied, in their dtype.
    """

    def __init__(self, network: Network, parameters: Mapping[str, NDArray[Any]]) -> None:
        super().__init__()
        names: dict[str, Any] = {
            "torch": torch,
            "F": functional,
            "nn": nn,
            "_DropSamples": _DropSamples,
        }
        last_use = {name: node.index for node in network.nodes for name in node.inputs}
        variables, lines = {INPUT: "x"}, ["def forward(self, x):"]
        for node in network.nodes:
            code, inputs = _code(node), [variables[name] for name in node.inputs]
            if code.module:
                # On the meta device no filters are allocated: the parameters come from outside.
                with torch.device("cpu" if "Norm" in code.module else "meta"):
                    self.add_module(_module_name(node), eval(code.module, names))
            for parameter in node.parameters:
                value = nn.Parameter(torch.tensor(parameters[parameter.name]))
                short = parameter.name.rpartition(".")[2]
                setattr(getattr(self, _module_name(node)), short, value)
            variables[node.name] = f"x{node.index}"
            result = code.expression.format(*inputs, m=f"self.{_module_name(node)}")
            lines.append(f"    {variables[node.name]} = {result}")
            unneeded = {variables[name] for name in node.inputs if last_use[name] == node.index}
            lines.append(f"    del {', '.join(unneeded)}" if unneeded else "    pass")
        lines.append(f"    return x{network.nodes[-1].index}")
        exec("\n".join(lines), names)
        self.forward = MethodType(names["forward"], self)


def _code(node: Node) -> Code:
    """Return the code of a layer in training; exported networks have no stochastic depth."""
    if isinstance(node.layer, StochasticDepth):
        return Code("{m}({0})", f"_DropSamples({node.layer.rate!r})")
    return code_of(node)


class _DropSamples(nn.Module):
    """Stochastic depth."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device) >= self._rate
        return x * kept / (1.0 - self._rate)


class _Scale(nn.Module):
    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor
        assert isinstance(factor, Tensor)
        return x * factor


def _module_name(node: Node) -> str:
    """Return the name of a layer's module; PyTorch allows no dots in it."""
    return node.name.replace(".", "_")


def parameter_names(network: Network) -> list[str]:
    """Names in the order of the PyTorch network's parameters."""
    return [parameter.name for node in network.nodes for parameter in node.parameters]


def fix_dropout(modules: nn.Module, network: Network, factors: Mapping[str, Tensor]) -> None:
    """Replace every dropout layer by a product with a given factor, 0 or 1 / (1 − rate)."""
    for node in network.nodes:
        if isinstance(node.layer, Dropout):
            setattr(modules, _module_name(node), _Scale(factors[node.name]))
