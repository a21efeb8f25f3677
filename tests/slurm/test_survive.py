"""`slurm/survive.sh`: a job outlives a node of its allocation."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptrain.runs.incidents import read_incidents
from dptrain.training.persistence.snapshots import SnapshotFolder, read_token
from tests.slurm.cluster import ENDED, Cluster, until
from tests.slurm.test_scripts import SCRIPTS, SRUN, state, steps_made, summary
from tests.system.launch import succeed

pytestmark = pytest.mark.timeout(1800)

STEPS = 1500
TRAIN = ("--network", "model-small", "--schedule", "constant", "--steps", STEPS, "--shards", 4,
         "--batch-size", 32, "--log-every", 1, "--baseline-steps", 0, "--snapshot-every", 20,
         "--checkpoint-seconds", 1000)  # fmt: skip


def test_a_job_goes_on_with_the_nodes_that_are_left(cluster: Cluster, tmp_path: Path) -> None:
    size = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
    job = cluster.submit(*size, SCRIPTS / "survive.sh", *TRAIN, folder=tmp_path, LAUNCH=SRUN)
    run = tmp_path / "runs" / f"dptrain-{job.number}"
    until(lambda: steps_made(run) > 30 or job.state in ENDED, "training")
    node = cluster.run("squeue", "--noheader", "--job", str(job.number), "--format", "%N")
    lost = cluster.run("scontrol", "show", "hostnames", node).split()[-1]
    cluster.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    try:
        assert job.wait() == "COMPLETED", job.output
    finally:
        cluster.run("scontrol", "update", f"NodeName={lost}", "State=RESUME")
    (incident,) = read_incidents(run)
    assert (incident.ranks, incident.ranks_after) == (4, 2), job.output
    assert incident.steps_lost <= 20
    assert summary(run)["ranks"] == 2
    whole = tmp_path / "whole"
    succeed("train", *TRAIN[:-4], "--run-dir", whole, "--threads", 1, cwd=tmp_path)
    expected, found = state(whole, STEPS), state(run, STEPS)
    assert all((found[name] == array).all() for name, array in expected.items())
    token = read_token(run)
    assert token is not None
    assert SnapshotFolder.find(token) == []
