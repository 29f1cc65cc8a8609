"""A link between two ports: up, cut, silent, slow, and whole again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from manta.bench.link_proxy import Link, Links


@contextlib.contextmanager
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while data := connection.recv(65536):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.fixture
def link() -> Iterator[tuple[Links, Link]]:
    links = Links()
    one = links.open()
    with echo() as port:
        one.target = ("127.0.0.1", port)
        yield links, one
        links.close()


def connect(link: Link) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", link.port), timeout=5)
    connection.settimeout(5)
    return connection


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    answer = b""
    while len(answer) < len(data):
        part = connection.recv(65536)
        if not part:
            break
        answer += part
    return answer


def test_it_passes_everything_on_and_counts_it(link: tuple[Links, Link]) -> None:
    links, one = link
    with connect(one) as connection:
        assert ask(connection, b"x" * 200_000) == b"x" * 200_000
        assert links.num_bytes == 400_000
        assert links.num_connections == 1


def test_a_cut_breaks_connections_and_lets_none_be_made(link: tuple[Links, Link]) -> None:
    links, one = link
    with connect(one) as connection:
        assert ask(connection, b"hello") == b"hello"
        links.cut()
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
        with connect(one) as refused, contextlib.suppress(ConnectionError):
            assert refused.recv(1) == b""
        links.heal()
        with connect(one) as again:
            assert ask(again, b"hello") == b"hello"


def test_silence_holds_back_what_arrives_after_it(link: tuple[Links, Link]) -> None:
    links, one = link
    with connect(one) as connection:
        assert ask(connection, b"hello") == b"hello"
        links.silence()
        connection.sendall(b"late")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(4)
        connection.settimeout(5)
        links.heal()
        assert connection.recv(4) == b"late"


def test_a_slow_link_takes_its_time(link: tuple[Links, Link]) -> None:
    links, one = link
    links.slow(bytes_s=1e9, latency_s=0.05)
    with connect(one) as connection:
        start_s = time.monotonic()
        assert ask(connection, b"hello") == b"hello"
        assert time.monotonic() - start_s >= 0.1  # there and back
    links.heal()
