"""The columns of srun in the table of launchers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launchers.jobs import Launcher, find_launcher, run_event
from tests.launchers.table import SLURM, Cell, cells, check
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(1800)


def srun(cluster: Cluster, name: str, folder: Path) -> Launcher:
    """``srun`` with the interface that `name` ends with."""
    program = ("srun", f"--mpi={name.rpartition('-')[2]}", "--nodes=1", "--ntasks=2")
    variables = {"SLURM_CONF": cluster.environment()["SLURM_CONF"], "SLURM_WAIT": "30"}
    if name == "srun-pmix":
        mpi = find_launcher("openmpi5", folder)
        if mpi.missing:
            return mpi
        variables |= dict(mpi.variables)
        tried = subprocess.run(
            [*program, "true"], env={**os.environ, **variables}, capture_output=True, text=True
        )
        if tried.returncode:
            return Launcher(missing=tried.stderr.partition("\n")[0])
    return Launcher(program, tuple(variables.items()))


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=f"{cell.launcher}-{cell.event}")
        for cell in cells()
        if cell.launcher in SLURM
    ],
)
def test_a_job_of_slurm_ends_as_the_table_states(
    cluster: Cluster, cell: Cell, tmp_path: Path
) -> None:
    launcher = srun(cluster, cell.launcher, tmp_path)
    if launcher.missing:
        pytest.skip(launcher.missing)
    check(cell, run_event(launcher, cell.event, tmp_path))
