"""What launchers leave in the environment, and when one rank is refused."""

from __future__ import annotations

import pytest

from dptrain.comm.launcher import (
    Launch,
    find_launch,
    has_launcher,
    refuse_other_mpi,
    refuse_single,
    shorten_addresses,
)
from dptrain.errors import UserError


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch(0, 1, "")),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, Launch(3, 4, "PMI_SIZE=4")),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            Launch(1, 2, "OMPI_COMM_WORLD_SIZE=2"),
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"},
            Launch(5, 8, "SLURM_STEP_NUM_TASKS=8"),
        ),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, Launch(0, 1, "")),
        ({"PMI_SIZE": "many"}, Launch(0, 1, "")),
    ],
)
def test_launch_is_read(environ: dict[str, str], expected: Launch) -> None:
    assert find_launch(environ) == expected


def test_mpirun_knows_better_than_the_slurm_step_around_it() -> None:
    environ = {"PMI_SIZE": "1", "PMI_RANK": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert find_launch(environ).size == 1
    refuse_single(1, "MPICH", environ)


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
        (4, {"PMI_SIZE": "4"}),
        (1, {"PMI_SIZE": "1"}),
        (1, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}),
        (1, {"PMI_SIZE": "4", "DPTRAIN_ALLOW_SINGLE": "1"}),
    ],
)
def test_what_was_meant_is_let_through(size: int, environ: dict[str, str]) -> None:
    refuse_single(size, "MPICH", environ)


def test_another_mpi_under_open_mpi_is_refused_before_it_starts() -> None:
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    with pytest.raises(UserError, match=r"OMPI_COMM_WORLD_SIZE=2.*MPICH 5\.0\.2"):
        refuse_other_mpi("MPICH 5.0.2", environ)
    refuse_other_mpi("Open MPI 5.0.11", environ)
    refuse_other_mpi("MPICH 5.0.2", {**environ, "DPTRAIN_ALLOW_SINGLE": "1"})
    refuse_other_mpi("MPICH 5.0.2", {"PMI_SIZE": "2"})


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
