"""The spans of a run: which settings made which steps, in the file ``spans.json`` of its directory.

Each start of a run begins a span. A run that is resumed may continue with other settings, with
another number of ranks or on another machine. Everything that shows the settings of a run reads
them with `Spans.read`, so that a value is shown with the steps that it made.

Steps are counted from 1; a span that begins after 144 steps has ``first_step`` 145.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dptrain.files import dump_json
from dptrain.numbers import value_text
from dptrain.runs.files import read_file
from dptrain.runs.names import ENVIRONMENT, SPANS, SPECIFICATION

FORMAT = 1


@dataclass(frozen=True)
class Span:
    """Steps of a run that were made with one set of settings, in one process of each rank.

    Attributes:
        first_step: number of its first step.
        settings: all settings by name, resolved: those of `JobSpec`, with ``threads``, ``workers``,
            ``share_gpus``, ``timeout`` and ``device_cache``.
        origins: origin of each setting that is not a default.
        config: the settings as a configuration file has them.
        digest: SHA-256 of the specification.
        ranks: the hardware of each rank, see `RankSpec`.
        environment: ``version``, ``commit``, ``host``, ``cpu``, ``started`` and ``command``.
    """

    first_step: int
    settings: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    ranks: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Return a setting, or a value of the environment such as ``host``; None if unknown."""
        return self.settings.get(name, self.environment.get(name))

    def changes_from(self, before: Span) -> dict[str, tuple[Any, Any]]:
        """Return (value before, value now) of each setting that differs from another span.

        A setting that was changed without a consequence, such as `transport` with one rank, has the
        values that the user set.
        """
        # `schedule_start` follows from the step at which the length was changed.
        names = dict.fromkeys((*before.settings, *self.settings))
        names.pop("schedule_start", None)
        pairs = {name: (before.settings.get(name), self.settings.get(name)) for name in names}
        chosen = {name: (before.config.get(name), self.config.get(name)) for name in self.config}
        found = {}
        for name, pair in pairs.items():
            old, new = chosen.get(name, pair)
            if name == "transport" and 1 in pairs.get("ranks", ()):
                pair = pair[1], pair[1]  # One rank uses none: only the user's value counts.
            if pair[0] != pair[1]:
                found[name] = pair
            elif before.config and old != new and new != pair[1]:
                found[name] = (old, new)
        return found


