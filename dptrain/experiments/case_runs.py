"""Training runs of an experiment: one run directory for each case, resumed if it was stopped."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dptrain.comm.collective import call_on_rank_zero
from dptrain.comm.signals import StopRequest
from dptrain.comm.world import World
from dptrain.network.files import write_network
from dptrain.network.network import Network
from dptrain.training.callbacks import Progress
from dptrain.training.output.summary import binding_lines, data_lines
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.settings import Settings
from dptrain.training.trainer import Trainer


@dataclass(frozen=True)
class CaseRuns:
    """Trains the cases of an experiment.

    Attributes:
        folder: directory of the experiment; the run directories are in its folder ``runs``.
        world: the ranks; every rank calls the methods.
        stop: stop request, for the running case and between cases.
        show: called on every rank with each line about networks, data and cores of the cases.
    """

    folder: Path
    world: World
    stop: StopRequest
    show: Callable[[str], None]
    shown: set[str] = field(default_factory=set, init=False)

    def train(
        self,
        name: str,
        slug: str,
        settings: Settings,
        network: Network | None = None,
    ) -> dict[str, Any]:
        """Train a case, or resume its training; return the summary, the same on every rank.

        Args:
            name: name of the case in the progress.
            slug: name of its run directory.
            settings: its settings, with the recipe filled in.
            network: its network if it is not the one of the settings.
        """
        gc.collect()
        found = call_on_rank_zero(self.world, lambda: self._locate(slug, network))
        file, run_dir, resumes = self.world.broadcast_json(found)
        chosen = replace(
            settings,
            network=file or settings.network,
            run_dir=Path(run_dir),
            resume=Path(run_dir) if resumes else None,
        )
        with Trainer.from_settings(chosen, self.world, callbacks=[Progress(name=name)]) as trainer:
            lines = data_lines(trainer.network, trainer.data)
            for line in (*lines, *binding_lines(trainer.job)):
                if line not in self.shown:
                    self.shown.add(line)
                    self.show(line)
            trainer.fit(stop=self.stop)
        assert trainer.summary is not None
        return dict(trainer.summary)

    def _locate(self, slug: str, network: Network | None) -> tuple[str, str, bool]:
        """Return network file, run directory, and True if the run there is to be resumed."""
        runs = self.folder.absolute() / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        file = runs / f"{slug}.toml"
        if network is not None:
            write_network(network, file)
        path, number = runs / slug, 1
        while path.exists():
            if RunDirectory(path).checkpoints.steps():
                return str(file) if network is not None else "", str(path), True
            # The run was killed before its first checkpoint.
            number += 1
            path = runs / f"{slug}-{number}"
        return str(file) if network is not None else "", str(path), False


def work(network: Network) -> int:
    """Return the operations of training with one sample, by which remaining time is estimated."""
    return sum(
        node.flops.forward + node.flops.backward_input + node.flops.backward_weight
        for node in network.nodes
    )


def finished_run(folder: Path, slug: str) -> Path | None:
    """Return the run directory of a case that was trained to its end; None if there is none."""
    runs = folder / "runs"
    for path in sorted(runs.glob(f"{slug}*")):
        # A run that was killed before its first checkpoint is followed by SLUG-2.
        if re.fullmatch(r"(-\d+)?", path.name.removeprefix(slug)) and is_finished(path):
            return path
    return None


def is_finished(path: Path) -> bool:
    """Return True if the run in a directory made all its steps."""
    if not (path / "summary.json").exists():
        return False
    summary: Mapping[str, Any] = RunDirectory(path).read_summary()
    return not summary.get("stopped")
