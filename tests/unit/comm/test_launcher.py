"""Which launcher started this process, which variables are ignored, and which are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest

from dptrain.comm.launching import launcher
from dptrain.comm.launching.ancestry import Facts
from dptrain.comm.launching.launcher import (
    LAUNCHERS,
    Launch,
    find_launch,
    has_launcher,
    prepare_mpi,
    refuse_other_mpi,
    refuse_single,
    shorten_addresses,
)
from dptrain.errors import UserError

HIDDEN = Facts(has_socket=lambda file: True, has_listener=lambda port: True)
"""The facts in a container: connections are open, and the launcher cannot be seen."""
ALONE = Facts(sees_all=True, has_socket=lambda file: False, has_listener=lambda port: False)
"""The facts of a process that a shell started."""


@pytest.fixture(autouse=True)
def _in_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables alone decide in tests that pass no facts."""
    monkeypatch.setattr(launcher, "observe", lambda programs: HIDDEN)
    monkeypatch.setattr(launcher, "_decisions", {})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch(0, 1, "")),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "PMI_FD": "9"}, Launch(3, 4, "PMI_SIZE=4")),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "PMIX_SERVER_URI41": "prterun@0.0;tcp4://127.0.0.1:50",
            },
            Launch(1, 2, "OMPI_COMM_WORLD_SIZE=2"),
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"},
            Launch(5, 8, "SLURM_STEP_NUM_TASKS=8"),
        ),
        ({"PALS_LOCAL_SIZE": "2", "PALS_RANKID": "5"}, Launch(5, 2, "PALS_LOCAL_SIZE=2")),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, Launch(0, 1, "")),
        ({"PMI_SIZE": "many"}, Launch(0, 1, "", ("PMI_SIZE",))),
    ],
)
def test_launch_is_read(environ: dict[str, str], expected: Launch) -> None:
    assert find_launch(environ) == expected


def test_mpirun_knows_better_than_the_slurm_step_around_it() -> None:
    environ = {
        "PMI_SIZE": "1",
        "PMI_RANK": "0",
        "PMI_FD": "9",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
    }
    assert find_launch(environ).size == 1
    refuse_single(1, "MPICH", environ)


# Launchers that have started this process, and variables that others have left.

HYDRA, OPEN_MPI, PMI2, PMIX, STEP = "hydra", "open mpi", "srun pmi2", "srun pmix", "srun"
PROGRAMS = {
    HYDRA: "hydra_pmi_proxy",
    OPEN_MPI: "prterun",
    PMI2: "slurmstepd",
    PMIX: "slurmstepd",
    STEP: "slurmstepd",
}
OPEN_FILE, OPEN_PORT = 7, 4000


def variables(kind: str, rank: int, size: int, *, is_open: bool) -> dict[str, str]:
    """The variables of a launcher, with a connection that is open or closed."""
    file, port = (OPEN_FILE, OPEN_PORT) if is_open else (8, 4001)
    pmi = {"PMI_RANK": f"{rank}", "PMI_SIZE": f"{size}", "PMI_FD": f"{file}"}
    pmix = {
        "PMIX_RANK": f"{rank}",
        "PMIX_NAMESPACE": "job",
        "PMIX_SERVER_URI2": f"job.0;tcp4://127.0.0.1:{port}",
    }
    world = {"OMPI_COMM_WORLD_RANK": f"{rank}", "OMPI_COMM_WORLD_SIZE": f"{size}"}
    slurm = {"SLURM_PROCID": f"{rank}", "SLURM_STEP_NUM_TASKS": f"{size}"}
    return {
        HYDRA: {**pmi, "HYDI_CONTROL_FD": "5", "MPI_LOCALNRANKS": "1"},
        OPEN_MPI: {**pmix, **world, "OMPI_MCA_ess_base_jobid": "1"},
        PMI2: {**pmi, **slurm, "PMI_JOBID": "1.0"},
        PMIX: {**pmix, **slurm},
        STEP: slurm,
    }[kind]


def leftovers(random: Random) -> dict[str, str]:
    """Some of the variables that any launchers have left, with closed connections."""
    found: dict[str, str] = {}
    for kind in random.choices(list(PROGRAMS), k=random.randrange(4)):
        size = random.choice([1, 1, 2, 64])
        found |= variables(kind, random.randrange(size), size, is_open=False)
    share = random.choice([0.3, 0.7, 1.0])
    settings = ["OMPI_MCA_btl", "SLURM_JOB_ID", "PMIX_MCA_gds", "HOME", "MPICH_DBG"]
    left = {name: value for name, value in found.items() if random.random() < share}
    return left | dict.fromkeys(random.sample(settings, 2), "1")


