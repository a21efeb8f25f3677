"""Memory that the ranks of a node share.

The memory is an anonymous file in memory (memfd_create(2)), which the first rank of the node
creates and the others open through /proc. It has no name in any file system: nothing is left in
/dev/shm however a job ends, and the size of /dev/shm, often 64 MB in containers, does not limit it.
All pages are reserved before they are used (fallocate), so that too little memory is an error
message and not a SIGBUS. A rank reserves the pages that it will use most, so that on a machine with
several NUMA nodes the kernel takes them from the rank's own (not tested on such a machine).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.memory import format_bytes


def map_segment(world: World, size_bytes: int, own: Sequence[tuple[int, int]]) -> mmap.mmap:
    """Return memory that all ranks of this node share; it consists of zeros.

    Args:
        world: the ranks; every rank calls this function.
        size_bytes: size of the memory, the same on all ranks of a node.
        own: (start, stop) in bytes of the ranges that this rank reserves.

    Raises:
        AgreedError: memory cannot be shared on some node; on every rank.
    """
    descriptor, mapped, error = -1, None, None
    try:
        descriptor = _create(size_bytes) if world.first_on_node() else -1
    except UserError as caught:
        error = caught
    status = os.fstat(descriptor) if descriptor >= 0 else None
    identity = [os.getpid(), descriptor, *([status.st_dev, status.st_ino] if status else [])]
    process, number, *file = world.node_all_gather_json(identity)[0]
    try:
        if file:
            if descriptor < 0:
                descriptor = _open(process, number, file)
            mapped = _reserve_and_map(descriptor, size_bytes, own)
    except UserError as caught:
        error = caught
    try:
        world.agree(error)  # The first rank keeps the file open until all have opened it.
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    assert mapped is not None
    return mapped


def _create(size_bytes: int) -> int:
    """Return the descriptor of a new file in memory."""
    if not hasattr(os, "memfd_create"):
        raise UserError("this operating system has no memory that ranks can share")
    descriptor = -1
    try:
        descriptor = os.memfd_create("dptrain", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise _unavailable(size_bytes, error) from None
    return descriptor


def _open(process: int, descriptor: int, file: list[int]) -> int:
    """Return a descriptor of the file that another process of this node has open."""
    found = -1
    with contextlib.suppress(OSError):
        found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(found)
        if [status.st_dev, status.st_ino] == file:
            return found
        os.close(found)
    raise UserError(
        f"the memory of process {process} cannot be opened through /proc, for example because the "
        "ranks run in different containers"
    )


def _reserve_and_map(descriptor: int, size_bytes: int, own: Sequence[tuple[int, int]]) -> mmap.mmap:
    try:
        for start, stop in own:
            if stop > start:
                os.posix_fallocate(descriptor, start, stop - start)
        return mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        raise _unavailable(size_bytes, error) from None


def _unavailable(size_bytes: int, error: OSError) -> UserError:
    return UserError(
        f"{format_bytes(size_bytes)} of memory cannot be shared by the ranks of a node "
        f"({error.strerror})"
    )
