"""The warning of threads that must share a core, for random machines, masks and threads."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.comm.launching import launcher
from dptrain.comm.launching.ancestry import Facts
from dptrain.training.binding import RankCores, binding_warning


def bound(mask: tuple[int, ...], threads: int, num_cores: int, host: str = "n1") -> RankCores:
    """A rank on a machine where hardware threads i and i + num_cores share a core."""
    cores = sorted({processor % num_cores for processor in mask})
    return RankCores(host, threads, mask, tuple(cores), num_cores)


@st.composite
def machines(draw: st.DrawFn) -> tuple[int, list[RankCores]]:
    """The cores of a machine with one or two hardware threads each, and its ranks."""
    num_cores, smt = draw(st.integers(1, 8)), draw(st.integers(1, 2))
    processors = st.sets(st.integers(0, num_cores * smt - 1), min_size=1)
    ranks = draw(st.lists(st.tuples(processors, st.integers(0, 9)), min_size=1, max_size=4))
    return num_cores, [bound(tuple(sorted(mask)), n, num_cores) for mask, n in ranks]


@given(machines())
def test_a_warning_names_a_rank_whose_threads_share_a_core(
    machine: tuple[int, list[RankCores]],
) -> None:
    num_cores, ranks = machine
    crowded = [
        rank
        for rank, own in enumerate(ranks)
        if own.threads > len({processor % num_cores for processor in own.hardware_threads})
    ]
    pairs = {
        (first, second)
        for second, b in enumerate(ranks)
        for first, a in enumerate(ranks[:second])
        if not set(a.hardware_threads) & set(b.hardware_threads)
        and {p % num_cores for p in a.hardware_threads}
        & {p % num_cores for p in b.hardware_threads}
    }
    line = binding_warning(ranks, {})
    assert line is None or "\n" not in line
    if crowded:
        assert line is not None
        assert line.startswith(f"rank {crowded[0]} computes with ")
        assert line.endswith(f"use --threads {len(ranks[crowded[0]].cores)}")
    elif line is not None:
        found = re.match(r"ranks (\d+) and (\d+) are bound", line)
        assert found is not None
        assert (int(found[1]), int(found[2])) in pairs
    else:
        # Ranks without a binding that are too many for their cores are reported elsewhere.
        assert all(
            any(_meet(a, third) and _meet(third, b) for third in ranks)
            for a, b in ((ranks[i], ranks[j]) for i, j in pairs)
        )


def _meet(a: RankCores, b: RankCores) -> bool:
    return bool(set(a.hardware_threads) & set(b.hardware_threads))


@pytest.mark.parametrize(
    ("variables", "advice"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_SERVER_URI41": "prterun@0.0;tcp4://127.0.0.1:50"},
            "mpirun --map-by slot:PE=4 --bind-to core",
        ),
        (
            {"PMI_SIZE": "2", "PMI_FD": "9", "PMI_JOBID": "7.0"},
            "srun --cpus-per-task=4 --cpu-bind=cores",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun --cpus-per-task=4 --cpu-bind=cores"),
        (
            {"PMI_SIZE": "2", "PMI_FD": "9", "PMI_JOBID": "7.0", "PMI_HOSTNAME": "n1"},
            "mpirun -bind-to core:4",
        ),
    ],
)
def test_the_advice_is_for_the_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], advice: str
) -> None:
    # The launcher cannot be seen, and its connection is open.
    facts = Facts(has_socket=lambda file: True, has_listener=lambda port: True)
    monkeypatch.setattr(launcher, "observe", lambda programs: facts)
    monkeypatch.setattr(launcher, "_decisions", {})
    line = binding_warning([bound((0, 1, 2, 5), 4, 4), bound((3,), 1, 4)], variables)
    assert line is not None
    assert "on 3 cores (4 hardware threads) of n1 (affinity mask 0-2,5); " in line
    assert line.endswith(f"start with {advice}, or use --threads 3")
    # No binding helps if the machine has fewer cores.
    line = binding_warning([bound((0, 1, 2, 5), 5, 4)], variables)
    assert line is not None
    assert line.endswith(" (affinity mask 0-2,5); use --threads 3")


def test_hardware_threads_of_another_machine_are_other_cores() -> None:
    assert binding_warning([bound((0,), 1, 2), bound((2,), 1, 2, "n2")], {}) is None
    line = binding_warning([bound((0,), 1, 2), bound((2,), 1, 2)], {})
    assert line is not None
    assert "--hint=nomultithread" in line
