"""The scripts of slurm/, submitted to a real Slurm as they are."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.slurm.cluster import ENDED, GPUS, Cluster, Job, until
from tests.system.launch import PARSER, ROOT, succeed, write_program

# Here all waits have ends, and show why; the usual limit would leave jobs behind.
pytestmark = pytest.mark.timeout(1800)

SCRIPTS = ROOT / "slurm"
STEPS = 4000
TRAIN = ("--network", "model-small", "--schedule", "constant", "--steps", STEPS, "--flip",
         "--baseline-steps", 0, "--log-every", 1)  # fmt: skip
"""A second or more, and 89 epochs: enough to be interrupted in."""
TWO = ("--nodes=1", "--ntasks-per-node=2")
EACH = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
SRUN, MPIRUN = "srun --mpi=pmi2", "mpirun"

FULL = """\
#!PYTHON
import ctypes, random

c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.free.argtypes = [ctypes.c_void_p]
sizes = random.Random(1).choices(range(20, 700), k=40_000)
blocks = [c.malloc(size) for size in sizes]
for block, size in zip(blocks, sizes):
    ctypes.memset(block, ord("A") + size % 26, size)
for block in blocks[::2]:
    c.free(block)
from dptrain.comm.world import World

print(f"ranks {World.connect(timeout=200).size}\\n", end="", flush=True)
"""
"""A program that starts MPI where there is no run of zeros in memory, only holes between text."""

SCALE = """\
#!PYTHON
import json, os, sys
from dptrain.cli.scale import scale

assert sys.argv[1] == "scale"
values = dict(scale.make_context("scale", sys.argv[2:]).params)
print(json.dumps({**values, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}, default=str))
"""
"""A `dptrain scale` that only reads its command line."""

WARNED = """\
#!PYTHON
import os, signal, sys, time
from dptrain.cli.main import main
from dptrain.training import run

original = run.Trainer.from_settings


def from_settings(*arguments, **options):
    stop = signal.getsignal(signal.SIGUSR1).__self__
    os.kill(os.getppid(), signal.SIGUSR1)
    while not stop.requested:
        time.sleep(0.01)
    return original(*arguments, **options)


run.Trainer.from_settings = from_settings
main()
"""
"""A `dptrain` that waits for a warning of the job before it trains."""

HANDLED = """\
until (( 0x$(sed -n 's/^SigCgt:\\s*//p' "/proc/$PPID/status") >> 9 & 1 )); do sleep 0.05; done"""
"""Commands of a shell that wait until its parent handles SIGUSR1, which is signal 10."""

State = dict[str, np.ndarray]


def state(run: Path, step: int = STEPS) -> State:
    """Arrays of a checkpoint."""
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def steps_made(run: Path) -> int:
    """Steps that stand in the metrics."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b'"loss"') if file.exists() else 0


def assert_same_run(run: Path, uninterrupted: Path) -> None:
    """Parameters, optimizer state and accuracy are the same, bit for bit, every step once."""
    expected, found = state(uninterrupted), state(run)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    for key in ("test_accuracy", "test_loss", "steps", "stopped", "ranks"):
        assert summary(run)[key] == summary(uninterrupted)[key], key
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))


def run_of(job: Job) -> Path:
    """The run directory that requeue.sh chooses."""
    return job.folder / "runs" / f"dptrain-{job.number}"


def begin(cluster: Cluster, folder: Path, *options: str, launcher: str, **more: str) -> Job:
    """Submit requeue.sh and wait until it trains."""
    script = SCRIPTS / "requeue.sh"
    job = cluster.submit(*options, script, *TRAIN, folder=folder, LAUNCH=launcher, **more)
    run = run_of(job)
    until(lambda: steps_made(run) > 3 or "error" in job.output, "the first steps", every_s=0.02)
    assert job.state == "RUNNING", job.output
    return job


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training by mpirun alone."""
    run = tmp_path_factory.mktemp("whole") / "run"
    succeed("train", *TRAIN, "--run-dir", run, "--threads", 1, ranks=2)
    return run


@pytest.fixture(scope="module")
def limited(cluster: Cluster, uninterrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that is halted in the middle of training, waiting for its time to be nearly up.

    Slurm looks at time limits every 30 s; other tests make use of the time until then. The job gets
    its limit, of which Slurm warns 3595 s before, only when it is halted, because a busy machine
    may take longer than 5 s to start it. The other tests then have an hour.
    """
    assert uninterrupted.is_dir()
    folder = tmp_path_factory.mktemp("limited")
    options = ("--nodelist=n3", "--time=120", "--signal=B:USR1@3595")
    job = begin(cluster, folder, *TWO, *options, launcher=SRUN)
    for pid in job.pids():
        os.kill(pid, signal.SIGSTOP)
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    return job


