"""Publisher daemon: what it has taken is published once and in order, whatever dies, and nothing else is said to be."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery5 import App, BrokerUnavailable, JobState, Misconfigured
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BacklogFull, PublisherUnavailable
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.protocol.publisher.frames import PublishRequest
from celery5.sending import publisher_client
from tests.redis.commands.staff import wait_until
from tests.redis.publisher.publishing import LONG, Daemon, numbers, publishing
from tests.redis.sending.test_producers import Api, in_every_colour, tell

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def daemon(url: str, app_name: str, short_path: Path) -> Iterator[Daemon]:
    """A daemon over the shared server."""
    with publishing(app_name, url, short_path) as one:
        yield one


@pytest.fixture
def own_daemon(own_server: EmbeddedServer, app_name: str, short_path: Path) -> Iterator[Daemon]:
    """A daemon over a server of the test's own."""
    with publishing(app_name, own_server.url, short_path) as one:
        yield one


def test_messages_taken_in_an_outage_survive_sigkill_in_order(
    own_daemon: Daemon, own_server: EmbeddedServer
) -> None:
    own_server.kill()
    own_daemon.start()  # it needs no Redis to begin
    app = own_daemon.app()
    task: Any = app.tasks["number"]
    other = task.options(queue="other")
    for first in range(0, 10_000, 500):
        app.send_many([(task if n % 4 else other).s(n) for n in range(first, first + 500)])
    own_daemon.kill()
    own_server.revive()
    assert (numbers(app), numbers(app, "other")) == ([], [])
    own_daemon.start()
    wait_until(lambda: len(numbers(app)) + len(numbers(app, "other")) >= 10_000, within=LONG)
    assert numbers(app) == [n for n in range(10_000) if n % 4]
    assert numbers(app, "other") == [n for n in range(10_000) if not n % 4]
    assert own_daemon.stop() == 0
    own_daemon.start()  # nothing is left that would come again
    own_daemon.stop()
    assert len(numbers(app)) + len(numbers(app, "other")) == 10_000
    app.close()


class Sender(threading.Thread):
    """A client that sends numbers one after the other, each again and again until it is told that it is stored."""

    def __init__(self, app: App, queue: str, first: int, count: int) -> None:
        super().__init__(daemon=True)
        self.app = app
        self.task: Any = app.tasks["number"].options(queue=queue)
        self.todo = range(first, first + count)
        self.stored: list[int] = []
        self.failures = 0
        self.enough = threading.Event()
        """Enough has happened: it may come to its end."""
        self.enough.set()

    def run(self) -> None:
        for n in self.todo:
            if n == self.todo[-20]:
                self.enough.wait(LONG)
            again = self.task.options(id=f"{self.task.send_options.queue}-{n}")
            while True:
                try:
                    again.delay(n)
                except BrokerUnavailable:
                    self.failures += 1
                    time.sleep(0.01)
                else:
                    self.stored.append(n)
                    break


def _count_stored(senders: list[Sender]) -> int:
    return sum(len(sender.stored) for sender in senders)


def _are_sending(senders: list[Sender]) -> bool:
    return any(sender.is_alive() for sender in senders)


def _strike(daemon: Daemon, server: EmbeddedServer, chance: random.Random) -> None:
    """Kill the daemon or the server, and start it again."""
    if chance.random() < 0.5:
        daemon.kill()
        daemon.launch()
    else:
        server.kill()
        time.sleep(chance.uniform(0, 0.3))
        server.revive()


def test_daemon_killed_at_random_points_publishes_each_job_once(
    own_daemon: Daemon, own_server: EmbeddedServer
) -> None:
    own_daemon.start()
    app = own_daemon.app()
    senders = [Sender(app, f"q{n % 2}", 1000 * n, 300) for n in range(4)]
    for sender in senders:
        sender.enough.clear()
        sender.start()

    chance, deaths = random.Random(), 0
    while _are_sending(senders) and deaths < 20:
        time.sleep(chance.uniform(0.05, 0.6))
        before = _count_stored(senders)
        _strike(own_daemon, own_server, chance)
        deaths += 1
        if deaths == 3:  # on a fast machine they would have ended before
            for sender in senders:
                sender.enough.set()
        # Every other time it may be killed before it has even started; else a slow machine would never store anything.
        if deaths % 2 == 0:
            wait_until(
                lambda before=before: _count_stored(senders) > before or not _are_sending(senders),  # type: ignore[misc]
                within=LONG,
            )
    for sender in senders:
        sender.join(LONG)
    assert deaths >= 2
    assert [len(thread.stored) for thread in senders] == [300] * 4
    wait_until(lambda: sum(len(numbers(app, queue)) for queue in ("q0", "q1")) >= 1200, within=LONG)
    for queue, mine in (("q0", senders[::2]), ("q1", senders[1::2])):
        found = numbers(app, queue)
        assert len(found) == len(set(found)) == 600
        for sender in mine:  # who waits for an answer before it sends the next finds its own order kept
            assert [n for n in found if n in sender.todo] == list(sender.todo)
    app.close()


