"""HTTP Reading: takes requests off a stream, bounded in bytes and in time.

Floor: services. Reads: a stream. Writes: nothing.
"""

import trio

from celery5.protocol.http import HEAD_END, MAX_HEAD_SIZE, BadRequest


async def read_head(stream: trio.abc.ReceiveStream, *, timeout: float) -> tuple[bytes, bytes]:
    """The head of a request, with its empty line, and what has come after it. `within`: seconds. Raises BadRequest when
    it is too large, or ends before it is whole, or takes too long."""
    head = bytearray()
    with trio.move_on_after(timeout):
        while HEAD_END not in head:
            if len(head) >= MAX_HEAD_SIZE:
                raise BadRequest(431, f"the head of a request has at most {MAX_HEAD_SIZE} bytes")
            more = await stream.receive_some(MAX_HEAD_SIZE - len(head))
            if not more:
                raise BadRequest(400, "the request is not whole")
            head += more
        found, end, rest = bytes(head).partition(HEAD_END)
        return found + end, rest
    raise BadRequest(408, "the request took too long")


async def read_body(stream: trio.abc.ReceiveStream, received: bytes, length: int, *, timeout: float) -> bytes:
    """The body of `length` bytes, of which `begun` have come. Raises BadRequest."""
    body = bytearray(received[:length])
    with trio.move_on_after(timeout):
        while len(body) < length:
            more = await stream.receive_some(length - len(body))
            if not more:
                raise BadRequest(400, "the request is not whole")
            body += more
        return bytes(body)
    raise BadRequest(408, "the request took too long")


async def drain_request(stream: trio.abc.ReceiveStream) -> None:
    """Take what the other side still sends, for a moment: closing over it would take our response from them."""
    with trio.move_on_after(0.5):
        for _ in range(16):
            if not await stream.receive_some(MAX_HEAD_SIZE):
                return
