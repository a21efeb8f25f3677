"""Facts about the processor, from the files of Linux."""

from __future__ import annotations

from pathlib import Path

from dptrain.measure.machine.cpu_configuration import cpu_configuration


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_facts_of_a_machine(tmp_path: Path) -> None:
    for number in (0, 1, 2, 3):
        write(
            tmp_path / f"cpu/cpu{number}", cpufreq__scaling_governor="powersave",
            topology__physical_package_id=str(number % 2),
            topology__thread_siblings_list=f"{number % 2},{number % 2 + 2}",
        )  # fmt: skip
    write(tmp_path / "cpu", intel_pstate__no_turbo="1", smt__active="1")
    write(tmp_path / "node", node0__cpulist="0,2", node1__cpulist="1,3")
    assert cpu_configuration(tmp_path, [3, 0, 1]) == {
        "governor": "powersave", "turbo": False, "smt": True, "threads_per_core": 2, "sockets": 2,
        "numa_nodes": 2, "binding": "0-1,3",
    }  # fmt: skip


def test_what_the_system_does_not_state_is_none(tmp_path: Path) -> None:
    facts = cpu_configuration(tmp_path, [0])
    assert facts.pop("binding") == "0"
    assert set(facts.values()) == {None}


def test_this_machine_has_a_binding() -> None:
    assert cpu_configuration()["binding"]
