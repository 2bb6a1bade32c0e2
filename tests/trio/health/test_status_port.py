"""Status Port: asked over real sockets, by those who mean well and those who do not."""

import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from celery5.cli.standalone.health import send_probe
from celery5.logs.log import Log
from celery5.protocol.health.http import MAX_HEAD_SIZE, HttpRequest
from celery5.protocol.observability.families import MetricFamily
from celery5.services.health import status_port
from celery5.services.health.status_port import MAX_BLOCKED_CLIENTS, MAX_CONNECTIONS, StatusPort
from celery5.services.health.vitals import ProcessStatus

GET = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"


class Part:
    """A part of a worker that says what it is told to say."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def conditions(self) -> Mapping[str, str]:
        return {"part": self.wrong}

    def metric_families(self) -> Iterable[MetricFamily]:
        if self.wrong:
            raise ValueError(self.wrong)
        return []


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


async def opened(
    nursery: trio.Nursery, process_status: ProcessStatus, port: int, ports: int = 1
) -> StatusPort:
    """A status port that listens."""
    log = Log(worker="w", app="a")
    one = StatusPort(process_status=process_status, log=log, port=port, host="127.0.0.1", ports=ports)
    await nursery.start(one.run)
    return one


async def said(port: int, data: bytes, *, ends: bool = False) -> bytes:
    """All that is answered to `data`."""
    with trio.fail_after(30):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            await stream.send_all(data)
            if ends:
                await stream.send_eof()
            return b"".join([part async for part in stream])


async def status(port: int, path: bytes) -> int:
    """Only the number."""
    return int((await said(port, GET % path)).split()[1])


async def test_who_lives_and_who_is_ready_are_two_questions(nursery: trio.Nursery) -> None:
    vitals, part, port = ProcessStatus(app="a"), Part(), free_port()
    await opened(nursery, vitals, port)
    vitals.mark_starting("w-1")
    assert (await status(port, b"/livez"), await status(port, b"/readyz")) == (200, 503)
    vitals.mark_up([part])
    assert (await status(port, b"/livez"), await status(port, b"/readyz")) == (200, 200)
    part.wrong = "it is broken"
    assert (await status(port, b"/livez"), await status(port, b"/readyz")) == (200, 503)
    assert b'"part":"it is broken"' in await said(port, GET % b"/readyz")
    vitals.mark_stopping()
    assert (await status(port, b"/livez"), await status(port, b"/readyz")) == (200, 503)
    vitals.mark_up([part])
    vitals.mark_down(is_restarting=False)
    assert (await status(port, b"/livez"), await status(port, b"/readyz")) == (503, 503)


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400),
        (GET % b"/else", 404),
        (b"POST /livez HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nsomething", 413),
        (b"GET /" + b"x" * MAX_HEAD_SIZE, 431),
        (b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n", 431),
        (b"GET /livez HTTP/3.0\r\nHost: x\r\n\r\n", 505),
    ],
    ids=["nonsense", "no host", "elsewhere", "post", "a body", "a long line", "many fields", "another HTTP"],
)
async def test_what_is_no_probe_is_refused_and_the_next_one_is_answered(
    nursery: trio.Nursery, data: bytes, answer: int
) -> None:
    port = free_port()
    await opened(nursery, ProcessStatus(), port)
    got = await said(port, data)
    assert int(got.split()[1]) == answer
    assert got.partition(b"\r\n\r\n")[2].startswith(b'{"error":"')
    assert await status(port, b"/livez") == 200


@pytest.mark.parametrize(
    "path", [b"/livez", b"/readyz", b"/metrics", b"/metrics/cluster", b"/wanted-workers/mail", b"/else"]
)
async def test_no_page_of_a_web_site_reads_a_port_that_is_for_this_host(
    nursery: trio.Nursery, path: bytes
) -> None:
    """By DNS rebinding: its own name points to this host."""
    number = free_port()
    port = await opened(nursery, ProcessStatus(), number)
    rebound = b"GET %b HTTP/1.1\r\nHost: evil.example:%d\r\n\r\n" % (path, number)
    answers = [await said(number, rebound)]
    serving = threading.Thread(target=port.serve_while_blocked, args=(0.5,))
    serving.start()
    answers.append(_ask_blocked(number, rebound))  # the loop is blocked
    serving.join(40)
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 421 Misdirected Request\r\n"), answer
        assert b"celery5_" not in answer
    for host in (b"localhost", b"127.0.0.1:%d" % number, b"[::1]:1"):
        assert b"HTTP/1.1 421" not in await said(number, GET.replace(b"Host: x", b"Host: " + host) % path)


def _ask_blocked(number: int, request: bytes) -> bytes:
    """All that is answered, without the event loop."""
    with socket.create_connection(("127.0.0.1", number), timeout=30) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(4096), b""))


async def test_a_port_that_others_reach_is_asked_by_whatever_name_it_has(nursery: trio.Nursery) -> None:
    number = free_port()
    one = StatusPort(
        process_status=ProcessStatus(), log=Log(worker="w", app="a"), port=number, host="0.0.0.0"
    )
    await nursery.start(one.run)
    assert b"HTTP/1.1 200" in await said(
        number, b"GET /livez HTTP/1.1\r\nHost: shop.svc.cluster.local\r\n\r\n"
    )


async def test_half_a_request_is_told_so_and_nothing_at_all_is_no_error(nursery: trio.Nursery) -> None:
    port = free_port()
    await opened(nursery, ProcessStatus(), port)
    assert b" 400 " in await said(port, b"GET /livez HT", ends=True)
    assert b" 400 " in await said(port, b"", ends=True)
    assert await status(port, b"/livez") == 200


async def test_head_is_answered_without_a_body(nursery: trio.Nursery) -> None:
    port = free_port()
    await opened(nursery, ProcessStatus(), port)
    got = await said(port, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")
    assert got.endswith(b"\r\n\r\n")


async def test_whoever_is_slow_is_sent_away_and_holds_up_nobody(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_port, "CONNECTION_TIMEOUT", 0.4)
    port = free_port()
    one = await opened(nursery, ProcessStatus(), port)
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(b"GET /livez HTTP/1.1\r\nHo")
    with trio.fail_after(30):
        while not one._connections:
            await trio.sleep(0.01)
    await wait_all_tasks_blocked()  # it is being read, with that limit
    monkeypatch.setattr(status_port, "CONNECTION_TIMEOUT", 30)
    assert await status(port, b"/livez") == 200
    with trio.fail_after(30):
        async with stream:
            assert (await stream.receive_some(9999)).startswith(b"HTTP/1.1 408 ")
    monkeypatch.setattr(status_port, "CONNECTION_TIMEOUT", 0.4)
    deaf = await trio.open_tcp_stream("127.0.0.1", port)  # asks, and never reads
    await deaf.send_all(GET % b"/livez")
    with trio.fail_after(30):
        while one._connections:
            await trio.sleep(0.01)
    await deaf.aclose()


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTT"], ids=["silent", "slow"])
async def test_connections_that_are_held_open_keep_no_probe_from_its_answer(
    nursery: trio.Nursery, sent: bytes
) -> None:
    port = free_port()
    one = await opened(nursery, ProcessStatus(), port)
    idle = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3 * MAX_CONNECTIONS)]
    for stream in idle:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(sent)
    for _ in range(MAX_CONNECTIONS):
        assert await status(port, b"/livez") == 200
        assert len(one._connections) <= MAX_CONNECTIONS
    assert await closed(idle[0])
    for stream in idle:
        await stream.aclose()
    with trio.fail_after(30):
        while one._connections:
            await trio.sleep(0.01)
    assert await status(port, b"/livez") == 200


async def closed(stream: trio.SocketStream) -> bool:
    """Return whether the other side has closed it without a word, once it has."""
    with trio.fail_after(30):
        try:
            return await stream.receive_some() == b""
        except trio.BrokenResourceError:
            return True


async def test_a_part_that_fails_costs_the_answer_and_not_the_worker(nursery: trio.Nursery) -> None:
    vitals, port = ProcessStatus(), free_port()
    one = await opened(nursery, vitals, port)
    vitals.mark_up([Part("oh no")])
    assert one.respond(HttpRequest("GET", "/metrics")).status == 500
    assert b"ValueError: oh no" in await said(port, GET % b"/metrics")
    assert await status(port, b"/livez") == 200


async def test_a_port_that_is_taken_is_tried_again(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_port, "RETRY_DELAY", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = int(other.getsockname()[1])
        await opened(nursery, ProcessStatus(), port)
    answered = partial(trio.to_thread.run_sync, partial(send_probe, "127.0.0.1", port, "/livez", timeout=30))
    with trio.fail_after(30):
        while not (await answered()).ok:
            await trio.sleep(0.02)


async def test_of_several_processes_each_takes_the_next_port(nursery: trio.Nursery) -> None:
    port = neighbours()
    for name in ("first", "second"):
        vitals = ProcessStatus()
        vitals.mark_starting(name)
        await opened(nursery, vitals, port, ports=2)
    assert b'"worker":"first"' in await said(port, GET % b"/livez")
    assert b'"worker":"second"' in await said(port + 1, GET % b"/livez")


def neighbours() -> int:
    """A port that is free as the one after it is."""
    while True:
        port = free_port()
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


async def test_only_the_thread_closes_a_port_that_it_polls_and_it_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closers: list[str] = []
    polls = threading.Event()

    class Watched(socket.socket):
        """A socket that notes which thread closes it."""

        def close(self) -> None:
            if self.fileno() >= 0:
                closers.append(threading.current_thread().name)
            super().close()

    class Polling:
        """A poll that says when it is about to wait."""

        def __init__(self) -> None:
            self._poll = real_poll()
            self.register, self.unregister = self._poll.register, self._poll.unregister

        def poll(self, limit: float) -> list[tuple[int, int]]:
            polls.set()
            return self._poll.poll(limit)

    real_poll = select.poll
    monkeypatch.setattr(select, "poll", Polling)
    async with trio.open_nursery() as nursery:
        port = await opened(nursery, ProcessStatus(), free_port())
        assert port._listener is not None
        port._listener = Watched(fileno=port._listener.detach())
        thread = threading.Thread(target=port.serve_while_blocked, args=(20,), name="watching")
        thread.start()
        assert await trio.to_thread.run_sync(polls.wait, 30)
        nursery.cancel_scope.cancel()
    await trio.to_thread.run_sync(thread.join, 10)
    assert not thread.is_alive()
    assert closers == ["watching"]
    assert not port.serve_while_blocked(0.1)


async def test_silent_clients_delay_no_probe_while_the_loop_is_blocked(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_port, "BLOCKED_TIMEOUT", 60.0)
    number = free_port()
    port = await opened(nursery, ProcessStatus(), number)
    answers: list[bytes] = []

    def probe() -> None:
        silent = [socket.create_connection(("127.0.0.1", number)) for _ in range(MAX_BLOCKED_CLIENTS + 4)]
        with socket.create_connection(("127.0.0.1", number), timeout=20) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\n")
            client.sendall(b"\r\n")
            answers.append(client.recv(4096))
        silent[-1].setblocking(False)
        with suppress(BlockingIOError):
            answers.append(silent[-1].recv(1))
        for stream in silent:
            stream.close()

    serving = threading.Thread(target=port.serve_while_blocked, args=(40,))
    serving.start()
    client = threading.Thread(target=probe)
    client.start()
    client.join(40)  # the loop is blocked
    nursery.cancel_scope.cancel()
    (answer,) = answers
    assert answer.startswith(b"HTTP/1.1 ")


async def test_a_probe_that_has_begun_is_answered_after_the_end_of_a_turn(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_port, "BLOCKED_TIMEOUT", 60.0)
    number = free_port()
    port = await opened(nursery, ProcessStatus(), number)
    with socket.create_connection(
        ("127.0.0.1", number), timeout=20
    ) as client:  # the loop is blocked from here on
        client.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\n")
        serving = threading.Thread(target=port.serve_while_blocked, args=(0.05,))
        serving.start()
        serving.join(0.5)
        assert serving.is_alive()
        client.sendall(b"\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 ")
        serving.join(20)
        assert not serving.is_alive()
    nursery.cancel_scope.cancel()


async def test_the_lag_of_the_loop_is_measured_without_a_port_too(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.services.health.status_port.LAG_PERIOD", 0.05)
    process_status = ProcessStatus()
    port = StatusPort(
        process_status=process_status, log=Log(worker="w", app="a"), port=None, host="127.0.0.1"
    )
    await nursery.start(port.run)
    await wait_all_tasks_blocked()
    time.sleep(0.3)  # noqa: ASYNC251  the loop is blocked
    with trio.fail_after(30):
        while process_status.lag < 0.1:
            await trio.sleep(0.01)
