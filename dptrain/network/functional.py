"""Networks written as functions: layers that are called on tensors.

::

    def block(x: Tensor, filters: int) -> Tensor:
        y = Conv2d(filters, bias=False)(x, name="conv1")
        y = ReLU()(BatchNorm2d()(y, name="bn1"))
        y = BatchNorm2d()(Conv2d(filters, bias=False)(y, name="conv2"), name="bn2")
        return ReLU()(y + x)

    x = Input((16, 32, 32))
    for number in range(3):
        with name_scope(f"layer1.{number}"):
            x = block(x, 16)
    network = Network.from_output(Dense(10)(Flatten()(x), name="fc"), name="mine")

A tensor is symbolic: it has a shape but no values, and it does not change. Names in a
`name_scope` begin with the name of the scope: ``layer1.0.conv1``. A layer that has no name gets
one of its kind and a number that counts the layers of this kind in the scope.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace

from dptrain.errors import UserError, shown
from dptrain.network.layers import Layer, Shape
from dptrain.network.network import INPUT, NodeSpec, make_input_shape

_SCOPE: ContextVar[str] = ContextVar("scope", default="")
_NUMBERS = itertools.count()


@dataclass(frozen=True, eq=False)
class Tensor:
    """The output of a layer, or the input of a network; made by `Input` and by calling layers.

    Attributes:
        shape: per sample, (C, H, W) or (F,).
        layer: that computes the tensor; None for an input.
        inputs: tensors that the layer reads.
        name: name of the node, with those of its scopes; None for a name by kind and number.
        scope: names of the scopes in which the layer was called, joined with dots.
    """

    shape: Shape
    layer: Layer | None = None
    inputs: tuple[Tensor, ...] = ()
    name: str | None = None
    scope: str = ""
    _number: int = field(default_factory=lambda: next(_NUMBERS), init=False, repr=False)

    def __add__(self, other: Tensor) -> Tensor:
        """Return the sum of two tensors of the same shape: ``Add()(self, other)``."""
        from dptrain.network.combining import Add

        return Add()(self, other) if isinstance(other, Tensor) else NotImplemented

    def __mul__(self, other: Tensor) -> Tensor:
        """Return the product of two tensors, or of maps and a gate: ``Multiply()(self, other)``."""
        from dptrain.network.combining import Multiply

        return Multiply()(self, other) if isinstance(other, Tensor) else NotImplemented

    def __repr__(self) -> str:
        made = INPUT if self.layer is None else self.name or self.layer.kind
        return f"<Tensor {made}: {'×'.join(map(str, self.shape))}>"


def Input(shape: Sequence[int]) -> Tensor:
    """Return the input of a network.

    Args:
        shape: (C, H, W) or (F,), without the batch.

    Raises:
        UserError: the shape is another one.
    """
    return Tensor(make_input_shape(shape))


@contextmanager
def name_scope(name: str) -> Iterator[None]:
    """Put a name and a dot in front of the names of all layers that are called in a block.

    Scopes can be nested.

    Examples:
        >>> from dptrain.network import Dense, Input, name_scope
        >>> with name_scope("head"):
        ...     y = Dense(10)(Input((5,)), name="fc")
        >>> y.name
        'head.fc'
    """
    if not (isinstance(name, str) and name):
        raise UserError(f"the name of a name_scope is {shown(repr(name))}; expected text")
    token = _SCOPE.set(_joined(_SCOPE.get(), name))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def _joined(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name


def apply(
    layer: Layer, inputs: Sequence[Tensor | Sequence[Tensor]], name: str | None = None
) -> Tensor:
    """Return the tensor that a layer computes; `Layer.__call__` describes the arguments."""
    tensors: list[Tensor] = []
    for item in inputs:
        tensors += item if isinstance(item, list | tuple) else [item]  # type: ignore[list-item]
    if not isinstance(name, str | None):
        raise UserError(f"{layer.kind}: name is {shown(name)}; expected text")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UserError(
                f"{layer.kind} is called on {type(tensor).__name__}; expected tensors, such as "
                "Input((3, 32, 32)) or the output of another layer"
            )
    accepts_more = _accepts_any_number(layer)
    if accepts_more and len(tensors) > 1:
        layer = replace(layer, num_inputs=len(tensors))  # type: ignore[type-var]
    if len(tensors) != layer.num_inputs:
        found = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
        expected = "at least 2" if accepts_more else layer.num_inputs
        raise UserError(f"{layer.kind} is called on {found}; expected {expected}")
    shape = layer.output_shape(layer.combine_shapes(tuple(tensor.shape for tensor in tensors)))
    scope = _SCOPE.get()
    return Tensor(shape, layer, tuple(tensors), name and _joined(scope, name), scope)


def _accepts_any_number(layer: Layer) -> bool:
    """Return True if the number of inputs of a layer follows from a call."""
    return is_dataclass(layer) and any(field.name == "num_inputs" for field in fields(layer))


def collect(output: Tensor) -> tuple[Shape, list[NodeSpec]]:
    """Return the input shape and the nodes that compute a tensor, in the order of the calls.

    Raises:
        UserError: as for `Network.from_output`.
    """
    if not isinstance(output, Tensor) or output.layer is None:
        found = "an input" if isinstance(output, Tensor) else type(output).__name__
        raise UserError(f"the output of the network is {found}; expected the output of a layer")
    found_tensors, left = {output}, [output]
    while left:
        new = [tensor for tensor in left.pop().inputs if tensor not in found_tensors]
        found_tensors.update(new)
        left += new
    ordered = sorted(found_tensors, key=lambda tensor: tensor._number)
    inputs = [tensor for tensor in ordered if tensor.layer is None]
    if len(inputs) != 1:
        raise UserError(f"the network has {len(inputs)} inputs; expected one Input")
    computed = [tensor for tensor in ordered if tensor.layer is not None]
    _refuse_shared_layers(computed)
    names = {inputs[0]: INPUT, **dict(zip(computed, _names(computed), strict=True))}
    specs = []
    for tensor in computed:
        assert tensor.layer is not None
        read = tuple(names[each] for each in tensor.inputs)
        specs.append(NodeSpec(tensor.layer, names[tensor], read))
    return inputs[0].shape, specs


def _names(computed: Sequence[Tensor]) -> list[str]:
    """Return the names of nodes; one without a name counts the layers of its kind and scope."""
    counts: Counter[tuple[str, str]] = Counter()
    names = []
    for tensor in computed:
        assert tensor.layer is not None
        kind = tensor.layer.kind
        counts[tensor.scope, kind] += 1
        default = f"{kind}{counts[tensor.scope, kind]}"
        names.append(tensor.name or _joined(tensor.scope, default))
    return names


def _refuse_shared_layers(computed: Sequence[Tensor]) -> None:
    """Refuse a layer with parameters that was called twice: calls do not share parameters."""
    seen: set[int] = set()
    for tensor in computed:
        layer = tensor.layer
        assert layer is not None
        shape = layer.combine_shapes(tuple(each.shape for each in tensor.inputs))
        if not layer.parameters(shape):
            continue
        if id(layer) in seen:
            raise UserError(
                f"the same {layer.kind} is called twice, but calls do not share parameters; "
                "construct a layer for each call"
            )
        seen.add(id(layer))
