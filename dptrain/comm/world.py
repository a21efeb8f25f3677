"""The ranks of a run, and their collective calls apart from the sum of gradients.

Every wait has a limit: nonblocking MPI calls are polled until a deadline, so that a rank that hangs
ends the job with a message.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.deadline import MAX_TIMEOUT_S, RankTimeoutError
from dptrain.comm.job import (
    Job,
    current_job,
    raise_on_interrupt,
    remove_left_folders,
    start_job,
)
from dptrain.comm.launching.launcher import has_launcher
from dptrain.comm.launching.start import report_files, start_mpi
from dptrain.comm.node.activity import Activity, Wait, late_error
from dptrain.comm.watchdog.node_links import local_addresses
from dptrain.comm.watchdog.watch import process_state
from dptrain.errors import UserError
from dptrain.machine import available_cores, own_cores, physical_cores

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE = 1 << 30
"""Largest element count in one MPI call; MPI before version 4 counts in 32 bits."""

_PATIENCE_S = 0.02
"""Time after which a waiting rank sleeps between polls."""
_NAP_S = 50e-6
"""Sleep between two polls."""
_QUIET_NAP_S = 1e-3
"""The same in waits that may be long, such as that for the end of a job."""


class AgreedError(UserError):
    """A user's mistake that all ranks raise: rank 0 prints it, and all ranks exit with its code."""

    __module__ = "dptrain"

    exit_code = 2

    @classmethod
    def of(cls, errors: Sequence[str | None]) -> AgreedError:
        """Return the error of the lowest rank, with its number unless all errors are equal."""
        rank, message = next((r, text) for r, text in enumerate(errors) if text is not None)
        same = all(other == message for other in errors)
        return cls(message if same else f"rank {rank}: {message}")


class DivergedError(AgreedError):
    """The loss is no longer finite."""

    __module__ = "dptrain"

    exit_code = 3


class CorruptedError(AgreedError):
    """Replicas differ that must hold the same bits."""

    __module__ = "dptrain"

    exit_code = 1