@in_every_colour
def test_jobs_go_by_the_daemon_in_every_colour(daemon: Daemon, colour: str) -> None:
    daemon.start()
    app = daemon.app()
    task: Any = app.tasks["number"]

    async def story(api: Api) -> list[Any]:
        sent = [await api.delay(task, 0)]
        sent += await api.send_many(app, [task.s(n) for n in range(1, 1200)])
        sent.append(await api.delay(task.options(countdown=60), 1200))
        return sent

    sent = tell(colour, story)
    wait_until(lambda: len(numbers(app)) == 1200, within=LONG)
    assert numbers(app) == list(range(1200))
    wait_until(lambda: sent[-1].status() is JobState.SCHEDULED, within=LONG)
    assert sent[0].status() is JobState.SENT
    app.close()


def test_two_clients_at_once_find_their_own_order_kept(daemon: Daemon) -> None:
    daemon.start()
    apps = [daemon.app(), daemon.app()]
    senders = [Sender(app, "default", 1000 * n, 200) for n, app in enumerate(apps)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(LONG)
    wait_until(lambda: len(numbers(apps[0])) == 400, within=LONG)
    found = numbers(apps[0])
    for sender in senders:
        assert [n for n in found if n in sender.todo] == list(sender.todo)
    for app in apps:
        app.close()


def test_sigterm_has_it_publish_what_waits_and_end(own_daemon: Daemon, own_server: EmbeddedServer) -> None:
    own_server.kill()
    own_daemon.start("--backlog", "memory")
    app = own_daemon.app()
    app.send_many([app.tasks["number"].s(n) for n in range(2000)])
    own_server.revive()
    assert own_daemon.stop() == 0  # also what is in memory only
    assert numbers(app) == list(range(2000))
    assert not own_daemon.socket.exists()
    app.close()


def test_stopped_while_redis_is_away_it_keeps_what_waits_for_the_next_one(
    own_daemon: Daemon, own_server: EmbeddedServer
) -> None:
    own_daemon.start()
    own_server.kill()
    app = own_daemon.app()
    app.tasks["number"].delay(7)
    assert own_daemon.stop() == 0
    (left,) = own_daemon.lines("publisher:messages-left")
    assert left["messages"] == 1
    own_server.revive()
    own_daemon.start()
    wait_until(lambda: numbers(app) == [7], within=LONG)
    app.close()


def test_process_backlog_serves_while_the_daemon_is_down(daemon: Daemon) -> None:
    app = daemon.app()
    task: Any = app.tasks["number"]
    with pytest.raises(PublisherUnavailable, match=r"cannot be reached.*celery5 publisher start"):
        task.delay(1)
    began = time.monotonic()
    with pytest.raises(PublisherUnavailable):
        task.delay(1)  # it is not looked for each time
    assert time.monotonic() - began < 30
    app.configure(backlog=10)
    for n in range(3):
        task.delay(n)
    assert app.backlog.size == 3
    daemon.start()
    assert app.backlog.flush(LONG)
    wait_until(lambda: numbers(app) == [0, 1, 2], within=LONG)
    app.close()


def test_while_the_daemon_hangs_its_breaker_is_open_and_calls_fail_at_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_client, "ANSWER_LIMIT", 0.2)
    monkeypatch.setattr(publisher_client, "CONNECT_LIMIT", 0.2)
    monkeypatch.setattr(publisher_client, "CLIENT_BREAKER", BreakerPolicy(threshold=1, reset=60.0))
    daemon.start()
    app = daemon.app()
    task: Any = app.tasks["number"]
    task.delay(1)
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGSTOP)
    with pytest.raises(PublisherUnavailable, match="cannot be reached") as first:
        task.delay(2)
    assert first.value.maybe_done
    calls = list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(publisher_client, "connect_to_daemon", lambda *_: calls.append("connected"))
        for _ in range(5):
            with pytest.raises(PublisherUnavailable) as later:
                task.delay(3)
            assert not later.value.maybe_done
    assert calls == [], "while the breaker is open nobody tries to connect"
    os.kill(daemon.process.pid, signal.SIGCONT)
    app.close()


