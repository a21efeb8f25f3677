"""`dptrain doctor` finds each problem of an installation, and advises how to correct it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dptrain import doctor
from dptrain.cli.main import run
from dptrain.comm.launching.launcher import Launch
from dptrain.comm.world import World
from dptrain.doctor import NOTE, OK, PROBLEM, Finding, examine, gpus
from dptrain.errors import UserError


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher and no settings in the environment, and MPI is not started."""
    for name in list(os.environ):
        if name.startswith(("DPTRAIN_", "PMI", "OMPI_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(World, "connect", lambda **_: World.single())
    monkeypatch.setattr(doctor, "mpi_findings", lambda: iter(()))


def by_subject(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.usefixtures("alone")
def test_one_rank_finds_itself() -> None:
    found = by_subject(examine())
    assert found["launcher"].text == "none; this is a single rank"
    assert "rank 0" in found["ranks"].text
    assert found["variables"].status == OK
    assert found["numba"].status == OK
    assert {finding.status for finding in found.values()} <= {OK, NOTE}


@pytest.mark.usefixtures("alone")
def test_the_exit_code_shows_whether_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor"], is_rank_zero=True) == 0
    assert "problem" not in capsys.readouterr().out
    monkeypatch.setenv("DPTRAIN_BATCHSIZE", "3")
    assert run(["doctor"], is_rank_zero=True) == 2
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("problem")]
    assert "unknown environment variable DPTRAIN_BATCHSIZE; did you mean" in line
    assert run(["doctor", "--json"], is_rank_zero=True) == 2
    found = json.loads(capsys.readouterr().out)
    assert [item["subject"] for item in found if item["status"] == PROBLEM] == ["variables"]


@pytest.mark.usefixtures("alone")
def test_a_launcher_of_another_mpi_is_a_problem() -> None:
    failure = UserError("MPI reports 1 rank, but the launcher started 4")
    import mpi4py.MPI  # noqa: F401

    launch = Launch(0, 4, "PMI_SIZE=4")
    assert doctor.launcher_finding(launch, 1, failure) == Finding("launcher", PROBLEM, str(failure))
    assert (
        doctor.launcher_finding(launch, 4, None).text == "started 4 ranks (PMI_SIZE=4); MPI has 4"
    )


@pytest.mark.usefixtures("alone")
def test_variables_that_are_left_over_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_FD", "900")
    found = by_subject(examine())["launcher"]
    assert (found.status, "(PMI_FD)" in found.text) == (NOTE, True)


@pytest.mark.parametrize(("cores", "status"), [(2, OK), (10**9, NOTE)])
def test_too_little_shared_memory_is_noted(tmp_path: Path, cores: int, status: str) -> None:
    [finding] = doctor.memory_findings("", "MPICH 5.0.2", cores, tmp_path)
    assert finding.status == status
    assert list(doctor.memory_findings("", "Open MPI 5.0.11", cores, tmp_path)) == []
    [finding] = doctor.memory_findings("", "MPICH 5.0.2", cores, tmp_path / "absent")
    assert (finding.status, "absent" in finding.text) == (NOTE, True)


def test_a_numba_that_does_not_compile_is_a_problem() -> None:
    [finding] = doctor.kernel_findings([facts(numba_error="NUMBA_DISABLE_JIT is set")])
    assert (finding.status, finding.text) == (PROBLEM, "NUMBA_DISABLE_JIT is set")


def test_no_mpi_library_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise UserError("mpi4py finds no MPI library")

    monkeypatch.setattr(doctor, "import_mpi", fail)
    [finding] = doctor.mpi_findings()
    assert finding.status == PROBLEM


def test_a_wheel_that_hides_the_sites_mpi_is_noted(tmp_path: Path) -> None:
    prefix, site = tmp_path / "environment", tmp_path / "opt"
    executable(prefix / "bin" / "mpirun", "")
    other = executable(site / "bin" / "mpirun", "")
    search = os.pathsep.join([str(prefix / "bin"), str(site / "bin"), str(tmp_path / "absent")])
    others = doctor.site_launchers(search, prefix)
    assert others == [other]
    wheel = ["mpich 5.0.2"]
    noted = doctor.wheel_finding(wheel, others, in_slurm=False)
    assert noted.status == NOTE
    assert str(other) in noted.text
    assert "pip uninstall mpich" in noted.advice
    assert doctor.wheel_finding(wheel, [], in_slurm=True).status == NOTE
    assert doctor.wheel_finding(wheel, [], in_slurm=False).status == OK
    assert doctor.wheel_finding([], others, in_slurm=True).status == OK


@pytest.mark.parametrize(
    ("answer", "vendor", "status"),
    [
        ("HYDRA build details:", "MPICH", OK),
        ("HYDRA build details:", "Open MPI", PROBLEM),
        ("mpirun (Open MPI) 5.0.11", "Open MPI", OK),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "Open MPI", OK),
        ("prterun (PRRTE) 3.0.11", "Open MPI", OK),
        ("mpirun (Open MPI) 5.0.11", "MPICH", PROBLEM),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "Intel MPI", OK),
        ("something else", "MPICH", NOTE),
    ],
)
def test_mpirun_must_be_of_the_same_mpi(
    answer: str, vendor: str, status: str, tmp_path: Path
) -> None:
    executable(tmp_path / "mpirun", answer)
    finding = doctor.mpirun_finding(vendor, str(tmp_path), tmp_path / "absent")
    assert finding.status == status


