"""Jobs that continue after silent corruption."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np

from dptrain.runs.names import CONFIG
from dptrain.scaling.launching import Launcher
from dptrain.survival.supervisor import Job, Supervisor
from dptrain.training.callbacks import AfterStep
from dptrain.training.digests.differences import CORRUPTION
from dptrain.training.persistence.checkpoints import CheckpointStore
from dptrain.training.trainer import Trainer
from tests.flips.jobs import ARRAYS, apply, choose, data, make_trainer
from tests.run import BIN


def work_to_be_repaired(seed: int, run_dir: Path) -> int:
    """Make or continue a run; a bit is flipped once, also if the step is made again."""
    at, marker = random.Random(seed).randint(6, 12), run_dir.with_suffix(".flipped")

    def after_step(trainer: Trainer) -> None:
        world = trainer.job.world
        if trainer.step == at and not any(world.all_gather_json(marker.exists())):
            if world.rank == world.size - 1:
                apply(trainer, choose(random.Random(seed), trainer, world.rank, ARRAYS[:1]))
                marker.touch()
            world.barrier()

    settings = {"digest_every": 1, "snapshots": True, "snapshot_every": 4}
    callbacks = [AfterStep(lambda trainer, result: after_step(trainer))]
    if (run_dir / CONFIG).exists():
        Trainer.resume(run_dir, data(seed), callbacks=callbacks, progress=False, **settings).fit()
    else:
        make_trainer(None, seed, after_step, run_dir=run_dir, steps=16, **settings).fit()
    return 0


def judge_repair(seed: int, folder: Path) -> tuple[str, str]:
    run_dir = folder / f"repaired{seed}"
    words = "--worker", "repair", "--seed", str(seed), "--run", str(run_dir)
    program = (sys.executable, "-m", "tests.flips", *words)
    job = Job(
        launcher=Launcher((str(BIN / "mpirun"),), False), program=program, run_dir=run_dir,
        ranks=2, least_ranks=1, most_restarts=3, threads=1, timeout=120.0, repairs=True,
    )  # fmt: skip
    supervisor = Supervisor(job)
    code = supervisor.run()
    plain = make_trainer(None, seed, lambda trainer: None, steps=16)
    plain.fit()
    arrays = CheckpointStore(run_dir / "checkpoints").load().arrays if code == 0 else {}
    same = all(
        np.array_equal(arrays.get(f"parameters/{name}", []), values)
        for name, values in plain.parameters.items()
    )
    found = supervisor.incidents
    is_right = code == 0 and same and len(found) == 1 and CORRUPTION in found[0].cause
    # Snapshots are written every four steps, and at the ends of epochs of eight.
    is_right = is_right and found[0].steps_lost == (found[0].step or 0) % 4
    return ("found" if is_right else "wrong"), f"exit code {code}, equal {same}: {found}"
