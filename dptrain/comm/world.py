"""The ranks of a run: who they are, and what they do together apart from summing gradients.

Every wait has an end: nonblocking MPI calls are polled against a deadline, so that a rank that
hangs elsewhere ends the job with a message instead of leaving it waiting for ever.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.job import Job, new_token
from dptrain.comm.launcher import refuse_single, refuse_stranger, shorten_addresses
from dptrain.errors import UserError

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE = 1 << 30
"""Largest element count in one MPI call; MPI before version 4 counts in 32 bits."""

_PATIENCE_S = 0.02
_NAP_S = 50e-6
_QUIET_NAP_S = 1e-3


class AgreedError(UserError):
    """A user's mistake that all ranks raise: rank 0 prints it, and all ranks exit with code 2."""

    @classmethod
    def of(cls, errors: Sequence[str | None]) -> AgreedError:
        """Return the error of the lowest rank, with its number unless all errors are equal."""
        rank, message = next((r, text) for r, text in enumerate(errors) if text is not None)
        same = all(other == message for other in errors)
        return cls(message if same else f"rank {rank}: {message}")


def pieces(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Views of a flat array, none longer than `PIECE`."""
    return (array[start : start + PIECE] for start in range(0, array.size, PIECE))


class World:
    """The ranks of a run; made by `World.connect` or, for one process without MPI, `World.single`.

    Every method named without a rank is collective: all ranks call it, in the same order.

    Attributes:
        comm: the MPI communicator; None for a single process without MPI.
        rank, size: of this process among all.
        local_rank, local_size: of this process among those on its node.
        local_cores: cores that the ranks of this node may use together.
        timeout: longest wait for other ranks, in seconds.
    """

    def __init__(
        self, comm: MPI.Intracomm | None, node: MPI.Intracomm | None, timeout: float
    ) -> None:
        self.comm, self._node, self.timeout = comm, node, timeout
        self.rank = comm.Get_rank() if comm else 0
        self.size = comm.Get_size() if comm else 1
        self.local_rank = node.Get_rank() if node else 0
        self.local_size = node.Get_size() if node else 1
        together: set[int] = set().union(*self._gather_json(node, sorted(_own_cores())))
        self.local_cores = len(together)

    @classmethod
    def single(cls) -> World:
        """One process, no MPI; every method works."""
        return cls(None, None, 300.0)

    @classmethod
    def connect(
        cls,
        *,
        timeout: float = 300.0,
        error: UserError | None = None,
        command: str | None = None,
    ) -> World:
        """Start MPI, join the ranks of COMM_WORLD, and check that all run the same program.

        Args:
            timeout: longest wait for other ranks, in seconds, in this and every later call.
            error: the mistake that this rank has found so far; see `agreement.agree`.
            command: the command of `dptrain` that this rank runs.

        Raises:
            UserError: no MPI library; a single rank although the launcher started several; an
                error of any rank; ranks that run different versions or commands.
        """
        from dptrain.comm.agreement import agree

        world = cls.join(timeout)
        agree(world, {} if command is None else {"command": command}, error)
        return world

    @classmethod
    def join(cls, timeout: float) -> World:
        """`connect` without the agreement that nothing is wrong."""
        # Starting MPI holds the interpreter's lock, and waits for ranks that may never come.
        faulthandler.dump_traceback_later(timeout, exit=True)
        try:
            mpi = _start_mpi()
            comm = mpi.COMM_WORLD
            node = comm.Split_type(mpi.COMM_TYPE_SHARED)
            world = cls(comm, node, timeout)
            if world.size > 1:
                world._become_job(mpi.Get_processor_name())
        finally:
            faulthandler.cancel_dump_traceback_later()
        return world

    def _become_job(self, host: str) -> None:
        """Prepare for failing: a token for all, a watcher for each node."""
        first_ranks = self.all_gather_json(self.first_on_node())
        neighbours = self._gather_json(self._node, self.rank)
        node = sum(first_ranks[: neighbours[0]])
        job = Job(self.rank, self.size, node, self.broadcast_json(new_token()))
        job.remember()
        if self.first_on_node():
            job.watch(neighbours, host)
        self.barrier()
        job.report_to_watcher()
        self.barrier()

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def first_on_node(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    # Waiting.

    def wait(self, request: MPI.Request, what: str) -> None:
        """Wait for a request, letting MPI progress.

        Raises:
            TimeoutError: it took longer than `timeout`; names `what`.
        """
        self._poll(request, what, _NAP_S)

    def _poll(self, request: MPI.Request, what: str, nap_s: float) -> None:
        # Summing 0.9 MB in one call: 2 ranks on 2 cores took 0.17 ms with a bare loop of tests,
        # 0.18 ms giving way between tests, 0.7 ms sleeping 50 µs; 4 ranks on 2 cores 27, 1.5 and
        # 2.5 ms. So give way; sleep only when it takes long anyway.
        begin = time.monotonic()
        patience = _PATIENCE_S if nap_s == _NAP_S else 0.0
        while not request.Test():
            waited = time.monotonic() - begin
            if waited < patience:
                _give_way()
            else:
                time.sleep(nap_s)
            if waited > self.timeout:
                raise TimeoutError(
                    f"rank {self.rank} of {self.size} waited {waited:.0f} s for {what}: "
                    "another rank hangs, was stopped or has left"
                )

    def barrier(self) -> None:
        """Wait until all ranks are here, leaving the cores to those that still work."""
        if self.comm is not None:
            self._poll(self.comm.Ibarrier(), "all ranks to arrive", _QUIET_NAP_S)

    def node_barrier(self) -> None:
        """`barrier` among the ranks of this node."""
        if self._node is not None:
            self._poll(self._node.Ibarrier(), "the ranks of this node to arrive", _QUIET_NAP_S)

    # Arrays.

    def broadcast(self, array: NDArray[Any], root: int = 0) -> None:
        """Overwrite `array` with the one of rank `root`; same shape and dtype everywhere."""
        if self.comm is None:
            return
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for piece in pieces(flat):
            self.wait(self.comm.Ibcast(piece, root), f"data of rank {root}")
        if not np.shares_memory(flat, array):
            array[...] = flat.view(array.dtype).reshape(array.shape)

    def all_reduce(self, array: NDArray[Any]) -> None:
        """Overwrite `array` with its sum over the ranks: y = Σ_r x_r, element by element."""
        if self.comm is None:
            return
        flat = np.ascontiguousarray(array).reshape(-1)
        for piece in pieces(flat):
            self.wait(self.comm.Iallreduce(_in_place(), piece), "a sum over the ranks")
        if not np.shares_memory(flat, array):
            array[...] = flat.reshape(array.shape)

    def check_equal(self, array: NDArray[Any], what: str) -> None:
        """Make sure that all ranks hold the same bits.

        Raises:
            RuntimeError: they do not; names the ranks that differ from rank 0. On every rank.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digests = self.all_gather_json(hashlib.blake2b(data.data, digest_size=16).hexdigest())
        different = [str(rank) for rank, d in enumerate(digests) if d != digests[0]]
        if different:
            raise RuntimeError(f"{what} of rank {', '.join(different)} differ from rank 0's")

    def gather(self, array: NDArray[Any]) -> list[NDArray[Any]] | None:
        """The arrays of all ranks, in order, on rank 0; None elsewhere.

        Args:
            array: of the same dtype everywhere; its first dimension may differ.
        """
        gathered = self._gather_bytes(array.tobytes())
        if gathered is None:
            return None
        return [np.frombuffer(data, array.dtype).reshape(-1, *array.shape[1:]) for data in gathered]

    def _gather_bytes(self, data: bytes) -> list[bytes] | None:
        """The bytes of all ranks, in order, on rank 0; None elsewhere."""
        if self.comm is None:
            return [data]
        own = np.frombuffer(data, np.uint8)
        lengths = np.zeros(self.size if self.is_rank_zero else 0, np.int64)
        self.wait(self.comm.Igather(np.array([own.size], np.int64), lengths), "values of all ranks")
        received = np.zeros(int(lengths.sum()), np.uint8)
        counts = lengths.tolist() if self.is_rank_zero else None
        self.wait(self.comm.Igatherv(own, (received, counts)), "values of all ranks")
        return _cut(received, lengths) if self.is_rank_zero else None

    # Values that JSON can hold.

    def broadcast_json(self, value: Any) -> Any:
        """The value that rank 0 gives; what other ranks give is ignored."""
        data = _encode(value) if self.is_rank_zero else b""
        length = np.array([len(data)], np.int64)
        self.broadcast(length)
        buffer = np.zeros(int(length[0]), np.uint8)
        if self.is_rank_zero:
            buffer[:] = np.frombuffer(data, np.uint8)
        self.broadcast(buffer)
        return json.loads(buffer.tobytes())

    def all_gather_json(self, value: Any) -> list[Any]:
        """The values of all ranks, in order, on every rank."""
        return self._gather_json(self.comm, value)

    def gather_json(self, value: Any) -> list[Any] | None:
        """The values of all ranks, in order, on rank 0; None elsewhere."""
        gathered = self._gather_bytes(_encode(value))
        return None if gathered is None else [json.loads(data) for data in gathered]

    def _gather_json(self, comm: MPI.Intracomm | None, value: Any) -> list[Any]:
        if comm is None:
            return [json.loads(_encode(value))]
        data = np.frombuffer(_encode(value), np.uint8)
        lengths = np.zeros(comm.Get_size(), np.int64)
        self.wait(comm.Iallgather(np.array([data.size], np.int64), lengths), "values of all ranks")
        received = np.zeros(int(lengths.sum()), np.uint8)
        request = comm.Iallgatherv(data, (received, lengths.tolist()))
        self.wait(request, "values of all ranks")
        return [json.loads(data) for data in _cut(received, lengths)]

    # Failing.

    def agree(self, error: UserError | None) -> None:
        """Raise the same error on every rank if any rank passes one.

        Raises:
            AgreedError: the error of the lowest rank that passes one, with that rank's number
                unless all ranks pass the same error.
        """
        errors = self.all_gather_json(None if error is None else str(error))
        if any(message is not None for message in errors):
            raise AgreedError.of(errors)


def _start_mpi() -> Any:
    """The `mpi4py.MPI` module, with MPI started."""
    with warnings.catch_warnings():
        # What mpi4py suspects of the launcher is said better, and once, by `refuse_single`.
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")
        try:
            import mpi4py

            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"mpi4py finds no MPI library ({reason}); pip install 'dptrain[mpi]' brings one, "
                "on a cluster load the module of the site's MPI"
            ) from None
        if not MPI.Is_initialized():
            refuse_stranger(_library(MPI))
            shorten_addresses(MPI.Get_library_version())
            MPI.Init_thread(MPI.THREAD_FUNNELED)
    refuse_single(MPI.COMM_WORLD.Get_size(), _library(MPI))
    return MPI


def _library(mpi: Any) -> str:
    """``MPICH 5.0.2``."""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE


def _own_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _give_way() -> None:
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _cut(received: NDArray[np.uint8], lengths: NDArray[np.int64]) -> list[bytes]:
    ends = np.cumsum(lengths)
    return [received[e - n : e].tobytes() for e, n in zip(ends, lengths, strict=True)]
