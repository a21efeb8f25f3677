"""The table of mutants: small changes of the code, each with the tests that must fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dptrain.toml import read_toml

ROOT = Path(__file__).resolve().parents[2]
WRITTEN, GENERATED, GPU = "written", "generated", "gpu"

KINDS = (
    "padding", "strides", "groups", "tails", "synchronisation", "sums", "sampler", "shards",
    "schedules", "updates", "statistics", "checkpoints", "agreement", "resume", "interchange",
    "settings", "reading", "layers", "plan", "texts", "digests",
)  # fmt: skip
"""Subjects of the mutants."""


@dataclass(frozen=True)
class Mutant:
    """A change of one passage of a file.

    Attributes:
        id: name in the table.
        kind: one of `KINDS`, or of `GPU_KINDS`.
        file: relative to the root of the repository.
        before: passage of the file, which occurs in it exactly once.
        after: what replaces it.
        breaks: what is wrong then.
        tests: arguments of pytest: files or test identifiers, and options.
        ranks: number of MPI ranks that run the tests.
        equivalent: proof that no test can notice the change; such a mutant is not counted.
    """

    id: str
    kind: str
    file: str
    before: str
    after: str
    breaks: str
    tests: str = ""
    ranks: int = 1
    equivalent: str = ""

    @property
    def test_files(self) -> list[str]:
        """Paths of the files of the tests."""
        names = self.tests.partition(" -k ")[0].split()
        return [name.partition("::")[0] for name in names if not name.startswith("-")]

    def apply(self, text: str) -> str:
        """Return the text of the file with the change.

        Raises:
            ValueError: the passage does not occur exactly once.
        """
        found = text.count(self.before)
        if found != 1:
            raise ValueError(f"{self.id}: {self.file} has the passage {found} times; expected once")
        return text.replace(self.before, self.after)


GPU_KINDS = (
    "mma", "wgmma", "tma", "cp.async", "peer memory", "dependent launch", "conversion",
)  # fmt: skip
"""Subjects of the mutants of code that only a GPU executes."""


def load(name: str) -> tuple[Mutant, ...]:
    """Return the rows of one of the lists `WRITTEN`, `GENERATED` and `GPU`."""
    return tuple(
        Mutant(**row) for row in read_toml(Path(__file__).with_name(f"{name}.toml"))["mutant"]
    )
