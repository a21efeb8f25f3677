"""What a scaling study says: points with their launches, efficiencies, fits and a forecast.

Records of plain numbers, written to ``study.json``; docs/measuring.md defines every figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dptrain.measure.profile import Parts
from dptrain.measure.statistics import Estimate
from dptrain.records import Form

WEAK, STRONG = "weak", "strong"
FORM = Form(
    noun="study", otherwise="expected what `dptrain scale` writes", anew="collect the study anew"
)


@dataclass(frozen=True)
class Launch:
    """One launch of one point, from its ``profile.json``.

    Attributes:
        folder: below the study's.
        order: place among all launches of the study, in time.
        step_ms: median over its steps of the slowest rank's time.
        parts: of its mean step.
        hidden_ms: communication behind computing, mean of the ranks.
    """

    folder: str
    order: int
    started: str
    step_ms: float
    parts: Parts
    hidden_ms: float


@dataclass(frozen=True)
class Point:
    """A way of scaling at one number of ranks and threads.

    Attributes:
        scaling: `WEAK` or `STRONG`.
        batch_size: of all ranks.
        step_ms: median over launches, with its 95% interval.
        speed_up: of images a second over the smallest number of workers; efficiency is that by the
            ratio of workers (ranks × threads).
        karp_flatt: experimentally determined serial fraction; None at the base point, and for weak
            scaling.
        parts: of a typical step; they add up to the median.
        ideal: the base point's parts, for strong scaling divided by how many times as many workers
            there are.
        loss: parts − ideal, milliseconds; so ideal and loss add up to the step. Negative where
            something got faster than ideal.
        shared_ms: part of the loss of compute that follows from ranks sharing cores.
        contention_ms: part of it because as many workers slow each other down otherwise; None for
            strong scaling without the weak point of as many.
        small_batch_ms: the rest, which follows from the smaller batch of a rank; as above.
        hidden_ms: communication behind computing.
        possible: most efficiency that the cores allow.
        outliers: orders of launches beyond 3 median absolute deviations.
    """

    scaling: str
    ranks: int
    threads: int
    nodes: int
    batch_size: int
    local_batch: int
    launches: tuple[Launch, ...]
    step_ms: Estimate
    samples_per_s: Estimate
    speed_up: Estimate
    efficiency: Estimate
    karp_flatt: Estimate | None
    parts: Parts
    ideal: Parts
    loss: Parts
    shared_ms: float
    contention_ms: float | None
    small_batch_ms: float | None
    hidden_ms: float
    possible: float
    outliers: tuple[int, ...]

    @property
    def name(self) -> str:
        """``weak-r2-t1``."""
        return f"{self.scaling}-r{self.ranks}-t{self.threads}"

    @property
    def workers(self) -> int:
        """Ranks × threads."""
        return self.ranks * self.threads


@dataclass(frozen=True)
class Fit:
    """A model of the step time, fitted without the largest point and judged by it.

    Attributes:
        model: ``amdahl``, ``gustafson``, ``usl``, ``alpha-beta``.
        scaling, threads: the points that it describes.
        parameters: by name, with units in the names; fitted to all points.
        equation: as people write it.
        hindcast_error: |predicted − measured| / measured of the largest point, fitted without it;
            None with too few points.
        curve: (ranks, step_ms) to draw.
        hindcast_ms: what it predicted there.
    """

    model: str
    scaling: str
    threads: int
    parameters: dict[str, float]
    equation: str
    hindcast_error: float | None
    curve: tuple[tuple[int, float], ...]
    hindcast_ms: float | None


@dataclass(frozen=True)
class Forecast:
    """Step times at more ranks by the best fit; withheld where its hindcast error is above 15%.

    Attributes:
        scaling, threads: the points that it goes on from.
        withheld: why there is none; "" where there is one.
        assumptions: in sentences.
        points: (ranks, step_ms, efficiency).
        efficiencies: at the same ranks, by every model that could be trusted as much: how far they
            go apart is a part of the doubt.
    """

    scaling: str
    threads: int
    model: str
    hindcast_error: float | None
    withheld: str
    assumptions: tuple[str, ...]
    points: tuple[tuple[int, float, float], ...]
    efficiencies: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """All of a scaling study.

    Attributes:
        job: what all points share, as `dptrain.measure.profile.Profile.job` has it.
        base_ranks, base_threads: what speed-ups are relative to.
        fits: the best first, by their hindcast error.
        answer: the conclusion in sentences: how far it scales, and what limits it.
        notes: what to know before believing it: shared cores, other load, launches that differ,
            models that cannot be fitted.
        profiles: by the name of the point, folder of its median launch, whose ``profile.json`` has
            its layers.
        commands: by the name of the point, as it can be typed.
        environment: of the first launch.
    """

    job: dict[str, Any]
    base_ranks: int
    base_threads: int
    points: tuple[Point, ...]
    fits: tuple[Fit, ...]
    forecasts: tuple[Forecast, ...]
    answer: tuple[str, ...]
    notes: tuple[str, ...]
    profiles: dict[str, str]
    commands: dict[str, str]
    environment: dict[str, Any]

    def text(self) -> str:
        """The JSON of the file."""
        return FORM.text(self)

    def write(self, path: Path) -> None:
        """Write ``study.json``.

        Raises:
            UserError: it cannot be written.
        """
        FORM.write(self, path)

    @classmethod
    def read(cls, path: Path) -> Study:
        """Read what `write` has written.

        Raises:
            UserError: there is no such file, or it is no study of this version.
        """
        return FORM.read(path, cls._from)

    @classmethod
    def _from(cls, values: Mapping[str, Any]) -> Study:
        if not values["points"] or not all(point["launches"] for point in values["points"]):
            raise ValueError("no point or no launch")
        return cls(
            **{
                **values,
                "points": tuple(_point(p) for p in values["points"]),
                "fits": tuple(
                    Fit(**{**f, "curve": tuple(map(tuple, f["curve"]))}) for f in values["fits"]
                ),
                "forecasts": tuple(_forecast(f) for f in values["forecasts"]),
                "answer": tuple(values["answer"]),
                "notes": tuple(values["notes"]),
            }
        )


def _point(values: Mapping[str, Any]) -> Point:
    launches = tuple(
        Launch(**{**launch, "parts": Parts(**launch["parts"])}) for launch in values["launches"]
    )
    estimates = {
        name: None if values[name] is None else Estimate(**values[name])
        for name in ("step_ms", "samples_per_s", "speed_up", "efficiency", "karp_flatt")
    }
    parts = {name: Parts(**values[name]) for name in ("parts", "ideal", "loss")}
    outliers = tuple(values["outliers"])
    return Point(**{**values, **estimates, **parts, "launches": launches, "outliers": outliers})


def _forecast(values: Mapping[str, Any]) -> Forecast:
    points = tuple(tuple(point) for point in values["points"])
    efficiencies = {name: tuple(found) for name, found in values["efficiencies"].items()}
    own = {"assumptions": tuple(values["assumptions"]), "points": points}
    return Forecast(**{**values, **own, "efficiencies": efficiencies})
