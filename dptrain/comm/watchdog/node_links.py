"""Connections between the watchdogs of a job's nodes, so that one failure ends all of them.

Launchers do not always end the ranks of other nodes. MPI libraries and launchers also end ranks
because a rank of another node has died, and those must not be named as the cause. So the watchdog
of the first node listens at a TCP port, and the watchdogs of the other nodes connect to it. They
exchange these lines, which the first node forwards:

- the token of the job, from a node that connects; the first node replies ``ok``;
- ``named``: a rank has printed the cause of a failure;
- ``died COUNT RANK …``: these ranks of a node of COUNT ranks were killed or crashed; the ranks of
  all nodes must end. The node prints the cause when all others have sent this line, too, or
  ``agreed COUNT RANK``, where RANK is the first of its ranks: none of theirs died before;
- ``late``: ranks of a node have waited too long, and none of them is the cause;
- ``idle …``, which is not forwarded, and ``left …``: see `idle_nodes`.

If the nodes cannot connect, for example because of a firewall, each node names its own first rank.
`watch.py` imports this file without the rest of the package.
"""

from __future__ import annotations

import hmac
import re
import select
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

_CONNECT_S = 0.5
"""Time limit for a TCP connection; a firewall may drop the packets to an address."""

_REPLY_S = 5.0
"""Time limit for the reply of the first node, on a busy machine."""

_MAX_LINE = 256


def local_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine at which other machines may reach it."""
    try:
        routes = Path("/proc/net/fib_trie").read_text()
    except OSError:
        return []
    found = re.findall(r"\|-- ([\d.]+)\n\s*/32 host LOCAL", routes)
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


class NodeLinks:
    """The connections of one node.

    Args:
        poll: receives the descriptors of the sockets; the caller passes their events to `handle`.
        receive: called with each line from another node.
        token: the secret of the job.

    Attributes:
        statuses: the last line ``idle …`` of each node; that of a node that has gone remains.
    """

    def __init__(self, poll: select.epoll, receive: Callable[[str], None], token: str) -> None:
        self._poll, self._receive, self._token = poll, receive, token
        self._listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}
        self._trusted: set[int] = set()
        self.statuses: dict[object, str] = {}

    @property
    def is_first_node(self) -> bool:
        """True if other nodes connect to this one."""
        return self._listener is not None

    def listen(self) -> int:
        """Accept connections of other nodes; return the TCP port."""
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.EPOLLIN)
        return int(self._listener.getsockname()[1])

    def connect(self, addresses: list[str], port: int) -> bool:
        """Connect to the first node; return whether it replied at one of its addresses."""
        for address in addresses:
            with suppress(OSError), ExitStack() as stack:
                connection = socket.create_connection((address, port), timeout=_CONNECT_S)
                stack.callback(connection.close)
                connection.settimeout(_REPLY_S)
                connection.sendall(f"{self._token}\n".encode())
                if connection.recv(3) == b"ok\n":
                    stack.pop_all()
                    self._add(connection)
                    self._trusted.add(connection.fileno())
                    return True
        return False

    def send(self, line: str, *, source: int | None = None) -> None:
        """Send a line to every connected node but the one at the descriptor `source`."""
        for file in self._trusted - {source}:
            with suppress(OSError):  # The other watchdog has gone.
                self._connections[file].sendall(f"{line}\n".encode())

    def handle(self, file: int) -> None:
        """Accept or read what has arrived at the socket with this descriptor."""
        if self._listener is not None and file == self._listener.fileno():
            with suppress(OSError):
                while True:
                    self._add(self._listener.accept()[0])
        elif file in self._connections:
            self._read(file)

    def close(self) -> None:
        """Close all connections."""
        for connection in (*self._connections.values(), self._listener):
            if connection is not None:
                connection.close()

    def _add(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.EPOLLIN)

    def _read(self, file: int) -> None:
        connection = self._connections[file]
        data = b""
        with suppress(OSError):
            # Lines are shorter than a packet and rare, so each arrives whole.
            data = connection.recv(_MAX_LINE)
        if not data:
            return self._remove(file)
        for line in data.decode(errors="replace").splitlines():
            if file in self._trusted and line.startswith("idle "):
                self.statuses[connection] = line
            elif file in self._trusted:
                self.send(line, source=file)
                self._receive(line)
            elif hmac.compare_digest(line.encode(), self._token.encode()):
                self._trusted.add(file)
                with suppress(OSError):
                    connection.sendall(b"ok\n")
            else:
                return self._remove(file)
        return None

    def _remove(self, file: int) -> None:
        connection = self._connections.pop(file)
        self._trusted.discard(file)
        self._poll.unregister(connection)
        connection.close()
