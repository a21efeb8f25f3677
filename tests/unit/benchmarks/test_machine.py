"""What the benchmark sets on the machine, and what it says of it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from benchmarks.machine import about

FAULTS = """
import ctypes, resource
from benchmarks.machine import keep_freed_memory
assert keep_freed_memory()
libc, size = ctypes.CDLL(None), 64 * 2**20
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(block, 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt(3)")
def test_freed_memory_is_used_again_without_asking_the_system() -> None:
    # In a process of its own, for the setting cannot be taken back.
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = map(int, done.stdout.split())
    # 64 MiB are 32 huge pages or 16384 small ones.
    assert first >= 32
    assert second < first / 4


def test_the_machine_is_described_without_names_of_hosts_and_folders() -> None:
    found = about(threads=1)
    assert found["vectors"] in ("128 bits", "256 bits", "512 bits")
    assert found["threads"] == 1
    assert platform.node() not in str(found).split()
    assert sys.prefix not in str(found)