@pytest.mark.parametrize("kind", list(PROGRAMS))
def test_the_launcher_that_started_a_rank_is_found_among_leftovers(kind: str) -> None:
    for seed in range(200):
        random = Random(f"{kind} {seed}")
        left, size = leftovers(random), random.randint(1, 64)
        rank, is_nested = random.randrange(size), random.random() < 0.5
        own = variables(kind, rank, size, is_open=True)
        environ = {**left, **own}
        names = [frozenset([PROGRAMS[kind]])] + [frozenset(["slurmstepd"])] * is_nested
        facts = Facts(tuple(names), "", True, OPEN_FILE.__eq__, OPEN_PORT.__eq__)
        launch = find_launch(environ, facts)
        assert (launch.rank, launch.size, launch.error) == (rank, size, ""), (seed, environ)
        assert not set(launch.hidden) & own.keys(), (seed, environ)
        # No library follows what is left: MPICH aborts if it finds both PMI and PMIx.
        rest = environ.keys() - set(launch.hidden)
        connections = {name for name in rest if re.match(r"PMI_(FD|RANK)|PMIX_(?!MCA)", name)}
        assert connections <= own.keys(), (seed, environ)
        assert {"OMPI_MCA_btl", "PMIX_MCA_gds", "HOME"} & environ.keys() <= rest, (seed, environ)


@pytest.mark.parametrize("is_child", [False, True])
def test_leftovers_are_ignored_or_one_line_that_says_what_to_unset(is_child: bool) -> None:
    parent = Facts(  # The connections of the parent are open.
        (frozenset(["hydra_pmi_proxy"]),),
        "process 17 (python)",
        sees_all=True,
        has_socket=lambda file: True,
        has_listener=lambda port: True,
    )
    facts = parent if is_child else ALONE
    num_refused = 0
    for seed in range(300):
        left = leftovers(Random(seed))
        launch = find_launch(left, facts)
        assert (launch.rank, launch.size, launch.source) == (0, 1, ""), (seed, left)
        counts = {name: int(value) for name, value in left.items() if value.isdecimal()}
        sizes = [count for name, count in counts.items() if re.search("SIZE|NUM_TASKS", name)]
        ranks = [count for name, count in counts.items() if re.search("RANK$|PROCID", name)]
        is_several = max(sizes, default=1) > 1 or max(ranks, default=0) > 0
        assert bool(launch.error) == is_several, (seed, left)
        if is_several:
            num_refused += 1
            assert "\n" not in launch.error
            assert ("child of an MPI program" in launch.error) == is_child
            unset = re.findall(r"-u (\w+)", launch.error)
            rest = {name: value for name, value in left.items() if name not in unset}
            assert find_launch(rest, facts).error == "", (seed, left)
    assert 100 < num_refused < 250


def test_a_rank_whose_connection_a_program_closed_is_told_so() -> None:
    for kind in (HYDRA, PMI2):
        environ = variables(kind, 2, 4, is_open=False)
        facts = replace(ALONE, launchers=(frozenset([PROGRAMS[kind]]),))
        launch = find_launch(environ, facts)
        assert (launch.rank, launch.size) == (2, 4)
        assert re.search(r"connection \(PMI_FD=8\) is closed.*close_fds=False", launch.error)


def test_preparation_refuses_or_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "observe", lambda programs: ALONE)
    environ = {"PMI_FD": "9", "PMIX_NAMESPACE": "job", "OMPI_MCA_btl": "tcp"}
    assert prepare_mpi(environ) == Launch(0, 1, "")
    assert environ == {"OMPI_MCA_btl": "tcp"}
    environ = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    with pytest.raises(UserError, match="env -u PMI_RANK -u PMI_SIZE"):
        prepare_mpi(environ)
    environ["DPTRAIN_ALLOW_SINGLE"] = "1"
    assert prepare_mpi(environ) == Launch(0, 1, "")
    assert environ == {"DPTRAIN_ALLOW_SINGLE": "1"}


def test_the_decision_outlives_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = variables(HYDRA, 3, 4, is_open=True)
    before = find_launch(environ)
    monkeypatch.setattr(launcher, "observe", lambda programs: ALONE)
    assert find_launch({**environ, "MPIR_CVAR_CH4_NETMOD": "ofi"}) == before
    assert before.rank == 3


