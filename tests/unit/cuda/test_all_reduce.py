"""The timeout of the all-reduce through peer memory, with this process as the other rank."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.emulator.emulator import Emulator
from tests.unit.cuda.launching import ints

EMPTY = 0xFFFFFFFF
COUNT = 12
INTERVAL_S = 0.15


@pytest.mark.more
@pytest.mark.parametrize(("sent", "timeout_s"), [(COUNT, 1.5), (2, 1.0)])
def test_the_timeout_counts_from_the_last_progress(sent: int, timeout_s: float) -> None:
    """A slow sender is no timeout; a sender that stops is one.

    One thread receives all packets. The first case takes 1.8 s in total, longer than its timeout,
    but a packet takes about 0.15 s. On a busy machine it may take longer.
    """
    device = Emulator()
    x = device.zeros((COUNT, 4), np.uint32)
    inboxes = [np.full((2 * COUNT, 4), EMPTY, np.uint32) for _ in range(2)]
    reached = [device.device_view(inbox) for inbox in inboxes]
    addresses = device.zeros((2,), np.uint64)
    device.upload(addresses, np.array([device.address(inbox) for inbox in reached], np.uint64))
    call_counts, timed_out = (device.zeros((1,), np.uint32) for _ in range(2))
    loss_sums = device.zeros((3,), np.float32)
    values = np.arange(4.0 * COUNT, dtype=np.float32).reshape(COUNT, 4)

    def send() -> None:
        for i in range(sent):
            time.sleep(INTERVAL_S)
            inboxes[1][i] = values[i].view(np.uint32)

    function = device.function("all_reduce.cu", "one_shot_all_reduce", RANKS=2)
    sender = threading.Thread(target=send)
    sender.start()
    # Rank 0 broadcasts to rank 1.
    function(
        (1, 1, 1), (1, 1, 1),
        [x, *ints(COUNT, 1, 2), addresses, np.int64(0), np.int32(1), call_counts, timed_out,
         loss_sums, np.uint64(1e9 * timeout_s)],
    )  # fmt: skip
    sender.join()
    complete = sent == COUNT
    assert bool(device.download(timed_out)[0]) == (not complete)
    assert np.isnan(device.download(loss_sums)).all() == (not complete)
    received = device.download(x).view(np.float32)
    np.testing.assert_array_equal(received[:sent], values[:sent])
