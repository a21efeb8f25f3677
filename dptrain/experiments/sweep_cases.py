"""The cases of a sweep: points of a design, each with several seeds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dptrain.errors import UserError, shown, suggest
from dptrain.experiments.network_changes import AXES, ImpossibleNetworkError, change_layers
from dptrain.network.adaptation import adaptation_lines
from dptrain.network.network import Network
from dptrain.runs.settings import DIRECTORY_SETTINGS
from dptrain.training.job import open_network
from dptrain.training.settings import Settings, settings

MakeSettings = Callable[[Mapping[str, str]], Settings]
"""Returns the settings of the command with some of them replaced by texts."""

UNCHANGED = "unchanged"
"""Name of the point that has the settings and the network of the command."""


@dataclass(frozen=True)
class Design:
    """What a sweep varies.

    Attributes:
        axes: values by the name of a setting, or by a change of the network (a name of `AXES`).
        seeds: seeds of each point.
        one_at_a_time: True to vary one axis at a time; False to combine all values of all axes.
        has_unchanged: True to train with no change as well, first.
    """

    axes: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    one_at_a_time: bool = False
    has_unchanged: bool = False

    def points(self) -> list[dict[str, str]]:
        """Return the values of each point by axis.

        Example:
            >>> axes = {"stride": ("2", "3"), "filters": ("32",)}
            >>> Design(axes, (0,)).points()
            [{'stride': '2', 'filters': '32'}, {'stride': '3', 'filters': '32'}]
            >>> Design(axes, (0,), one_at_a_time=True, has_unchanged=True).points()
            [{}, {'stride': '2'}, {'stride': '3'}, {'filters': '32'}]
        """
        unchanged: list[dict[str, str]] = [{}] * self.has_unchanged
        if self.one_at_a_time:
            alone = [{name: value} for name, values in self.axes.items() for value in values]
            return [*unchanged, *alone]
        combined = itertools.product(*self.axes.values()) if self.axes else ()
        return [*unchanged, *(dict(zip(self.axes, values, strict=True)) for values in combined)]

    def facts(self) -> dict[str, Any]:
        """Return the design as plain values; what earlier versions did not have only if it is used.

        So a sweep of an earlier version continues.
        """
        used = {name: True for name in ("one_at_a_time", "has_unchanged") if getattr(self, name)}
        axes = {name: list(values) for name, values in self.axes.items()}
        return {"axes": axes, "seeds": list(self.seeds), **used}


@dataclass(frozen=True)
class Case:
    """A point with a seed.

    Attributes:
        point: values by axis, as the user wrote them.
        seed: the seed.
        settings: settings of the run.
        network: the network; None if it is the one of the settings, or is not possible.
        why: the reason why the network is not possible; empty if it is.
        adaptation: lines about how a network that is changed follows the data. The changed ones are
            trained from files, which do not contain this.
    """

    point: Mapping[str, str]
    seed: int
    settings: Settings
    network: Network | None = None
    why: str = ""
    adaptation: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Values and seed in words."""
        return f"{point_name(self.point)}, seed {self.seed}"

    @property
    def slug(self) -> str:
        """Name of the run directory."""
        values = {**self.point, "seed": self.seed}
        text = ",".join(f"{name}={value}" for name, value in values.items())
        return re.sub(r"[^A-Za-z0-9.,=_-]+", "-", text)


def point_name(point: Mapping[str, str]) -> str:
    """Return the values of a point in words.

    Example:
        >>> point_name({"batch_size": "32", "stride": "2"})
        'batch size 32, stride 2'
    """
    return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in point.items()) or UNCHANGED


def list_cases(make: MakeSettings, design: Design, ranks_per_node: int = 1) -> list[Case]:
    """Return all points of the design, each with all seeds.

    A point that trains as an earlier one does is omitted, such as a stride that the network has.

    Args:
        make: returns the settings of the command with others replaced.
        design: the points and seeds.
        ranks_per_node: ranks on this node that call this function at the same time.

    Raises:
        UserError: an axis or a value is invalid.
    """
    for name in design.axes:
        _check_axis(name)
    networks: dict[tuple[str, str | None], Network] = {}
    has_changes = any(name in AXES for name in design.axes)
    cases: dict[str, Case] = {}
    for point, seed in itertools.product(design.points(), design.seeds):
        changes = {name: value for name, value in point.items() if name in AXES}
        rest = {name: value for name, value in point.items() if name not in AXES}
        case = Case(point, seed, make({**rest, "seed": str(seed)}))
        if has_changes:
            key = (case.settings.network, case.settings.data)
            if key not in networks:
                networks[key] = open_network(case.settings, ranks_per_node)
            case = _changed(case, networks[key], changes)
        cases.setdefault(_what_is_trained(case), case)
    return list(cases.values())


def _changed(case: Case, network: Network, changes: Mapping[str, str]) -> Case:
    """Return the case with a changed network, or with the reason why that is not possible."""
    case = replace(case, adaptation=adaptation_lines(network))
    try:
        return replace(case, network=change_layers(network, changes))
    except ImpossibleNetworkError as error:
        return replace(case, why=str(error))


def _what_is_trained(case: Case) -> str:
    """Return a text that two cases share if they train the same network with equal settings."""
    layers = None if case.network is None else case.network.layers
    return repr((case.settings, layers, case.point if case.why else None))


def _check_axis(name: str) -> None:
    names = [s.name for s in settings() if s.name not in (*DIRECTORY_SETTINGS, "seed")]
    if name not in (*names, *AXES):
        hint = "; use --seeds" if name == "seed" else suggest(name, (*names, *AXES))
        raise UserError(
            f"--set {shown(name)}: expected a setting of dptrain train or one of "
            f"{', '.join(AXES)}{hint}"
        )


def by_point(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases of each point."""
    groups: dict[tuple[tuple[str, str], ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(case.point.items()), []).append(case)
    return list(groups.values())


def part_of(cases: Sequence[Case], part: tuple[int, int]) -> list[Case]:
    """Return part I of N of the cases: every N-th, from the I-th on, counted from 1."""
    index, count = part
    return list(cases[index - 1 :: count])
