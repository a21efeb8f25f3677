"""Watchdogs of several nodes pass lines to each other, but not to or from strangers."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from dptrain.comm.watchdog.node_links import NodeLinks, local_addresses


class Node:
    """One end, with the lines that it has received."""

    def __init__(self, token: str) -> None:
        self.poll = select.epoll()
        self.lines: list[str] = []
        self.links = NodeLinks(self.poll, self.lines.append, token)

    def serve(self, until: Callable[[], bool]) -> None:
        """Handle events until a condition holds."""
        for _ in range(1000):
            if until():
                return
            for file, _ in self.poll.poll(0.01):
                self.links.handle(file)
        raise AssertionError("the condition did not come true")


@pytest.fixture
def create() -> Iterator[Callable[[], Node]]:
    """Create nodes, which are closed at the end."""
    nodes: list[Node] = []

    def create(token: str = "secret") -> Node:
        nodes.append(Node(token))
        return nodes[-1]

    yield create
    for node in nodes:
        node.links.close()
        node.poll.close()


def connect(first: Node, port: int, other: Node) -> bool:
    """Connect another node to the first; return whether it was accepted."""
    results: list[bool] = []
    thread = threading.Thread(
        target=lambda: results.append(other.links.connect(["127.0.0.1"], port))
    )
    thread.start()
    first.serve(lambda: bool(results))
    thread.join()
    return results[0]


def test_lines_reach_all_other_nodes_once(create: Callable[..., Node]) -> None:
    first, second, third = create(), create(), create()
    port = first.links.listen()
    assert connect(first, port, second)
    assert connect(first, port, third)
    second.links.send("died")
    first.serve(lambda: first.lines == ["died"])
    third.serve(lambda: third.lines == ["died"])
    first.links.send("named")
    second.serve(lambda: second.lines == ["named"])
    third.serve(lambda: third.lines == ["died", "named"])


def test_strangers_are_refused(create: Callable[..., Node]) -> None:
    first, friend = create(), create()
    port = first.links.listen()
    assert not connect(first, port, create("guess"))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"died\n")
        assert connect(first, port, friend)
        friend.links.send("named")
        first.serve(lambda: bool(first.lines))
    assert first.lines == ["named"]


def test_a_node_that_has_gone_is_forgotten(create: Callable[..., Node]) -> None:
    first, other = create(), create()
    assert connect(first, first.links.listen(), other)
    other.links.close()
    first.serve(lambda: not first.links._connections)
    first.links.send("died")


def test_no_reply_is_no_connection(create: Callable[..., Node]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert not create().links.connect(["127.0.0.1"], port)


def test_addresses_of_this_machine_leave_out_the_loopback() -> None:
    addresses = local_addresses()
    assert not any(address.startswith("127.") for address in addresses)
    for address in addresses:
        socket.create_server((address, 0)).close()  # Raises OSError for a foreign address.
