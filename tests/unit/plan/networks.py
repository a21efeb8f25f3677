"""Random networks for the planner's properties."""

from __future__ import annotations

from hypothesis import strategies as st

from dptrain.errors import UserError
from dptrain.network import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    MeanSquaredError,
    Network,
    ReLU,
    Sigmoid,
    SumPool2d,
)

_sizes = st.integers(1, 3)

_on_maps: st.SearchStrategy[Layer] = st.one_of(
    st.builds(
        Conv2d,
        filters=st.integers(1, 5),
        kernel=st.tuples(_sizes, _sizes),
        stride=_sizes,
        padding=st.sampled_from(["same", "valid", "full", 1]),
    ),
    *(
        st.builds(pool, window=_sizes, stride=_sizes, padding=st.sampled_from(["same", "valid"]))
        for pool in (MaxPool2d, AveragePool2d, SumPool2d)
    ),
    st.builds(LocalResponseNorm, radius=st.integers(0, 3)),
)
_anywhere: st.SearchStrategy[Layer] = st.sampled_from([ReLU(), Sigmoid(), Dropout(0.5)])
_on_vectors: st.SearchStrategy[Layer] = st.builds(Dense, units=st.integers(1, 7))


def _stack(shape: tuple[int, ...], layers: list[Layer]) -> Network:
    """`layers` without those that do not fit where they stand."""
    kept: list[Layer] = []
    for layer in layers:
        try:
            shape = layer.output_shape(shape)
        except UserError:
            continue
        kept.append(layer)
    return kept


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """A network of up to a dozen layers, with or without maps, perhaps without parameters."""
    shape = draw(
        st.one_of(st.tuples(st.integers(1, 40)), st.tuples(_sizes, *[st.integers(1, 9)] * 2))
    )
    layers: list[Layer] = []
    if len(shape) == 3:
        layers = draw(st.lists(st.one_of(_on_maps, _anywhere), max_size=7))
        layers = [*layers, Flatten()]
    layers += draw(st.lists(st.one_of(_on_vectors, _anywhere), max_size=5))
    return Network(shape, _stack(shape, layers) or [ReLU()], MeanSquaredError())
