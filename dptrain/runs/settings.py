"""The settings of the files that a run writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.errors import UserError
from dptrain.runs.labels import parse_tags
from dptrain.setting_groups import SettingGroup, UntilRecipe, UntilStart, setting

if TYPE_CHECKING:
    from dptrain.network.zoo.recipes import Recipe

NO_LOGGER = "none"

DIRECTORY_SETTINGS = ("run_dir", "resume", "tags", "note")
"""Settings about the directory of a run, not the job. The file of a run does not contain them."""

CHECKPOINT_SECONDS = 30.0
"""Least time between two checkpoints of a run whose user did not set their number."""


@dataclass(frozen=True)
class DirectorySettings(SettingGroup[UntilRecipe, UntilStart]):
    """The directory of a run, and a single start of it; no part of the job."""

    run_dir: Path | None = setting(
        "output",
        None,
        "Directory of the files of the run.",
        otherwise="a new directory in runs/",
    )
    resume: Path | None = setting(
        "output",
        None,
        "Continue the run in this directory with its own settings, unless flags "
        "or variables change them. Without a directory: continue the run in --run-dir, or start "
        "it.",
        otherwise="start a new run",
    )
    tags: str | UntilRecipe = setting(
        "output",
        None,
        "Tags of the run, separated by commas, for `dptrain runs list --tag`.",
        unset="",
        otherwise="none",
    )
    note: str | None = setting("output", None, "A note about the run.", otherwise="none")
    stop_after: int | UntilRecipe = setting(
        "output",
        None,
        "Stop after this step of the run with a checkpoint, as a signal does; "
        "--resume continues. The learning rate is that of the whole run.",
        unset=0,
        otherwise="make all steps",
        at_least=1,
    )

    snapshots: bool = setting(
        "output",
        False,
        "Also keep the state in memory that outlives the processes, on each node, "
        "in /dev/shm. A run that is resumed after a rank was killed continues from it. "
        "`dptrain train --survive` sets it.",
    )
    snapshot_every: int | UntilRecipe = setting(
        "output",
        None,
        "Steps between two snapshots, which are the steps that a killed rank can cost.",
        unset=0,
        otherwise="so many that snapshots take 0.5% of the time",
        at_least=1,
    )
    snapshot_mib: int = setting(
        "output",
        4096,
        "Most memory of a node in MiB for snapshots; three copies of the state must fit.",
        at_least=1,
    )

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        if self.tags is not None:
            parse_tags([self.tags])
        if self.resume is not None and self.run_dir not in (None, self.resume):
            raise UserError(
                f"run_dir is '{self.run_dir}' but resume is '{self.resume}'; a run continues in "
                "its own directory, so remove run_dir"
            )

    def from_recipe(self, recipe: Recipe) -> dict[str, Any]:
        run_dir = self.run_dir if self.resume is None else self.resume
        return {**super().from_recipe(recipe), "run_dir": run_dir}


@dataclass(frozen=True)
class OutputSettings(SettingGroup[UntilRecipe, UntilStart]):
    """What a run writes to its directory when."""

    checkpoint_every: int | UntilStart = setting(
        "output", None, "Steps between two checkpoints.", otherwise="one epoch", at_least=1
    )
    checkpoint_seconds: float | UntilStart = setting(
        "output",
        None,
        "Least time in seconds between two checkpoints. One that is due earlier is left out, and "
        "a better epoch is written with the next one. A run that is killed loses the steps since "
        "the last one. Training always ends with a checkpoint.",
        otherwise=f"{CHECKPOINT_SECONDS:g}, but 0 with --checkpoint-every",
        at_least=0.0,
    )
    keep_checkpoints: int = setting(
        "output",
        3,
        "Number of checkpoints that are kept, the newest ones; the best one is kept in addition.",
        at_least=1,
    )
    log_every: int = setting(
        "output", 10, "Steps between two records in metrics.jsonl.", at_least=1
    )
    tensorboard: bool = setting(
        "output", False, "Also write files for TensorBoard, to the folder tensorboard of the run."
    )
    logger: str = setting(
        "output",
        NO_LOGGER,
        "Also record settings, metrics of epochs and results for another program, in files and "
        "without a server: `mlflow` in the database mlflow.db next to the run directory, `wandb` "
        "in its folder wandb.",
        choices=(NO_LOGGER, "mlflow", "wandb"),
    )