def test_a_job_is_halted_for_the_test_of_its_time_limit(limited: Job) -> None:
    assert len(limited.pids()) == 2
    assert limited.state == "RUNNING"


def test_headers_ask_for_what_slurm_can_give(cluster: Cluster) -> None:
    for script in sorted({*SCRIPTS.glob("*.sh")} - {SCRIPTS / "site.sh", SCRIPTS / "start.sh"}):
        nodes = ["--nodes=2"] if script.name == "nodes.sh" else []  # It asks for more than we have.
        cluster.run("sbatch", "--test-only", *nodes, str(script))


@pytest.mark.parametrize("launcher", [SRUN, MPIRUN])
@pytest.mark.parametrize(("script", "size"), [("node.sh", TWO), ("nodes.sh", EACH)])
def test_jobs_train_as_mpirun_alone_does(
    cluster: Cluster,
    tmp_path: Path,
    uninterrupted: Path,
    script: str,
    size: tuple[str, ...],
    launcher: str,
) -> None:
    words = (*size, SCRIPTS / script, *TRAIN, "--run-dir", "run")
    with tempfile.TemporaryDirectory() as shared:  # By both nodes.
        job = cluster.submit(*words, folder=tmp_path, LAUNCH=launcher, TMPDIR=shared)
        assert job.wait() == "COMPLETED", job.output
        assert not list(Path(shared).glob("dptrain-*"))
    assert job.facts()["NumNodes"] == size[0][-1]
    assert "2 ranks × 1 thread" in job.output
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize("launcher", [SRUN, MPIRUN])
def test_ranks_find_each_other_whatever_lies_in_memory(
    cluster: Cluster, tmp_path: Path, launcher: str
) -> None:
    programs = write_program(tmp_path / "bin", "dptrain", FULL)
    path = os.pathsep.join([str(programs), cluster.environment()["PATH"]])
    with tempfile.TemporaryDirectory() as shared:  # By both nodes.
        job = cluster.submit(
            *EACH, SCRIPTS / "nodes.sh", folder=tmp_path, LAUNCH=launcher, PATH=path, TMPDIR=shared
        )
        assert job.wait() == "COMPLETED", job.output
    assert job.output.count("ranks 2") == 2


@pytest.mark.parametrize(
    "script",
    [
        (SCRIPTS / "gpus.sh",),
        ("--gpus-per-node=4", "--ntasks-per-node=4", "--cpus-per-task=8", SCRIPTS / "requeue.sh"),
    ],
)
def test_gpus_are_all_seen_by_every_rank_of_a_node(
    cluster: Cluster, tmp_path: Path, script: tuple[object, ...]
) -> None:
    programs = write_program(tmp_path / "bin", "dptrain", PARSER)
    path = os.pathsep.join([str(programs), cluster.environment()["PATH"]])
    job = cluster.submit("--nodes=2", *script, "--batch-size", 4096, folder=tmp_path, PATH=path)
    assert job.wait() == "COMPLETED", job.output
    ranks = [json.loads(line) for line in job.output.splitlines() if line.startswith("{")]
    assert sorted(rank["rank"] for rank in ranks) == list(range(2 * len(GPUS)))
    for rank in ranks:
        assert rank["gpus"] == ",".join(map(str, range(len(GPUS))))
        assert (rank["backend"], rank["precision"]) == ("cuda", "tf32")
        assert rank["batch_size"] == 4096


def test_a_warned_job_goes_back_and_ends_as_if_nothing_had_happened(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    job = begin(cluster, tmp_path, *EACH, launcher=MPIRUN)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job.number))
    until(lambda: job.facts()["Restarts"] == "1", "the job to go back")
    assert 0 < summary(run_of(job))["steps"] < STEPS
    assert job.wait() == "COMPLETED", job.output
    assert "stopped on request after step" in job.output
    assert "resumed after step" in job.output
    assert_same_run(run_of(job), uninterrupted)


