"""More outages: what waits in Redis, and whoever waits for it, when the server is slow, paused or restarted."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from celery5 import App, BrokerUnavailable, JobState, TaskFailed, gather
from celery5.broker.calls import jobs
from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.connections.test_outages import BACK, assert_back_in_time, assert_none_doubled, send
from tests.redis.sending.test_producers import COLOURS, Api, in_every_colour, tell


@pytest.fixture
def client(own_server: EmbeddedServer) -> Iterator["redis.Redis"]:
    """A client of the test's own server, which forgets nothing when it is killed."""
    with redis.Redis.from_url(own_server.url) as one:
        one.config_set("appendfsync", "always")
        yield one


@contextmanager
def slow(url: str) -> Iterator[None]:
    """While this lasts the server is busy for 80 ms, again and again, and serves others in between."""
    # A script has no clock: it sees the time at which it began. So it counts, as far as 80 ms take.
    body = "local n = 0 for i = 1, ARGV[1] do n = n + i % 7 end"
    with redis.Redis.from_url(url) as one:
        began = time.perf_counter()
        one.eval(body, 0, 500_000)
        far = int(500_000 * 0.08 / (time.perf_counter() - began))
    stop = threading.Event()

    def hog() -> None:
        with redis.Redis.from_url(url) as one:
            while not stop.is_set():
                one.eval(body, 0, far)

    thread = threading.Thread(target=hog)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def test_a_slow_server_slows_jobs_down_and_does_no_harm(own_staff: Staff, own_server: EmbeddedServer) -> None:
    workers = [own_staff.start(lease=1.0, concurrency=4) for _ in range(2)]
    with slow(own_server.url):
        sent = [job for _ in range(5) for job in send(own_staff, "nap", 0.01, count=20)]
        gather(sent, timeout=30)
    assert_none_doubled(own_staff, sent)
    assert [worker.lines("worker:restarted") for worker in workers] == [[], []]
    assert_back_in_time(own_staff)


def test_workers_go_on_after_the_server_was_paused(
    own_staff: Staff, own_server: EmbeddedServer, client: "redis.Redis"
) -> None:
    workers = [own_staff.start(lease=0.6, concurrency=4) for _ in range(2)]
    sent = send(own_staff, "nap", 0.01, count=100)
    wait_until(lambda: len(own_staff.notes("end")) > 20)
    client.client_pause(1500)
    time.sleep(1.5)  # longer than all leases
    assert_back_in_time(own_staff)
    gather(sent, timeout=30)
    assert_none_doubled(own_staff, sent)
    assert [worker.lines("worker:restarted") for worker in workers] == [[], []]


def test_scheduled_and_dead_jobs_survive_a_restart_of_redis(
    own_staff: Staff, own_server: EmbeddedServer, client: "redis.Redis", tmp_path: Path
) -> None:
    app = own_staff.app
    worker = own_staff.start(lease=0.6)
    nap, gate, fail = app.tasks["nap"], app.tasks["gate"], app.tasks["fail"]
    due = nap.options(countdown=1.5).delay(0.0)
    far = nap.options(countdown=3600).delay(0.0)
    held = gate.delay(str(tmp_path / "gate"))
    retried = fail.options(max_retries=1, backoff=1.5, jitter=False).delay()
    dead_job = fail.options(max_retries=0).delay()
    wait_until(lambda: [retried.status(), dead_job.status()] == [JobState.RETRY, JobState.DEAD])
    wait_until(lambda: held.status() is JobState.EXECUTING)
    own_server.kill()
    worker.process.kill()
    worker.wait()
    own_server.revive()
    states = [job.status() for job in (due, far, held, retried, dead_job)]
    assert states[1:] == [JobState.SCHEDULED, JobState.EXECUTING, JobState.RETRY, JobState.DEAD]
    (tmp_path / "gate").touch()
    own_staff.start(lease=0.6)
    assert gather([due, held], timeout=30, return_exceptions=False)
    with pytest.raises(TaskFailed) as caught:
        retried.get(timeout=30)
    assert caught.value.attempt == 2
    dead_letters = app.perform(jobs.list_dead_jobs(app.queue("default"), count=10))
    assert len(dead_letters) == 2
    assert far.status() is JobState.SCHEDULED
    runs = Counter(note.job for note in own_staff.notes("begin"))
    assert (runs[due.id], runs[held.id], runs[far.id]) == (1, 2, 0)