@dataclass(frozen=True)
class Spans:
    """The spans of a run in order.

    Attributes:
        items: the spans; none if the directory has no file of settings.
        is_complete: False if an earlier version of dptrain resumed the run, and kept only the
            settings of the last start.
    """

    items: tuple[Span, ...] = ()
    is_complete: bool = True

    def __post_init__(self) -> None:
        """Add settings that the version of a span did not have, and no user set in the next one."""
        found = list(self.items[-1:])
        for span in self.items[-2::-1]:
            later = found[0]
            unset = {k: v for k, v in later.settings.items() if k not in later.origins}
            found.insert(0, replace(span, settings={**unset, **span.settings}))
        object.__setattr__(self, "items", tuple(found))

    @classmethod
    def read(cls, folder: Path) -> Spans:
        """Return the spans of a run directory; directories of earlier versions have one.

        Raises:
            UserError: a file is damaged; the message names it.
        """
        if (folder / SPANS).exists():
            return cls.of(read_file(folder, SPANS))
        # The files of the last start stand for the only span.
        return cls._of_earlier_version(folder)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Spans:
        """Return the spans that a file describes, which has the form of `SPANS`."""
        return cls(tuple(Span(**item) for item in values["spans"]), values["complete"])

    @classmethod
    def _of_earlier_version(cls, folder: Path) -> Spans:
        if not (folder / SPECIFICATION).exists():
            return cls()
        spec = read_file(folder, SPECIFICATION)
        env = read_file(folder, ENVIRONMENT) if (folder / ENVIRONMENT).exists() else {}
        ranks = spec.get("ranks") or []
        threads = {} if not ranks else {"threads": threads_of(ranks)}
        span = Span(
            1,
            {**spec["job"], **threads},
            spec.get("origins") or {},
            digest=spec.get("digest"),
            ranks=ranks,
            environment=environment_of(env, spec.get("version")),
        )
        command = env.get("command")
        is_resumed = command is not None and "--resume" in command
        return cls((span,), is_complete=not is_resumed)

    def text(self) -> str:
        """Return the contents of `SPANS`."""
        spans = [asdict(span) for span in self.items]
        return dump_json({"format": FORMAT, "complete": self.is_complete, "spans": spans}, indent=1)

    def until(self, steps: int) -> Spans:
        """Return the spans that made at least one of the first `steps` steps."""
        kept = tuple(span for span in self.items if span.first_step <= steps)
        return Spans(kept, self.is_complete)

    def followed_by(self, span: Span) -> Spans:
        """Return the spans with another one; spans whose steps it makes again are dropped."""
        before = self.until(span.first_step - 1).items
        return Spans((*before, span), self.is_complete and (bool(before) or span.first_step == 1))

    def of_step(self, step: int | None) -> Span | None:
        """Return the span that made a step; the last one if it is None."""
        if not self.items:
            return None
        made = self.items if step is None else self.until(step).items
        return made[-1] if made else self.items[0]

    def merged(self, last_step: int | None = None) -> list[tuple[int, int | None, Span]]:
        """Return (first step, last step, span), where spans with equal settings are one.

        Args:
            last_step: last completed step of the run; None if it is unknown.
        """
        found: list[tuple[int, int | None, Span]] = []
        for index, span in enumerate(self.items):
            later = self.items[index + 1 :]
            end = later[0].first_step - 1 if later else last_step
            if found and not span.changes_from(found[-1][2]):
                found[-1] = (found[-1][0], end, found[-1][2])
            else:
                found.append((span.first_step, end, span))
        return found

    def begin_within_epochs(self, epoch_steps: int) -> bool:
        """Return True if a span begins with a step that is not the first one of an epoch.

        Example:
            >>> spans = Spans((Span(1, {}), Span(24, {})))
            >>> spans.begin_within_epochs(9), spans.begin_within_epochs(23)
            (True, False)
        """
        return any((span.first_step - 1) % epoch_steps for span in self.items)

    @property
    def is_resumed(self) -> bool:
        """True if the run was resumed."""
        return len(self.items) > 1 or not self.is_complete

    @property
    def digest(self) -> str | None:
        """SHA-256 of the specification; of all of them and their steps if they differ."""
        parts = [(span.first_step, span.digest) for span in self.items]
        if len({digest for _, digest in parts}) <= 1:
            return parts[0][1] if parts else None
        different = [part for i, part in enumerate(parts) if not i or part[1] != parts[i - 1][1]]
        return hashlib.sha256(json.dumps(different).encode()).hexdigest()

    def steps_made(self, last_step: int) -> list[int]:
        """Return how many steps each span made; the last one ended with step `last_step`."""
        first = [span.first_step for span in self.items]
        return [after - before for before, after in itertools.pairwise([*first, last_step + 1])]

    def value_text(self, name: str, steps: int | None = None) -> str:
        """Return a setting; if it changed, each value with the steps that it made.

        Args:
            name: of the setting, or of a value of the environment.
            steps: number of steps that made the parameters; all steps if it is None.

        Example:
            >>> spans = Spans((Span(1, {"power": 1.0}), Span(46, {"power": 2.0})))
            >>> spans.value_text("power"), spans.value_text("power", 45)
            ('1 (steps 1–45), 2 (steps 46–)', '1')
        """
        made = self if steps is None else self.until(steps)
        runs: list[tuple[int, int | None, str]] = []
        for index, span in enumerate(made.items):
            later = made.items[index + 1 :]
            end = later[0].first_step - 1 if later else steps
            text = value_text(span.value(name))
            if runs and runs[-1][2] == text:
                runs[-1] = (runs[-1][0], end, text)
            else:
                runs.append((span.first_step, end, text))
        if len(runs) == 1:
            return runs[0][2]
        return ", ".join(f"{text} ({steps_text(first, last)})" for first, last, text in runs)

    def resumes(self, selected_step: int | None = None) -> str:
        """Return in a line after which steps the run was resumed, and what changed then.

        Args:
            selected_step: step of the parameters that were kept; changes after it are marked.
        """
        found = [
            f"after step {span.first_step - 1}"
            + _changes_text(span.changes_from(before))
            + (
                f" (not in the parameters, those of step {selected_step})"
                if selected_step is not None and span.first_step > selected_step
                else ""
            )
            for before, span in zip(self.items, self.items[1:], strict=False)
        ]
        if not self.is_complete:
            found.insert(0, "by an earlier version of dptrain, which kept only the last settings")
        return "; ".join(found)

    def to_summary(self, last_step: int, selected_step: int) -> dict[str, Any]:
        """Return the fields of ``summary.json`` about spans."""
        spans, before = list[dict[str, Any]](), None
        for first, last, span in self.until(last_step).merged(last_step):
            changed = span.changes_from(span if before is None else before)
            spans.append(
                {
                    "first_step": first,
                    "last_step": last,
                    "ranks": span.value("ranks"),
                    "changed": {name: now for name, (_, now) in changed.items()},
                }
            )
            before = span
        selected = [i for i, span in enumerate(spans) if span["first_step"] <= selected_step]
        return {"spans": spans, "selected_span": selected[-1] if selected else 0}


def threads_of(ranks: Sequence[Mapping[str, Any]]) -> Any:
    """Return the threads of a rank; a text with those of each rank if they differ."""
    found = [rank.get("threads") for rank in ranks]
    return found[0] if len(set(found)) == 1 else ", ".join(map(str, found))


def environment_of(env: Mapping[str, Any], version: Any) -> dict[str, Any]:
    """Return what a span stores of ``env.json``."""
    names = ("commit", "host", "cpu", "started", "command")
    return {"version": version, **{name: env.get(name) for name in names}}


def steps_text(first: int, last: int | None) -> str:
    """Return ``steps 1–144``; ``steps 145–`` if the last one is unknown."""
    if first == last:
        return f"step {first}"
    return f"steps {first}–{'' if last is None else last}"


def changed_text(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return changed settings as ``learning_rate 0.002 (so far 0.001), seed 3 (so far 0)``."""
    return ", ".join(
        f"{name} {value_text(now)} (so far {value_text(before)})"
        for name, (before, now) in shown_changes(changes).items()
    )


def shown_changes(changes: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return changed settings without `steps` if it follows from `epochs`."""
    follows = "epochs" in changes and bool(changes["epochs"][1])
    return {name: pair for name, pair in changes.items() if not (follows and name == "steps")}


def _changes_text(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return f" with {changed_text(changes)}" if changes else ""
