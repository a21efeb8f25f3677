"""What `env.json` records, and the cores and memory that a container leaves."""

import os
import re
import sys
from pathlib import Path

import pytest

from dptrain.files import dump_json, parse_json
from dptrain.measure import environment as module
from dptrain.measure.environment import available_cores, available_memory, environment


def test_it_is_json_and_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dptrain", "train", "--seed", "3"])
    facts = environment()
    assert parse_json(dump_json(facts)) == facts
    assert facts["command"] == ["dptrain", "train", "--seed", "3"]
    assert facts["versions"]["numpy"] == sys.modules["numpy"].__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", facts["started"])
    assert (facts["rank"], facts["size"]) == (0, 1)


def test_every_dependency_is_recorded() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert dependencies
    assert set(re.findall(r'"([\w-]+)', dependencies[1])) <= set(module.PACKAGES)


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JWT", "abc")
    monkeypatch.setenv("DPTRAIN_API_TOKEN", "abc")
    monkeypatch.setenv("HOME_ADDRESS", "abc")
    variables = environment()["variables"]
    assert variables["SLURM_JOB_ID"] == "17"
    assert "abc" not in variables.values()


def test_cores_are_at_most_what_affinity_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    for quota, cores in ((None, 3), (2.0, 2), (1.5, 1), (0.25, 1), (64.0, 3)):
        monkeypatch.setattr(module, "_cgroup_cores", lambda root, quota=quota: quota)
        assert available_cores() == cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own", "above", "cores"),
    [("max 100000", "max 100000", None), ("150000 100000", "max 100000", 1.5),
     ("max 100000", "400000 100000", 4.0), ("300000 100000", "200000 100000", 2.0)],
)  # fmt: skip
def test_the_smallest_quota_on_the_way_up_counts(
    tmp_path: Path, own: str, above: str, cores: float | None
) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/jobs/one\n")
    write(tmp_path / "sys/fs/cgroup/jobs/one/cpu.max", f"{own}\n")
    write(tmp_path / "sys/fs/cgroup/jobs/cpu.max", f"{above}\n")
    assert module._cgroup_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2.5), ("-1", None)])
def test_quotas_of_the_first_version(tmp_path: Path, quota: str, cores: float | None) -> None:
    # In a container the path of the membership is often the host's and is not mounted.
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/host/path\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota)
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert module._cgroup_cores(tmp_path) == cores


def test_no_cgroups_is_no_quota(tmp_path: Path) -> None:
    assert module._cgroup_cores(tmp_path) is None


def test_memory_is_what_the_machine_has_or_less() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() <= total
