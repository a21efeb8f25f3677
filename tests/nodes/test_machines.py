"""The nodes of these tests: separate memory, and a network with the delay and bandwidth set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from dptrain.comm.watchdog.watch import process_state
from tests.nodes.conftest import DELAY_US, MBIT
from tests.nodes.machines import Nodes
from tests.nodes.report_network import SIZE_BYTES


def test_ranks_share_memory_within_a_node_only(nodes: Nodes, mpi: str) -> None:
    nodes.run(1, "touch", "/dev/shm/marker")
    command, variables = nodes.mpirun(
        [2, 1], sys.executable, "-m", "tests.nodes.report_network", mpi=mpi
    )
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ranks = {found["rank"]: found for found in lines}
    assert [ranks[rank]["host"] for rank in range(3)] == ["n1", "n1", "n2"]
    assert [ranks[rank]["shm"] for rank in range(3)] == [[], [], ["marker"]]
    cores = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert [ranks[rank]["local"][:2] for rank in range(3)] == [[0, 2], [1, 2], [0, 1]]
    assert all(1 <= ranks[rank]["local"][2] <= cores for rank in range(3))
    # These are lower bounds, which a busy machine cannot break.
    assert ranks[0]["received_bytes"] >= SIZE_BYTES
    assert ranks[2]["received_bytes"] >= SIZE_BYTES
    assert ranks[0]["round_trip_s"][1] >= 2e-6 * DELAY_US
    assert ranks[0]["round_trip_s"][2] >= 2 * SIZE_BYTES * 8 / (1e6 * MBIT)


def test_a_node_ends_with_the_process_that_started_it(nodes: Nodes) -> None:
    script = (
        "import os, signal\n"
        "from tests.nodes.machines import Nodes\n"
        "with Nodes(2) as nodes:\n"
        "    print(*nodes.pids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    _, variables = nodes.mpirun([1, 1])
    done = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True
    )
    pids = done.stdout.split()
    assert len(pids) == 2, done.stderr
    end = time.monotonic() + 60
    while any(process_state(int(pid)) not in ("", "Z") for pid in pids):
        assert time.monotonic() < end, "the nodes still run"
        time.sleep(0.01)
