"""Processes that may open 100 files: each listening socket answers again after clients have opened more connections."""

import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import redis

from celery5 import App
from celery5.results.async_result import AsyncResult
from tests.story.cli.commands import environment
from tests.story.conftest import Desk
from tests.trio.health.test_status_port import free_port

pytestmark = pytest.mark.timeout(120)

LIMIT = 30.0
"""Seconds that anything here may take."""
DESCRIPTORS = 100
"""What each process may open (RLIMIT_NOFILE)."""
CONNECTIONS = 150
"""What its clients open at once."""
PROBE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
SIGN_IN = b"GET /sign-in HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
FLOODS = {
    "silent": b"",
    "half a head": b"GET /sign-in HTTP/1.1\r\nHost: loc",
    "half a body": b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\nx",
    "reads nothing": SIGN_IN.replace(b"Connection: close\r\n", b"") * 30,
}
Address = tuple[str, int] | str


class Limited:
    """A process with few descriptors, and what it has printed."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def text(self) -> str:
        return self._output.read_text()

    def wait_for(self, pattern: str) -> str:
        """The first group of a pattern in what it prints."""
        wait_until(lambda: self.is_alive() and bool(re.search(pattern, self.text)), lambda: self.text)
        found = re.search(pattern, self.text)
        assert found
        return found[1]

    def is_alive(self) -> bool:
        assert self.process.poll() is None, self.text
        return True


Start = Callable[..., Limited]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Python process with few descriptors; each must end well with the test."""
    started: list[Limited] = []

    def begin(*words: str, cwd: Path | None = None, **env: str) -> Limited:
        output = tmp_path / f"output-{len(started)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=cwd or tmp_path,
                env=environment(**env),
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
            )
        started.append(Limited(process, output))
        return started[-1]

    yield begin
    for process in started:
        process.process.send_signal(signal.SIGTERM)
    for process in started:
        assert process.process.wait(LIMIT) == 0, process.text


def wait_until(condition: Callable[[], bool], describe: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.05)


def connect(address: Address) -> socket.socket:
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(10)
            connection.connect(address)
        except OSError:  # too many wait to be accepted
            connection.close()
            raise
        return connection
    return socket.create_connection(address, 10)


@contextmanager
def flooding(address: Address, sent: bytes) -> Generator[None, None, None]:
    """More connections than the process may open files, while the block lasts: each has sent this."""
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            with suppress(OSError):
                connection = stack.enter_context(connect(address))
                connection.sendall(sent)
        yield


def ask(address: Address, request: bytes) -> bytes:
    """The first line of what is answered; b"" for nothing."""
    with suppress(OSError), connect(address) as connection:
        connection.sendall(request)
        return connection.recv(65536).partition(b"\r\n")[0]
    return b""


def answers(address: Address, request: bytes) -> Callable[[], bool]:
    return lambda: ask(address, request).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", FLOODS.values(), ids=FLOODS)
def test_the_dashboard_answers_during_and_after_a_flood(desk: Desk, start: Start, sent: bytes) -> None:
    one = start("-m", "celery5", "-A", "shop", "dashboard", "start", "--port", "0", cwd=desk.folder)
    address = ("127.0.0.1", int(one.wait_for(r"dashboard: http://127.0.0.1:(\d+)/")))
    with flooding(address, sent):
        wait_until(answers(address, SIGN_IN), lambda: one.text)
    wait_until(answers(address, SIGN_IN), lambda: one.text)
    assert one.is_alive()


def test_the_socket_of_the_dashboard_answers_during_and_after_a_flood(
    desk: Desk, start: Start, short_path: Path
) -> None:
    address = str(short_path / "d.sock")
    one = start("-m", "celery5", "-A", "shop", "dashboard", "start", "--socket", address, cwd=desk.folder)
    one.wait_for("(dashboard: unix)")
    for sent in FLOODS.values():
        with flooding(address, sent):
            wait_until(answers(address, SIGN_IN), lambda: one.text)
    wait_until(answers(address, SIGN_IN), lambda: one.text)


