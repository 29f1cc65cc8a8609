"""The short way for a stream's later events: past the ASGI layers of Serve and uvicorn, whose share of a token's CPU is
about that of the write itself. Knows these two from inside, and nothing of what is sent.

The first message (status and headers) and the last (the end) always take the official way, so that the layers learn
what they must know. Behind any other server there is no short way, and the official one does the same.
"""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from .body import Receive

Write = Callable[[bytes], bool]
"""Writes a part of the body, whole and at once; False when it is the official way's turn."""


def direct_writer(receive: Receive) -> Write | None:
    """The short way to the client whose ASGI `receive` this is; None where it is not known."""
    of_server = getattr(receive, "_receive", receive)  # Serve's direct ingress keeps the server's inside its own
    cycle = getattr(of_server, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None
    flow, write = cycle.flow, cycle.transport.write

    def write_part(part: bytes) -> bool:
        if flow.write_paused or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if not cycle.disconnected:  # else its request is about to be cancelled
            write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    return write_part
