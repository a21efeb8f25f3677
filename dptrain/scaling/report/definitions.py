"""What the words of a report mean: those of a study, and of profiles from the vocabulary."""

from __future__ import annotations

from dptrain.measure.vocabulary import SECTIONS, Term

STUDY = (
    Term("point", "", "A way of scaling at one number of ranks and threads: `weak-r4-t1`."),
    Term("launch", "", "One start of the job at a point, with all its steps. Launches, not steps, "
         "are the sample behind every interval."),
    Term("workers", "1", "Ranks × threads."),
    Term("weak", "", "The batch grows with the workers, so a worker keeps its work."),
    Term("strong", "", "The batch stays, so the work is shared out."),
    Term("step_ms", "ms", "Time of the slowest rank in each step; median over the steps of a "
         "launch, then over launches."),
    Term("interval", "", "Holds the value with 95% confidence: bootstrap and Student's t over "
         "launches. None below three launches."),
    Term("speed_up", "1", "Images a second over those of the fewest workers."),
    Term("efficiency", "1", "Speed-up over the ratio of workers: weak E = T(1) / T(p), strong "
         "E = T(1) / (p T(p)). 1 is ideal."),
    Term("possible", "1", "The most efficiency that is possible where workers share cores: cores "
         "over workers, at most 1."),
    Term("karp_flatt", "1", "Serial fraction that would explain the speed-up S by Amdahl's law: "
         "(1/S − 1/p) / (1 − 1/p). One that grows with p is overhead, not serial work."),
    Term("ideal", "ms", "The step of the fewest workers; for strong scaling over the ratio of "
         "workers."),
    Term("loss", "ms", "Time beyond an ideal step, by part."),
    Term("shared_ms", "ms", "Shared cores: part of the loss of compute that follows from workers "
         "sharing cores."),
    Term("contention_ms", "ms", "Part of the loss of compute because as many workers slow each "
         "other down otherwise, at memory and caches."),
    Term("small_batch_ms", "ms", "Part of the loss of compute because a rank's batch is smaller."),
    Term("hindcast_error", "1", "How far a model is off at the largest point when it was fitted "
         "to the others, over the measured time."),
    Term("forecast", "", "Step times at more ranks by the model with the least hindcast error; "
         "withheld where that is above 15%."),
    Term("outlier", "", "A launch farther from the median of its point than 3 median absolute "
         "deviations. It stays in all figures."),
)  # fmt: skip

OF_PROFILES = (
    "Parts of a step",
    "Phases of a stage",
    "Of a stage, or of all stages of a kind",
    "Of a rank",
    "Of sums, roofs and memory",
)
"""Sections of the vocabulary for what a report shows of a profile."""

Words = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
"""Headings with (word, meaning)."""


def words(*, study: bool) -> Words:
    """Definitions, by heading.

    Args:
        study: whether those of a study come first.
    """
    found: dict[str, tuple[Term, ...]] = {"A scaling study": STUDY} if study else {}
    found.update({title: SECTIONS[title] for title in OF_PROFILES})
    return tuple(
        (title, tuple((_titled(word), word.meaning) for word in section))
        for title, section in found.items()
    )


def _titled(word: Term) -> str:
    """``step_ms``, or ``compute, ms`` where the name does not end in its unit."""
    plain = word.unit in ("", "1") or word.name.endswith(f"_{word.unit}")
    return word.name if plain else f"{word.name}, {word.unit}"