def test_a_cancelled_job_stays_away_and_another_goes_on(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    job = begin(cluster, tmp_path, *TWO, launcher=SRUN)
    cluster.run("scancel", str(job.number))
    assert job.wait() == "CANCELLED"
    until(lambda: not job.pids(), "the last rank to end")
    assert job.facts()["Restarts"] == "0"
    run = run_of(job)
    assert summary(run)["stopped"], "cancelled jobs have some time to save a checkpoint"
    script = SCRIPTS / "requeue.sh"
    after = cluster.submit(*TWO, script, *TRAIN, "--run-dir", run, folder=tmp_path, LAUNCH=SRUN)
    assert after.wait() == "COMPLETED", after.output
    assert_same_run(run, uninterrupted)


def test_a_job_whose_rank_is_killed_fails_at_once_and_stays_away(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    job = begin(cluster, tmp_path, *TWO, launcher=SRUN, SLURM_WAIT="5")
    os.kill(job.pids()[1], signal.SIGKILL)
    assert job.wait() == "FAILED"
    assert "was killed or exited in the middle of the run" in job.output
    assert job.facts()["Restarts"] == "0"
    until(lambda: not job.pids(), "the last rank to end")
    # What the killed rank has left on the node is in nobody's way.
    cluster.run("scontrol", "requeue", str(job.number))
    until(lambda: job.facts()["Restarts"] == "1" and job.state in ENDED, "another turn")
    assert job.wait() == "COMPLETED", job.output
    assert_same_run(run_of(job), uninterrupted)


@pytest.mark.parametrize(
    ("program", "state"),
    [
        ("trap 'exit 1' USR1; kill -USR1 $PPID", "FAILED"),  # Too early to save anything.
        ("kill -USR1 $PPID", "FAILED"),  # Earlier still.
        ("trap 'exit 0' USR1; kill -USR1 $PPID", "COMPLETED"),  # When training was over.
        ("exit 75", "FAILED"),  # Stopped by somebody who did not warn the job.
    ],
)
def test_a_job_stays_away_unless_it_was_warned_and_has_a_checkpoint(
    cluster: Cluster, tmp_path: Path, program: str, state: str
) -> None:
    text = f"#!/bin/bash\n{HANDLED}\n{program}\nfor _ in {{1..300}}; do sleep 0.1; done\n"
    path = os.pathsep.join(
        [str(write_program(tmp_path / "bin", "dptrain", text)), cluster.environment()["PATH"]]
    )
    job = cluster.submit(*TWO, SCRIPTS / "requeue.sh", folder=tmp_path, PATH=path, LAUNCH="env")
    assert job.wait() == state, job.output
    assert job.facts()["Restarts"] == "0"


def test_a_job_that_slurm_does_not_requeue_says_how_to_continue(
    cluster: Cluster, tmp_path: Path
) -> None:
    text = f"#!/bin/bash\n{HANDLED}\ntrap 'exit 75' USR1; kill -USR1 $PPID; wait\n"
    text += "for _ in {1..300}; do sleep 0.1; done\n"
    path = os.pathsep.join(
        [str(write_program(tmp_path / "bin", "dptrain", text)), cluster.environment()["PATH"]]
    )
    words = ("--no-requeue", *TWO, SCRIPTS / "requeue.sh")
    job = cluster.submit(*words, folder=tmp_path, PATH=path, LAUNCH="env")
    assert job.wait() == "FAILED", job.output
    assert job.facts()["ExitCode"] == "75:0"
    assert "Slurm did not requeue this job" in job.output


def test_a_warning_before_training_ends_the_job_with_a_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    site = tmp_path / "site.sh"
    site.write_text("SLURM_RESTART_COUNT=1\nsrun() { kill -USR1 $$; }\n")
    script = SCRIPTS / "requeue.sh"
    job = cluster.submit(*TWO, script, folder=tmp_path, SITE=str(site), LAUNCH="false")
    assert job.wait() == "FAILED", job.output
    assert job.facts()["ExitCode"] == "2:0"
    assert "use a larger --time" in job.output


def test_a_chain_of_jobs_ends_as_if_nothing_had_happened(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    # Jobs of other tests with the same name would be waited for.
    chain = ("--no-requeue", "--job-name=chain", "--dependency=singleton")
    more = ("--run-dir", "runs/chain")
    jobs = [
        cluster.submit(*TWO, *chain, SCRIPTS / "requeue.sh", *TRAIN, *more, folder=tmp_path,
                       LAUNCH=SRUN)
        for _ in range(3)
    ]  # fmt: skip
    run = tmp_path / "runs" / "chain"
    until(lambda: steps_made(run) > 3, "the first steps", every_s=0.02)
    cluster.run("scancel", "--batch", "--signal=USR1", str(jobs[0].number))
    assert [job.wait() for job in jobs] == ["FAILED", "COMPLETED", "COMPLETED"], jobs[-1].output
    assert "resumed after step" in jobs[1].output
    assert "nothing left to do" in jobs[2].output
    assert_same_run(run, uninterrupted)


def test_a_job_that_makes_no_progress_stops_after_two_turns(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = os.pathsep.join(
        [str(write_program(tmp_path / "bin", "dptrain", WARNED)), cluster.environment()["PATH"]]
    )
    job = cluster.submit(
        "--ntasks-per-node=1", SCRIPTS / "requeue.sh", *TRAIN, folder=tmp_path, PATH=path,
        LAUNCH="env",
    )  # fmt: skip
    until(lambda: job.facts()["Restarts"] == "1" and job.state in ENDED, "another turn")
    assert job.wait() == "FAILED", job.output
    assert job.facts()["ExitCode"] == "2:0"
    assert "stopped two starts in a row after one step each" in job.output
    assert summary(run_of(job))["steps"] == 2


def test_a_site_needs_one_file(cluster: Cluster, tmp_path: Path) -> None:
    # The scripts lie elsewhere, and jobs start with an empty environment.
    scripts = shutil.copytree(SCRIPTS, tmp_path / "my scripts.sh.d" / "slurm")
    programs = write_program(tmp_path / "bin", "dptrain", PARSER)
    write_program(programs, "contain", '#!/bin/bash\nexport DPTRAIN_SEED=$1; shift; exec "$@"\n')
    path = os.pathsep.join([str(programs), cluster.environment()["PATH"]])
    name, conf = cluster.environment()["PYTHONPATH"], cluster.environment()["SLURM_CONF"]
    (scripts / "site.sh").write_text(
        f"export SBATCH_JOB_NAME=own SBATCH_EXPORT=NONE SLURM_CONF={conf}\n"
        f"export PATH={path} PYTHONPATH={name}\n"
        "LAUNCH=${LAUNCH:-srun --mpi=pmi2}\necho $NOT_SET\ncontainer=(contain 77)\n"
    )
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    options = "--network model-small --data 'npz:a b.sh c'"
    line = f'sbatch --parsable --ntasks-per-node=2 "$0/node.sh" {options}'
    number = cluster.run(
        "bash", "-c", f'source "$0/site.sh" && {line}', str(scripts), folder=folder
    )
    job = Job(cluster, int(number), folder)
    assert job.wait() == "COMPLETED", job.output
    assert job.facts()["JobName"] == "own"
    ranks = [json.loads(line) for line in job.output.splitlines() if line.startswith("{")]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    for rank in ranks:
        assert (rank["seed"], rank["data"], rank["threads"]) == (77, f"npz:{folder}/a b.sh c", 1)


def test_ranks_that_differ_are_started_by_a_list_of_programs(
    cluster: Cluster, tmp_path: Path
) -> None:
    command = "dptrain train --balance measured --network model-small --steps 20 --run-dir run"
    lines = (f"0 {command} --threads 2", f"1-2 {command} --threads 1")
    (tmp_path / "ranks.conf").write_text("\n".join(lines) + "\n")
    launch = ("srun", "--mpi=pmi2", "--ntasks=3", "--cpus-per-task=2", "--multi-prog")
    printed = cluster.run(*launch, "ranks.conf", folder=tmp_path)
    assert summary(tmp_path / "run")["ranks"] == 3, printed


@pytest.mark.parametrize("launcher", [SRUN, MPIRUN, "srun --mpi=none"])
def test_the_doctor_knows_slurms_ranks(cluster: Cluster, tmp_path: Path, launcher: str) -> None:
    line = f"{launcher} dptrain doctor --json"
    words = ("--nodes=1", "--ntasks=2", "--output=%x-%j.out", f"--wrap={line}")
    job = cluster.submit(*words, folder=tmp_path)
    works = launcher != "srun --mpi=none"
    assert job.wait() == ("COMPLETED" if works else "FAILED")
    text = job.output[job.output.index("[") : job.output.rindex("]") + 1]
    found = {item["subject"]: item for item in json.loads(text)}
    assert found["launcher"]["status"] == ("ok" if works else "problem")
    expected = "started 2 ranks (PMI_SIZE=2)" if works else "MPI reports 1 rank"
    assert expected in found["launcher"]["text"]
    assert works or "srun --mpi=pmi2" in found["launcher"]["text"]


def test_a_job_goes_back_before_its_time_is_up(
    cluster: Cluster, limited: Job, uninterrupted: Path
) -> None:
    ranks = limited.pids()
    until(lambda: all(_is_warned(pid) for pid in ranks), "Slurm's warning")
    # The next turn is to have time enough.
    cluster.run("scontrol", "update", f"JobId={limited.number}", "TimeLimit=120")
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    assert limited.wait() == "COMPLETED", limited.output
    assert limited.facts()["Restarts"] == "1"
    assert_same_run(run_of(limited), uninterrupted)


def _is_warned(pid: int) -> bool:
    """Whether SIGUSR1 awaits a halted process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = next(line.split()[1] for line in lines if line.startswith("ShdPnd"))
    return bool(int(pending, 16) >> (signal.SIGUSR1 - 1) & 1)


@pytest.mark.parametrize("ranks", [{}, {"RANKS": "2"}])
def test_an_array_measures_scaling_where_jobs_submit_no_jobs(
    cluster: Cluster, tmp_path: Path, ranks: dict[str, str]
) -> None:
    denied = "#!/bin/bash\necho 'sbatch: error: Access/permission denied' >&2; exit 1\n"
    programs = write_program(tmp_path / "bin", "sbatch", denied)
    path = cluster.environment()["PATH"]
    script = (SCRIPTS / "scaling.sh", "--network", "model-small", "--scaling", "weak", "--steps", 5)
    options = (f"--export=ALL,PATH={programs}:{path}", "--array=1-2", *TWO)
    job = cluster.submit(*options, *script, folder=tmp_path, LAUNCH=SRUN, **ranks)
    study = tmp_path / "studies" / f"scaling-{job.number}"
    until(lambda: not cluster.run("squeue", "--noheader"), "an empty queue")
    outputs = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert (study / "study.json").exists(), outputs
    assert (study / "report.html").exists()
    profiles = sorted(path.parent.name for path in study.glob("launches/*/profile.json"))
    points = ["weak-r2-t1"] if ranks else ["weak-r1-t1", "weak-r2-t1"]
    assert profiles == [f"{point}-{number}" for point in points for number in (1, 2)]
    assert f"{2 * len(points)} launches of {len(points)} point" in outputs


def test_an_array_measures_scaling_over_gpus(cluster: Cluster, tmp_path: Path) -> None:
    programs = write_program(tmp_path / "bin", "dptrain", SCALE)
    path = os.pathsep.join([str(programs), cluster.environment()["PATH"]])
    options = ("--array=1-2", "--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=4")
    script = ("--cpus-per-task=8", SCRIPTS / "scaling.sh", "--network", "cifar")
    job = cluster.submit(*options, *script, folder=tmp_path, PATH=path)
    until(lambda: not cluster.run("squeue", "--noheader"), "an empty queue")
    lines = [line for path in tmp_path.glob("*.out") for line in path.read_text().splitlines()]
    parts = [json.loads(line) for line in lines if line.startswith("{")]
    assert {each["part"] for each in parts} == {"1/2", "2/2"}
    for each in parts:
        assert (each["backend"], each["precision"]) == ("cuda", "tf32")
        assert each["output"] == f"studies/scaling-{job.number}"
        assert (each["ranks"], each["threads"]) == ("1,2,4,8", "8")
        assert each["gpus"] == ",".join(map(str, range(len(GPUS))))


def test_an_array_trains_a_sweep(cluster: Cluster, tmp_path: Path) -> None:
    values = ("--network", "model-small", "--steps", 5, "--set", "batch_size=8,16,32")
    sweep = (*values, "--output", "sweep")
    one = ("--ntasks-per-node=1", "--cpus-per-task=1")
    cluster.submit("--array=3-5", *one, SCRIPTS / "sweep.sh", *sweep, folder=tmp_path, LAUNCH=SRUN)
    until(lambda: not cluster.run("squeue", "--noheader"), "an empty queue")
    outputs = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    runs = sorted(path.parent.name for path in tmp_path.glob("sweep/runs/*/summary.json"))
    assert runs == [f"batch_size={size},seed=0" for size in (16, 32, 8)], outputs
    assert outputs.count("1 run of 3 to train") == 3
    printed = succeed("study", "sweep", *sweep, "--threads", 1, cwd=tmp_path)
    assert "3 are trained already" in printed
    assert (tmp_path / "sweep" / "sweep.csv").exists()