def test_each_launcher_can_be_told_by_its_variables() -> None:
    assert len({each.rank for each in LAUNCHERS}) == len(LAUNCHERS)


def test_one_of_many_is_refused_with_the_reason_and_what_to_try() -> None:
    environ = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
    with pytest.raises(UserError) as caught:
        refuse_single(1, "MPICH 5.0.2", environ)
    message = str(caught.value)
    assert "\n" not in message
    for word in ("4", "SLURM_STEP_NUM_TASKS", "MPICH 5.0.2", "srun --mpi=pmi2", "dptrain doctor"):
        assert word in message


def test_open_mpi_is_advised_its_own_plugin_of_srun() -> None:
    environ = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
    with pytest.raises(UserError, match="srun --mpi=pmix "):
        refuse_single(1, "Open MPI 5.0.11", environ)


@pytest.mark.parametrize(
    ("size", "environ"),
    [
        (1, {}),
        (4, {"PMI_SIZE": "4", "PMI_FD": "9"}),
        (1, {"PMI_SIZE": "1", "PMI_FD": "9"}),
        (1, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}),
        (1, {"PMI_SIZE": "4", "PMI_FD": "9", "DPTRAIN_ALLOW_SINGLE": "1"}),
    ],
)
def test_what_was_meant_is_let_through(size: int, environ: dict[str, str]) -> None:
    refuse_single(size, "MPICH", environ)


@pytest.mark.parametrize(
    ("kind", "source"), [(OPEN_MPI, "OMPI_COMM_WORLD_SIZE=2"), (PMIX, "SLURM_STEP_NUM_TASKS=2")]
)
def test_another_mpi_under_pmix_is_refused_before_it_starts(kind: str, source: str) -> None:
    environ = variables(kind, 1, 2, is_open=True)
    with pytest.raises(UserError, match=rf"{source}.*MPICH 5\.0\.2"):
        refuse_other_mpi("MPICH 5.0.2", environ)
    before = dict(environ)
    refuse_other_mpi("Open MPI 5.0.11", environ)
    refuse_other_mpi("MPICH 5.0.2", environ, has_pmix=True)
    assert environ == before
    refuse_other_mpi("MPICH 5.0.2", {**environ, "DPTRAIN_ALLOW_SINGLE": "1"})
    refuse_other_mpi("MPICH 5.0.2", {**environ, "PMI_FD": "7"})


def test_pmix_is_hidden_from_a_single_rank_that_does_not_know_it() -> None:
    environ = variables(PMIX, 0, 1, is_open=True)
    refuse_other_mpi("MPICH 5.0.2", environ)
    assert sorted(environ) == ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"]


WHEEL = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH CC:           cc\n"
SRUN = {"PMI_JOBID": "17.0", "PMI_FD": "10", "PMI_SIZE": "2"}


def test_under_srun_mpich_gives_slurm_short_addresses() -> None:
    environ = dict(SRUN)
    shorten_addresses(WHEEL, environ)
    assert environ == SRUN | {"MPIR_CVAR_CH4_NETMOD": "ofi"}


@pytest.mark.parametrize(
    ("version", "environ"),
    [
        (WHEEL, {"PMI_FD": "9", "PMI_HOSTNAME": "n1"}),
        (WHEEL, SRUN | {"PMI_HOSTNAME": "n1"}),
        (WHEEL, SRUN | {"MPIR_CVAR_CH4_NETMOD": "ucx"}),
        (WHEEL, SRUN | {"MPICH_CH4_NETMOD": "ucx"}),
        (WHEEL.replace("ucx ofi", "ofi"), SRUN),
        (WHEEL.replace("ucx ofi", "ucx"), SRUN),
        ("Open MPI v5.0.11", SRUN),
    ],
)
def test_networks_are_left_alone_elsewhere(version: str, environ: dict[str, str]) -> None:
    before = dict(environ)
    shorten_addresses(version, environ)
    assert environ == before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PMI_SIZE", True),
        ("PMIX_RANK", True),
        ("OMPI_COMM_WORLD_SIZE", True),
        ("SLURM_PROCID", True),
        ("SLURM_JOB_ID", False),
        ("HOME", False),
    ],
)
def test_a_process_of_an_unknown_launcher_starts_mpi(name: str, expected: bool) -> None:
    assert has_launcher({"PATH": "/bin", name: "1"}) is expected