def test_mpirun_off_the_path_is_noted(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    assert doctor.mpirun_finding("MPICH", absent, tmp_path).text == "none on PATH"
    executable(tmp_path / "mpirun", "")
    finding = doctor.mpirun_finding("MPICH", absent, tmp_path)
    assert finding.status == NOTE
    assert finding.text == f"{tmp_path / 'mpirun'} is not on PATH"


def facts(**changes: Any) -> dict[str, Any]:
    same = {"host": "a", "cores": 4, "threads": 2, "python": "3.11.7", "versions": {}, "cache": "x"}
    same["numba_error"] = None
    return {**same, **changes}


def test_ranks_are_listed_by_host_and_oversubscription_is_noted() -> None:
    one = facts(host="b", cores=1, threads=1)
    ranks = [facts(threads=1), facts(threads=1), one, {**one, "threads": 2}, facts(threads=1)]
    first, second = doctor.rank_findings(ranks)
    assert first == Finding("ranks", OK, "a: 3 ranks (0, 1, 4), 4 cores, 1 thread per rank")
    assert second.status == NOTE
    assert second.text == "b: 2 ranks (2 to 3), 1 core, 1 to 2 threads per rank"
    assert "at most 1 rank on it, or set DPTRAIN_THREADS" in second.advice


@pytest.mark.usefixtures("alone")
def test_threads_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert "binding" not in by_subject(examine())
    monkeypatch.setenv("DPTRAIN_THREADS", "16")
    found = by_subject(examine())
    assert found["ranks"].text.endswith("1 core, 16 threads per rank")
    assert found["ranks"].status == found["binding"].status == NOTE
    assert found["binding"].text.startswith("rank 0 computes with 16 threads on 1 core of ")
    assert found["binding"].advice == "use --threads 1"


def test_ranks_with_other_versions_are_a_problem() -> None:
    *_, last = doctor.rank_findings([facts(), facts(versions={"numpy": "1"}), facts()])
    assert last.status == PROBLEM
    assert last.text == "rank 1: versions of packages differ from those of rank 0"


def test_a_cache_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    (tmp_path / "kernel.nbc").write_bytes(bytes(3_000_000))
    _, cache = doctor.kernel_findings([facts(cache=str(tmp_path))])
    assert cache == Finding("kernel cache", OK, f"{tmp_path}, 1 file, 3.0 MB")
    _, cache = doctor.kernel_findings([facts(cache=str(tmp_path)), facts(cache=None)])
    assert cache.status == NOTE
    assert cache.text.startswith("rank 1 has no folder that it can write to")
    assert "DPTRAIN_CACHE_DIR" in cache.advice


def test_missing_libraries_are_noted_if_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("backend cuda finds no libnvrtc; pip install it")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("dptrain.backends.cuda.device.nvrtc.find_compiler", fail)
    monkeypatch.setattr("dptrain.backends.cudnn.library.load_library", fail)
    found = by_subject(tuple(doctor.gpu_findings()))
    assert found["gpus"].text.startswith("none found")
    assert [*found] == ["gpus", "cupy", "nvrtc", "cudnn", "nccl"]
    assert {finding.status for finding in found.values()} == {OK}
    line = "NVIDIA H200, 143771 MiB, 580.65.06"
    executable(tmp_path / "nvidia-smi", f"{line}\n{line}")
    monkeypatch.setattr(gpus, "link", lambda one, other: "host memory")
    found = by_subject(tuple(doctor.gpu_findings()))
    assert found["gpus"] == Finding("gpus", OK, "2 × NVIDIA H200, 143771 MiB, driver 580.65.06")
    assert {found[name].status for name in ("cupy", "nvrtc", "cudnn", "nccl")} == {NOTE}
    assert "CuPy" in found["cupy"].text
    assert "pip install '.[cuda13]'" in found["cupy"].advice
    assert found["nvrtc"].advice == "pip install it"
    assert found["gpu links"].status == NOTE
    assert found["transport"].text == (
        "gradients are transferred through host memory, within this node and across nodes"
    )
    monkeypatch.setattr(gpus, "link", lambda one, other: "NVLink")
    text = by_subject(tuple(doctor.gpu_findings()))["transport"].text
    assert text.endswith("peer-to-peer memory within this node, host memory across nodes")


def test_links_between_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "link", lambda one, other: "NVLink")
    assert gpus.link_finding(gpus.links(4), 4) == Finding("gpu links", OK, "all 4 by NVLink")
    monkeypatch.setattr(gpus, "link", lambda one, other: "NVLink" if one + other == 1 else "PCIe")
    assert gpus.link_finding(gpus.links(3), 3).text == "2 pairs by PCIe, 1 pair by NVLink"
    assert gpus.nccl_version(22809) == "2.28.9"


def test_cupys_cuda_must_run_on_the_driver() -> None:
    def found(own: int, driver: int) -> Finding:
        runtime = SimpleNamespace(runtimeGetVersion=lambda: own, driverGetVersion=lambda: driver)
        cupy = SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime))
        return gpus.cupy_finding(cupy, have_gpus=True)

    good = "14.2.0 for CUDA 12.9; the driver supports up to CUDA 13.0"
    assert found(12090, 13000) == Finding("cupy", OK, good)
    assert found(12090, 12040).status == OK
    assert found(13000, 12090).status == PROBLEM
    assert "CuPy for CUDA 12" in found(13000, 12090).advice
    assert found(12090, 0).status == NOTE


def test_the_compiler_of_kernels_is_shown() -> None:
    nvrtc = by_subject(tuple(doctor.gpu_findings()))["nvrtc"]
    assert nvrtc.status == OK
    assert "compiles for up to sm_" in nvrtc.text


def test_cudnn_is_shown() -> None:
    cudnn = by_subject(tuple(doctor.gpu_findings()))["cudnn"]
    assert cudnn.status == OK
    assert cudnn.text.startswith("9.19.0 at libcudnn.so.9, frontend ")