@in_every_colour
def test_a_producer_goes_on_when_scripts_were_flushed(
    own_server: EmbeddedServer, client: "redis.Redis", app_name: str, colour: str
) -> None:
    app = App(app_name, broker=own_server.url)

    @app.task
    async def nothing() -> None:
        pass

    async def story(api: Api) -> list[JobState]:
        await api.delay(nothing)
        client.script_flush()
        sent = await api.send_many(app, [nothing.s(), nothing.options(countdown=60).s()])
        client.script_flush()
        return [await api.status(job) for job in sent]

    assert tell(colour, story) == [JobState.SENT, JobState.SCHEDULED]
    app.close()


def can_send(staff: Staff) -> bool:
    """Whether a job can be sent, or the breaker of this process still lets nobody through."""
    with suppress(BrokerUnavailable):
        send(staff, "nap", 0.0)[0].get(timeout=30)
        return True
    return False


def test_whoever_waits_for_ever_is_told_after_a_restart(
    own_staff: Staff, own_server: EmbeddedServer, client: "redis.Redis", tmp_path: Path
) -> None:
    """Two jobs for each colour: one that ends while the server is away, one that ends afterwards."""
    app, path = own_staff.app, str(tmp_path / "gate")
    own_staff.start(lease=5.0)
    naps = send(own_staff, "nap", 1.0, count=3)
    gates = send(own_staff, "gate", path, count=3)
    told: dict[str, list[Any]] = {}

    async def story(api: Api, colour: str, pair: tuple[Any, Any]) -> list[Any]:
        return [await api.get(result, timeout=None) for result in pair]

    def wait_for(colour: str, pair: tuple[Any, Any]) -> None:
        told[colour] = tell(colour, lambda api: story(api, colour, pair))

    threads = [
        threading.Thread(target=wait_for, args=(colour, pair), daemon=True)
        for colour, pair in zip(COLOURS, zip(naps, gates, strict=True), strict=True)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(own_staff.notes("begin")) == 6)
    time.sleep(0.2)  # for the waiting to be under way
    own_server.kill()
    wait_until(lambda: len(own_staff.notes("end")) == 3)
    own_server.revive()
    began = time.monotonic()
    wait_until(lambda: can_send(own_staff))
    assert time.monotonic() - began < BACK
    Path(path).touch()
    for thread in threads:
        thread.join(30)
    assert sorted(told) == sorted(COLOURS)
    assert {len(set(answers)) for answers in told.values()} == {1}
    app.close()


def connections_during(client: "redis.Redis", work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` gives, and how many more connections the server had meanwhile, at most."""
    before, most, stop = len(client.client_list()), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.005):
            most = max(most, len(client.client_list()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return work(), most - before
    finally:
        stop.set()
        thread.join(30)


@in_every_colour
def test_ten_thousand_results_are_waited_for_on_one_connection(
    own_staff: Staff, own_server: EmbeddedServer, client: "redis.Redis", colour: str
) -> None:
    client.config_set("appendfsync", "no")
    own_staff.start()
    app = own_staff.app
    tell(colour, lambda api: api.delay(app.tasks["quiet"], 0))

    async def story(api: Api) -> tuple[list[Any], Any]:
        sent = await api.send_many(app, [app.tasks["quiet"].s(n) for n in range(10_000)])
        got = await api.gather(sent, timeout=30)
        return got, await api.wait(sent, timeout=30)

    (got, (done, left)), more = connections_during(client, lambda: tell(colour, story))
    assert got == list(range(10_000))
    assert (len(done), len(left)) == (10_000, 0)
    assert more <= 2  # one to send, one to wait