def test_a_connection_that_was_silent_is_checked_before_it_is_used(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_client, "PING_AFTER", 0.0)
    daemon.start()
    app = daemon.app()
    task: Any = app.tasks["number"]
    sent = list[Any]()
    send = publisher_client.send_request

    def note(connection: socket.socket, message: Any) -> Any:
        sent.append(message)
        if message == PublishRequest(()) and len(sent) > 4:
            raise TimeoutError  # the line is dead, which nobody was told
        return send(connection, message)

    monkeypatch.setattr(publisher_client, "send_request", note)
    for n in range(3):
        task.delay(n)
    kinds = ["ping" if request == PublishRequest(()) else type(request).__name__ for request in sent]
    assert kinds == [
        *("ClientHello", "PublishRequest", "ping", "PublishRequest"),
        *("ping", "ClientHello", "PublishRequest"),
    ]
    wait_until(lambda: numbers(app) == [0, 1, 2], within=LONG)
    app.close()


def test_a_connection_that_was_kept_is_replaced_when_the_daemon_was(daemon: Daemon) -> None:
    daemon.start()
    app = daemon.app()
    task: Any = app.tasks["number"]
    task.delay(0)
    daemon.kill()
    daemon.start()
    task.delay(1)
    wait_until(lambda: numbers(app) == [0, 1], within=LONG)
    app.close()


def test_jobs_with_a_key_go_to_redis_directly_and_hear_who_has_it(daemon: Daemon) -> None:
    app = daemon.app()  # there is no daemon
    task: Any = app.tasks["number"].options(key="one")
    first, second = task.delay(1), task.delay(2)
    assert (second.id, second.duplicate) == (first.id, True)
    assert app.send_jobs([app.tasks["number"].job(3)])[0].status() is JobState.SENT  # and so does an outbox
    app.close()


def test_events_go_by_the_daemon_too(daemon: Daemon) -> None:
    daemon.start()
    app = daemon.app()

    @app.event
    class Sold:
        what: str

    kind: Any = Sold
    kind.delay(what="tea")
    wait_until(lambda: app.info().events.waiting == 1, within=LONG)
    app.close()


def test_a_countdown_runs_on_while_its_job_waits(own_daemon: Daemon, own_server: EmbeddedServer) -> None:
    own_daemon.start()
    app = own_daemon.app()
    own_server.kill()
    sent = time.time()
    result = app.tasks["number"].options(countdown=60).delay(1)
    taken = time.time()
    time.sleep(1)
    own_server.revive()
    own_daemon.kill()
    own_daemon.start()
    wait_until(lambda: result.status() is JobState.SCHEDULED, within=LONG)
    import redis

    with redis.Redis.from_url(own_server.url) as client:
        due: Any = client.zscore(app.queue("default").due, result.id)
    assert sent + 59 <= due / 1000 <= taken + 61
    app.close()


def test_it_publishes_for_its_own_application_only(daemon: Daemon) -> None:
    daemon.start()
    stranger = App("stranger", broker=daemon.url, publisher=f"unix://{daemon.socket}")

    @stranger.task
    async def number(n: int) -> int:
        return n

    with pytest.raises(Misconfigured, match="it publishes for the application"):
        number.delay(1)
    stranger.close()


def test_a_full_backlog_refuses_with_a_clear_word(own_daemon: Daemon, own_server: EmbeddedServer) -> None:
    own_server.kill()
    own_daemon.start(publisher_backlog_messages=5)
    app = own_daemon.app()
    task: Any = app.tasks["number"]
    app.send_many([task.s(n) for n in range(4)])
    with pytest.raises(BacklogFull, match=r"no room for 2 more: the backlog has 4 of at most 5"):
        app.send_many([task.s(8), task.s(9)])
    task.delay(4)
    own_server.revive()
    wait_until(lambda: numbers(app) == [0, 1, 2, 3, 4], within=LONG)
    app.close()


def test_two_daemons_never_share_a_backlog_or_a_socket(daemon: Daemon) -> None:
    daemon.start()
    first = daemon.process
    for flags, why in (
        ((), "another Publisher"),
        (("--socket", str(daemon.folder / "q.sock")), "another Publisher has the backlog"),
        (("--backlog", "memory"), "another Publisher listens at"),
    ):
        daemon.launch(*flags)
        assert daemon.process is not None
        assert daemon.process.wait(LONG) == 73
        said = daemon.output.read_text()
        assert why in said
        assert "Traceback" not in said
    daemon.process = first


def test_a_check_of_the_application_keeps_messages_back_until_it_is_well(daemon: Daemon) -> None:
    gate = daemon.folder / "gate"
    gate.touch()
    daemon.environ["PUBLISHED_GATE"] = str(gate)
    daemon.start()
    app = daemon.app()
    wait_until(lambda: bool(daemon.lines("breaker:tripped")), within=LONG)
    app.send_many([app.tasks["number"].s(n) for n in range(5)])
    time.sleep(0.5)
    assert numbers(app) == []
    gate.unlink()
    wait_until(lambda: numbers(app) == [0, 1, 2, 3, 4], within=LONG)
    app.close()