def test_in_development_jobs_run_while_every_socket_is_flooded(desk: Desk, start: Start) -> None:
    port = free_port()
    one = start(
        *("-m", "celery5", "-A", "shop", "controller", "start", "--development"),
        cwd=desk.folder,
        CELERY5_STATUS_PORT=str(port),
    )
    dashboard = ("127.0.0.1", int(one.wait_for(r"dashboard: http://127.0.0.1:(\d+)/")))
    url = one.wait_for(r"CELERY5_BROKER='(\S+)'")
    one.wait_for("(worker:started)")
    app = App(desk.app.name, broker=url)
    add = app.task(name="shop.add")(_add)
    with flooding(dashboard, FLOODS["half a body"]), flooding(("127.0.0.1", port), b"GET /livez"):
        assert add.delay(1, 2).get(timeout=LIMIT) == 3
        _cut_connections(url)  # each process needs new ones
        assert add.delay(2, 2).get(timeout=LIMIT) == 4
        wait_until(answers(("127.0.0.1", port), PROBE), lambda: one.text)
    wait_until(answers(dashboard, SIGN_IN), lambda: one.text)
    assert add.delay(3, 2).get(timeout=LIMIT) == 5
    assert one.is_alive()
    assert "worker:restarted" not in one.text
    app.close()


def test_a_worker_answers_probes_and_runs_jobs_while_its_status_port_is_flooded(
    desk: Desk, start: Start
) -> None:
    address = ("127.0.0.1", free_port())
    one = start(
        *("-m", "celery5", "-A", "shop", "worker", "start"),
        cwd=desk.folder,
        CELERY5_STATUS_PORT=str(address[1]),
    )
    one.wait_for("(worker:started)")
    add = desk.app.tasks["shop.add"]
    for sent in (b"", b"GET /livez HTTP/1.1\r\n", PROBE * 20):
        with flooding(address, sent):
            assert add.delay(1, 2).get(timeout=LIMIT) == 3
            wait_until(answers(address, PROBE), lambda: one.text)
    wait_until(answers(address, PROBE), lambda: one.text)


def test_a_publisher_takes_jobs_while_its_sockets_are_flooded(
    desk: Desk, start: Start, short_path: Path
) -> None:
    path, tcp = str(short_path / "p.sock"), ("127.0.0.1", free_port())
    one = start(
        *("-m", "celery5", "-A", "shop", "publisher", "start"),
        *("--socket", path, "--tcp", f"127.0.0.1:{tcp[1]}", "--backlog", f"{short_path}/"),
        cwd=desk.folder,
    )
    one.wait_for("(publisher:started)")
    for address, sent in ((path, b""), (tcp, b""), (tcp, b"\0\0\0\x10{")):
        app = App(desk.app.name, broker=desk.app.settings.broker, publisher=f"unix://{path}")
        add = app.task(name="shop.add")(_add)
        with flooding(address, sent):
            job = add.delay(1, 2)
            wait_until(partial(_is_known, job), lambda: one.text)
        app.close()
    assert one.is_alive()


RECEIVER = """
import trio
from celery5.examples.webhooks.receiver import Receiver

async def emit(*args, **kwargs):
    pass

async def main():
    receiver = Receiver(["whsec_" + "A" * 32], port={port})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receiver.run, emit)
        with trio.open_signal_receiver(15) as signals:
            print("receiving", flush=True)
            async for _ in signals:
                nursery.cancel_scope.cancel()

trio.run(main)
"""


def test_the_receiver_of_webhooks_answers_during_and_after_a_flood(start: Start) -> None:
    address = ("127.0.0.1", free_port())
    one = start("-c", RECEIVER.format(port=address[1]))
    one.wait_for("(receiving)")
    request = b"GET /else HTTP/1.1\r\nHost: x\r\n\r\n"
    for sent in (b"", b"POST /webhooks HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\nx"):
        with flooding(address, sent):
            wait_until(lambda: b" 404 " in ask(address, request), lambda: one.text)
    wait_until(lambda: b" 404 " in ask(address, request), lambda: one.text)
    assert one.is_alive()


def _is_known(job: AsyncResult[int]) -> bool:
    return job.status().name != "UNKNOWN"


async def _add(a: int, b: int) -> int:
    return a + b


def _cut_connections(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