def pieces(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Views of a flat array, none longer than `PIECE`."""
    return (array[start : start + PIECE] for start in range(0, array.size, PIECE))


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job.

    Attributes:
        ranks: the ranks of each node, ordered by the first of them.
        own: the ranks of this node.
        peers: communicator of the ranks with the same local rank, one on each node, ordered like
            the nodes; None if there is one node, or some node has no such rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    own: tuple[int, ...]
    peers: MPI.Intracomm | None

    @property
    def smallest(self) -> int:
        """The number of ranks of the node that has the fewest."""
        return min(map(len, self.ranks))

    def are_consecutive(self) -> bool:
        """Return whether each node has consecutive ranks."""
        return [rank for node in self.ranks for rank in node] == list(
            range(sum(map(len, self.ranks)))
        )


class World:
    """The ranks of a run, from `World.connect` or, for one process without MPI, `World.single`.

    Methods that communicate are collective: all ranks call them in the same order.

    Attributes:
        comm: the MPI communicator; None for a single process without MPI.
        rank, size: of this process among all.
        local_rank, local_size: of this process among those on its node.
        local_cores: number of cores that the ranks of this node may use.
        is_crowded: whether compute threads of this node share cores. A rank that waits then leaves
            its core to those that compute.
        timeout: longest wait for other ranks, in seconds.
        activity: what the ranks of this node do at present.
    """

    def __init__(
        self, comm: MPI.Intracomm | None, node: MPI.Intracomm | None, timeout: float
    ) -> None:
        self.comm, self._node = comm, node
        self.timeout = min(timeout, MAX_TIMEOUT_S)
        self.rank = comm.Get_rank() if comm else 0
        self.size = comm.Get_size() if comm else 1
        self.local_rank = node.Get_rank() if node else 0
        self.local_size = node.Get_size() if node else 1
        self._processes: list[list[Any]] = []  # Host and process number of each rank.
        self._nodes: Nodes | None = None
        # A world of one process waits for no other, also if the process is a rank of a job.
        job = None if comm is None else current_job()
        self.activity = Activity(self.rank, self.size) if job is None else job.activity
        self.is_crowded = True
        cores: set[int] = set().union(*self._gather_json(node, sorted(own_cores())))
        self.local_cores = len(physical_cores(cores))
        self.count_threads(1)

    @classmethod
    def single(cls) -> World:
        """Return the world of one process without MPI; every method works."""
        return cls(None, None, 300.0)

    @classmethod
    def of_launch(cls, *, timeout: float = 300.0, command: str | None = None) -> World:
        """Return the ranks that a launcher started; one process without a launcher needs no MPI.

        MPI takes 0.5 s to start on a machine with several networks and a GPU (MPICH 5, H100).

        Args:
            timeout, command: see `connect`.
        """
        if has_launcher():
            return cls.connect(timeout=timeout, command=command)
        remove_left_folders()
        return cls.single()

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
        """Start MPI and join the ranks of COMM_WORLD, without an agreement."""
        mpi = start_mpi(min(timeout, MAX_TIMEOUT_S))
        raise_on_interrupt()
        comm = mpi.COMM_WORLD
        world = cls(comm, _ranks_of_node(), timeout)
        if world.size > 1:
            world._become_job(mpi.Get_processor_name())
        return world

    def _become_job(self, host: str) -> None:
        """Prepare for failures: share a folder within each node, and note where each rank runs."""
        job = start_job(self.rank, self.size)
        first_ranks = self.all_gather_json(self.first_on_node())
        neighbours = self._gather_json(self._node, [self.rank, str(job.folder)])
        job.node = sum(first_ranks[: neighbours[0][0]])
        job.meet(neighbours[0][1])
        self.activity = job.activity
        self._processes = self.all_gather_json([host, os.getpid()])
        report_files(job)
        if sum(first_ranks) > 1:
            self._connect_nodes(job)

    def _connect_nodes(self, job: Job) -> None:
        """Connect the watchdogs of all nodes, so that a failure on one of them is known to all."""
        offer = job.listen() if self.is_rank_zero else None
        offer, addresses = self.broadcast_json([offer, local_addresses()])
        if offer is not None and self.first_on_node() and not self.is_rank_zero:
            port, token = offer
            job.connect(port, token, addresses)

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def first_on_node(self) -> bool:
        """Return True on the first rank of each node."""
        return self.local_rank == 0

    def nodes(self) -> Nodes:
        """Return the nodes of the job; every rank makes the first call."""
        if self._nodes is None:
            members = self.all_gather_json(self._gather_json(self._node, self.rank))
            nodes = tuple(dict.fromkeys(tuple(ranks) for ranks in members))
            slices = min(map(len, nodes))
            has_slice = self.local_rank < slices
            comm: MPI.Intracomm | None = None
            if len(nodes) > 1:
                assert self.comm is not None
                self.barrier()  # It has a time limit, unlike the call that follows.
                color = self.local_rank if has_slice else slices
                comm = _ranks_of_color(color, nodes)
            self._nodes = Nodes(nodes, tuple(members[self.rank]), comm if has_slice else None)
        return self._nodes

    def node_cores(self) -> int:
        """Return how many cores the ranks of this node may use, limited by a container's quota."""
        mine = available_cores()
        # A launcher may bind each rank to its own cores, but all ranks share a quota.
        return mine if mine < len(physical_cores(own_cores())) else self.local_cores

    def count_threads(self, threads: int) -> None:
        """Set `is_crowded`.

        Args:
            threads: compute threads of each rank.
        """
        self.is_crowded = self.local_size * threads > self.node_cores()

    # Waiting.

    def wait(self, request: MPI.Request, what: str) -> None:
        """Wait for a request and let MPI progress.

        Raises:
            RankTimeoutError: the wait took longer than `timeout`; names `what`.
        """
        self._poll(request, what, _NAP_S)

    def _poll(
        self, request: MPI.Request, what: str, nap_s: float, timeout_s: float | None = None
    ) -> None:
        # On 2 cores, an all-reduce of 0.9 MB takes 0.17 ms with a loop of tests, 0.18 ms with a
        # yield between tests and 0.7 ms with sleeps of 50 µs for 2 ranks; 27, 1.5 and 2.5 ms for 4
        # ranks. If other programs compute on the same cores, a yield costs a rank its core for
        # milliseconds: 10 ms with yields, 0.5 ms without for 2 ranks.
        wait = Wait(self, what, timeout_s)
        patience = _PATIENCE_S if nap_s == _NAP_S else 0.0
        while not request.Test():
            if wait.waited_s > patience:
                time.sleep(nap_s)
            elif self.is_crowded:
                _yield_core()
            wait.check()
        wait.end()

    def timeout_error(self, what: str, waited_s: float) -> RankTimeoutError:
        """Return the error of a wait that took too long.

        Ranks of this node that are stopped (SIGSTOP), or that do not wait for other ranks, are
        named as the cause.

        Args:
            what: what this rank waited for, such as "a sum over the ranks".
            waited_s: how long it waited, in seconds.
        """
        stopped = self.stopped_error(what, waited_s)
        if stopped is not None:
            return stopped
        waited = f"waited {waited_s:.0f} s for {what}"
        host = self._processes[self.rank][0] if self._processes else ""
        others = self.activity.others()
        late = [each for each in others if each.is_working]
        if late:
            return late_error(late, host, self.rank, waited)
        left = [each.rank for each in others if each.has_left]
        if left:
            return self.left_error(what, left)
        return RankTimeoutError(f"{waited}: another rank hangs, is stopped or has left", self.rank)

    def stopped_error(self, what: str, waited_s: float) -> RankTimeoutError | None:
        """Return the error of a wait for a rank of this node that is stopped; None if none is."""
        host = self._processes[self.rank][0] if self._processes else ""
        for rank, (other, process) in enumerate(self._processes):
            if rank != self.rank and other == host and process_state(process) in ("T", "t"):
                return RankTimeoutError(
                    f"its process {process} on {host} is stopped (SIGSTOP?); rank {self.rank} "
                    f"waited {waited_s:.0f} s for {what}",
                    rank,
                    is_cause=True,
                )
        return None

    def left_error(self, what: str, left: Sequence[int]) -> RankTimeoutError:
        """Return the error of a wait for ranks whose program has ended.

        Args:
            what: what this rank waited for.
            left: those ranks.
        """
        return RankTimeoutError(
            f"its program ended, by sys.exit or at the end of the script, while rank {self.rank} "
            f"waited for {what}",
            left[0],
            is_cause=True,
        )

    def barrier(self) -> None:
        """Wait until all ranks call this, and leave the cores to ranks that still compute."""
        if self.comm is not None:
            self._poll(self.comm.Ibarrier(), "all ranks to arrive", _QUIET_NAP_S)

    def any_rank(self, flag: bool, timeout_s: float) -> bool:
        """Return whether any rank passes True; leaves the cores to ranks that still compute.

        Args:
            flag: of this rank.
            timeout_s: seconds after which this rank no longer waits for the others.
        """
        if self.comm is None:
            return flag
        found = np.array([flag], np.int64)
        request = self.comm.Iallreduce(_in_place(), found)
        self._poll(request, "all ranks to arrive", _QUIET_NAP_S, timeout_s)
        return bool(found[0])

    def node_barrier(self, timeout_s: float = 0.0) -> None:
        """`barrier` among the ranks of this node.

        Args:
            timeout_s: seconds after which the job ends, if they are more than `timeout`.
        """
        if self._node is not None:
            request, what = self._node.Ibarrier(), "the ranks of this node to arrive"
            self._poll(request, what, _QUIET_NAP_S, max(timeout_s, self.timeout))

    # Arrays.

    def broadcast(self, array: NDArray[Any], root: int = 0) -> None:
        """Overwrite `array` with that of rank `root`; shape and dtype are equal on all ranks."""
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

    def all_gather_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the arrays of all ranks, (ranks, …), on every rank.

        Args:
            array: of the same shape and dtype on all ranks.
        """
        found = np.empty((self.size, *array.shape), array.dtype)
        if self.comm is None:
            found[0] = array
        else:
            self.wait(
                self.comm.Iallgather(np.ascontiguousarray(array), found), "values of all ranks"
            )
        return found

    def check_equal(self, array: NDArray[Any], what: str) -> None:
        """Check that all ranks hold the same bits.

        Raises:
            RuntimeError: on every rank; names the ranks whose bits differ from rank 0's.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digests = self.all_gather_json(hashlib.blake2b(data.data, digest_size=16).hexdigest())
        different = [str(rank) for rank, d in enumerate(digests) if d != digests[0]]
        if different:
            raise RuntimeError(f"{what} of rank {', '.join(different)} differ from rank 0's")

    def gather(self, array: NDArray[Any]) -> list[NDArray[Any]] | None:
        """Return the arrays of all ranks, in order, on rank 0; None on the others.

        Args:
            array: of the same dtype on all ranks; its first dimension may differ.
        """
        gathered = self._gather_bytes(array.tobytes())
        if gathered is None:
            return None
        return [np.frombuffer(data, array.dtype).reshape(-1, *array.shape[1:]) for data in gathered]

    def _gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Return the bytes of all ranks, in order, on rank 0; None on the others."""
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
        """Return the value that rank 0 passes; those of other ranks are ignored."""
        data = _encode(value) if self.is_rank_zero else b""
        length = np.array([len(data)], np.int64)
        self.broadcast(length)
        buffer = np.zeros(int(length[0]), np.uint8)
        if self.is_rank_zero:
            buffer[:] = np.frombuffer(data, np.uint8)
        self.broadcast(buffer)
        return json.loads(buffer.tobytes())

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank."""
        return self._gather_json(self.comm, value)

    def node_all_gather_json(self, value: Any) -> list[Any]:
        """Return the values of the ranks of this node, in order, on every rank."""
        return self._gather_json(self._node, value)

    def gather_json(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in order, on rank 0; None on the others."""
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
        """Raise the same error on every rank if any rank passes an error.

        Raises:
            AgreedError: the error of the lowest rank that passes one, with that rank's number
                unless all ranks pass the same error.
        """
        errors = self.all_gather_json(None if error is None else str(error))
        if any(message is not None for message in errors):
            raise AgreedError.of(errors)


# An MPI has some thousands of communicators, and a process may join its ranks more often.


@cache
def _ranks_of_node() -> MPI.Intracomm:
    """Return the ranks of this node; every rank makes the first call."""
    from mpi4py import MPI

    return cast("MPI.Intracomm", MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED))


@cache
def _ranks_of_color(color: int, nodes: tuple[tuple[int, ...], ...]) -> MPI.Intracomm:
    """Return the ranks with a color, for each division of the ranks into nodes."""
    from mpi4py import MPI

    return cast("MPI.Intracomm", MPI.COMM_WORLD.Split(color, MPI.COMM_WORLD.Get_rank()))


def _in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE


def _yield_core() -> None:
    """Let another thread run on this core."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _cut(received: NDArray[np.uint8], lengths: NDArray[np.int64]) -> list[bytes]:
    ends = np.cumsum(lengths)
    return [received[e - n : e].tobytes() for e, n in zip(ends, lengths, strict=True)]
