"""Cores and memory that a process may use, also in a container."""

import os
from pathlib import Path

import pytest

from dptrain import machine
from dptrain.machine import available_cores, available_memory


def test_the_cpu_quota_limits_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    monkeypatch.setattr(machine, "physical_cores", lambda threads: threads)
    for quota, cores in ((None, 3), (2.0, 2), (1.5, 1), (0.25, 1), (64.0, 3)):
        monkeypatch.setattr(machine, "_cgroup_cores", lambda root, quota=quota: quota)
        assert available_cores() == cores


@pytest.mark.parametrize(
    ("mask", "cores"), [({0, 1, 4, 5}, 2), ({0, 1, 2}, 3), ({4, 0}, 1), ({2, 9}, 2)]
)
def test_hardware_threads_of_one_core_count_once(
    tmp_path: Path, mask: set[int], cores: int
) -> None:
    for thread, siblings in ((0, "0,4"), (1, "1,5"), (2, "2-3"), (4, "0,4"), (5, "1,5")):
        write(tmp_path / f"cpu{thread}/topology/thread_siblings_list", f"{siblings}\n")
    found = machine.physical_cores(mask, tmp_path)
    assert len(found) == cores
    if mask == {2, 9}:  # 9 has no description.
        assert found == {frozenset({2, 3}), frozenset({9})}


def test_a_mask_with_fewer_cores_than_the_cgroup_allows_is_found() -> None:
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        allowed = os.sched_getaffinity(0)
        assert not machine.has_smaller_mask()
        os.sched_setaffinity(0, {min(allowed)})
        assert machine.has_smaller_mask() == (len(allowed) > 1)
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, own)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own", "above", "cores"),
    [("max 100000", "max 100000", None), ("150000 100000", "max 100000", 1.5),
     ("max 100000", "400000 100000", 4.0), ("300000 100000", "200000 100000", 2.0)],
)  # fmt: skip
def test_the_smallest_quota_of_a_cgroup_and_its_parents_is_used(
    tmp_path: Path, own: str, above: str, cores: float | None
) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/jobs/one\n")
    write(tmp_path / "sys/fs/cgroup/jobs/one/cpu.max", f"{own}\n")
    write(tmp_path / "sys/fs/cgroup/jobs/cpu.max", f"{above}\n")
    assert machine._cgroup_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2.5), ("-1", None)])
def test_quotas_of_cgroup_version_1(tmp_path: Path, quota: str, cores: float | None) -> None:
    # In a container the path is often the host's, which is not mounted.
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/host/path\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota)
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert machine._cgroup_cores(tmp_path) == cores


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert machine._cgroup_cores(tmp_path) is None


def test_available_memory_is_at_most_that_of_the_machine() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() <= total


def test_cgroups_of_version_2_leave_memory(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/jobs/one\n")
    folder = tmp_path / "sys/fs/cgroup/jobs"
    write(folder / "one/memory.max", "max\n")
    write(folder / "one/memory.current", "600\n")
    write(folder / "memory.max", "1000\n")
    write(folder / "memory.current", "700\n")
    write(folder / "memory.stat", "anon 500\ninactive_file 50\nactive_file 9\n")
    assert list(machine._cgroup_headroom(tmp_path)) == [350]


def test_cgroups_of_version_1_leave_memory(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/job\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    write(folder / "memory.limit_in_bytes", "1000\n")
    write(folder / "memory.usage_in_bytes", "1200\n")
    assert list(machine._cgroup_headroom(tmp_path)) == [0]


def test_free_memory_needs_no_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cgroup_headroom", lambda root: iter(()))
    assert machine.free_memory() == pytest.approx(machine._available_on_machine(), rel=0.5)


def test_free_memory_is_positive_and_at_most_the_available_memory() -> None:
    assert 0 < machine.free_memory() <= available_memory()
