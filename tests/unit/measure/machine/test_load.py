"""CPU time of other programs: that of own processes is not part of it."""

from __future__ import annotations

import subprocess
import sys

from dptrain.measure.machine.load import Clock

CHILD_S = 0.3
"""CPU time of the child."""
CHILD = f"""
import time
while time.process_time() < {CHILD_S}:
    pass
print("done", flush=True)
input()
"""


def test_children_that_have_not_ended_count_as_own() -> None:
    before = Clock.now()
    assert before is not None
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        during = Clock.now()
        child.communicate("\n")
    after = Clock.now()
    assert during is not None
    assert after is not None
    # The clock of the system advances in steps of 10 ms, for user and system time.
    assert during.ours_s - before.ours_s > 0.9 * CHILD_S
    # It counts once when it has ended.
    assert abs(after.ours_s - during.ours_s) < 0.9 * CHILD_S
