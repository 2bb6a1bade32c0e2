"""The dashboard behind its own server, on a real socket, and a client that writes requests byte by byte."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import trio

from celery5 import App
from celery5.processes.dashboard import DashboardOptions, open_socket, run

LIMIT = 30.0
"""Seconds that anything here may take."""


class Answer(NamedTuple):
    """One answer: its status, its header as lines in lower case, and its body."""

    status: int
    head: str
    body: str

    def get_cookie(self, name: str = "celery5_") -> str:
        """A cookie that it sets, as `name=value`."""
        found = re.search(rf"set-cookie: ({name}\w*=[^;]*)", self.head)
        assert found, self
        return found[1]


@dataclass
class Served:
    """A dashboard that listens."""

    connect: Callable[[], Awaitable[trio.SocketStream]]
    lines: list[str] = field(default_factory=list[str])

    async def ask(self, request: bytes) -> Answer:
        """The first answer to these bytes; status 0 when there is none."""
        with trio.fail_after(LIMIT):
            stream = await self.open()
            async with stream:
                await stream.send_all(request)
                return await read_answer(stream)

    async def open(self) -> trio.SocketStream:
        """A new connection."""
        return await self.connect()

    async def get(self, path: str, *headers: str, host: str = "localhost") -> Answer:
        """The answer to a GET."""
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "Connection: close", "", ""]
        return await self.ask("\r\n".join(lines).encode("latin-1"))

    async def post(self, path: str, body: str, *headers: str, host: str = "localhost") -> Answer:
        """The answer to a POST of a form."""
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/x-www-form-urlencoded",
            f"Content-Length: {len(body)}",
            *headers,
            "Connection: close",
            "",
            body,
        ]
        return await self.ask("\r\n".join(lines).encode("latin-1"))

    def find_link(self) -> str:
        """The path that signs in once, as it was printed last."""
        found = re.findall(r"(/sign-in\?token=[\w-]+)", "\n".join(self.lines))
        assert found, self.lines
        return str(found[-1])

    async def sign_in(self) -> str:
        """A session of the one-time token, as the header with its cookie."""
        return f"Cookie: {(await self.get(self.find_link())).get_cookie()}"


async def read_answer(stream: trio.SocketStream) -> Answer:
    """The answer that comes next."""
    received = b""
    try:
        while b"\r\n\r\n" not in received:
            part = await stream.receive_some()
            if not part:
                return Answer(0, "", received.decode())
            received += part
        head, _, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        while length and len(body) < int(length[1]):
            part = await stream.receive_some()
            if not part:
                break
            body += part
    except trio.BrokenResourceError:
        return Answer(0, "", received.decode())
    first, _, fields = head.decode("latin-1").partition("\r\n")
    lowered = re.sub(r"(?m)^[^:]+:", lambda name: name[0].lower(), fields)
    return Answer(int(first.split()[1]), lowered, body.decode())


@asynccontextmanager
async def serving(app: App, options: DashboardOptions) -> AsyncGenerator[Served, None]:
    """Serve a dashboard on its own socket while the block lasts."""
    with open_socket(options) as listening:
        if options.path:
            served = Served(partial(trio.open_unix_socket, options.path))
        else:
            port = listening.getsockname()[1]
            served = Served(partial(trio.open_tcp_stream, options.host, port))
        async with trio.open_nursery() as nursery:
            await nursery.start(_run, app, options, listening, served)
            yield served
            nursery.cancel_scope.cancel()


async def _run(
    app: App, options: DashboardOptions, listening: object, served: Served, *, task_status: object
) -> None:
    await run([app], options, listening, say=served.lines.append, task_status=task_status)  # type: ignore[arg-type]
