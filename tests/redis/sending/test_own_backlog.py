"""Own backlog: a process keeps jobs by default, within bounds, or where the application says."""

import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App, BrokerUnavailable
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BacklogFull, Misconfigured
from celery5.sending.own_backlog import OwnBacklog, UnsentJob
from tests.redis.commands.staff import wait_until
from tests.redis.sending.test_backlog import numbers
from tests.redis.sending.test_producers import Api, in_every_colour, tell
from tests.redis.worker.workers import until, working


class FileBacklog:
    """A backlog in an SQLite file, which notes in which threads it is called and may fail."""

    def __init__(self, path: Path, most: int = 1000) -> None:
        self._path = path
        self._most = most
        self.fails: Exception | None = None
        self.threads: set[str] = set()
        self.calls = 0

    def __repr__(self) -> str:
        return f"<jobs in {self._path.name}>"

    def _run(self, words: str, *values: Any) -> list[Any]:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        if self.fails is not None:
            raise self.fails
        with closing(sqlite3.connect(self._path, isolation_level=None)) as file:
            return file.execute(words, values).fetchall()

    def open(self) -> Collection[str]:
        self._run(
            "CREATE TABLE IF NOT EXISTS jobs (n INTEGER PRIMARY KEY, queue, id, job, due, UNIQUE (queue, id))"
        )
        return [queue for (queue,) in self._run("SELECT DISTINCT queue FROM jobs")]

    def count(self) -> int:
        return int(self._run("SELECT count(*) FROM jobs")[0][0])

    def put(self, jobs: Sequence[UnsentJob]) -> None:
        if self.count() + len(jobs) > self._most:
            raise BacklogFull(f"{self._most} jobs are all that this file takes")
        for job in jobs:
            words = "INSERT OR IGNORE INTO jobs (queue, id, job, due) VALUES (?, ?, ?, ?)"
            self._run(words, job.queue, job.id, job.job, job.due)

    def first(self, queue: str, limit: int) -> Sequence[UnsentJob]:
        words = "SELECT queue, id, job, due FROM jobs WHERE queue = ? ORDER BY n LIMIT ?"
        return [UnsentJob(*row) for row in self._run(words, queue, limit)]

    def remove(self, queue: str, ids: Sequence[str]) -> None:
        for job_id in ids:
            self._run("DELETE FROM jobs WHERE queue = ? AND id = ?", queue, job_id)


def declare(app: App) -> Any:
    """Declare the task of these tests."""

    @app.task(name="number")
    async def number(n: int) -> int:
        return n

    return number


@pytest.fixture
def kept(own_server: EmbeddedServer, app_name: str, tmp_path: Path) -> Iterator[tuple[App, FileBacklog]]:
    """An application with its own backlog."""
    own = FileBacklog(tmp_path / "jobs.sqlite", most=5)
    app = App(app_name, broker=own_server.url, backlog=own)
    declare(app)
    yield app, own
    own.fails = None
    own_server.revive()
    app.backlog.flush(30)
    app.close()


@in_every_colour
def test_jobs_are_kept_by_default_and_published_in_order(
    own_server: EmbeddedServer, app_name: str, colour: str
) -> None:
    app = App(app_name, broker=own_server.url)
    number = declare(app)

    async def send(api: Api) -> list[Any]:
        own_server.kill()
        sent = [await api.delay(number, n) for n in range(3)]
        return [*sent, *await api.send_many(app, [number.s(n) for n in range(3, 6)])]

    sent = tell(colour, send)
    assert (app.backlog.size, len({job.id for job in sent})) == (6, 6)
    own_server.revive()
    assert app.backlog.flush(30)
    assert numbers(app) == list(range(6))
    app.close()


def test_the_default_backlog_is_bounded_by_jobs_and_by_bytes(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)
    assert (app.settings.backlog, app.settings.backlog_bytes) == (10_000, 64 * 1024 * 1024)
    app.configure(backlog_bytes=4096)

    @app.task(name="text")
    async def text(words: str) -> None: ...

    own_server.kill()
    text.delay("x" * 1000)
    with pytest.raises(
        BacklogFull, match=r"of at most 4096 bytes wait .* or raise the setting backlog_bytes"
    ):
        text.delay("x" * 3000)
    assert app.backlog.size == 1
    app.configure(backlog_bytes=10_000_000)
    with pytest.raises(BacklogFull, match="10,001 jobs were not sent: 1 of at most 10000 wait"):
        app.send_many([text.s("")] * 10_001)
    assert app.backlog.size == 1, "all or none"
    own_server.revive()
    assert app.backlog.flush(30)
    app.close()


def test_what_claims_that_jobs_are_sent_never_uses_the_backlog(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)
    number = declare(app)
    own_server.kill()
    with pytest.raises(BrokerUnavailable):
        app.send_jobs([number.job(1)])
    assert app.backlog.size == 0
    own_server.revive()
    app.close()


@pytest.mark.parametrize("chosen", [False, True])
async def test_a_job_that_cannot_send_fails_unless_a_backlog_was_chosen(
    own_server: EmbeddedServer, app_name: str, chosen: bool
) -> None:
    """What a worker has in memory is lost with it. A job that has sent nothing is postponed, and runs again."""
    settings: Any = {"backlog": 10} if chosen else {}
    app = App(app_name, broker=own_server.url, lease=30.0, **settings)
    number, seen, is_sent = declare(app), list[object](), trio.Event()

    @app.task(name="sender")
    async def sender() -> None:
        await is_sent.wait()  # without the answer that it is sent, the sender itself goes to the backlog, too
        own_server.kill()
        try:
            await number.options(queue="elsewhere").adelay(1)
        except BrokerUnavailable as error:
            seen.append(type(error))
        else:
            seen.append(app.backlog.size)
        own_server.revive()

    async with working(app, queues=["default"]):
        await sender.adelay()
        is_sent.set()
        await until(lambda: bool(seen))
        assert (seen[0] == 1) is chosen
        assert await app.backlog.aflush(30)
    app.close()


@in_every_colour
def test_jobs_are_kept_in_a_backlog_of_ones_own(
    kept: tuple[App, FileBacklog], own_server: EmbeddedServer, colour: str
) -> None:
    app, own = kept
    number: Any = app.tasks["number"]

    async def send(api: Api) -> None:
        await api.delay(number, 0)
        own_server.kill()
        for n in range(1, 4):
            await api.delay(number, n)
        await api.delay(number.options(queue="other", countdown=60), 4)
        with pytest.raises(
            BacklogFull, match=r"^2 jobs were not sent: 5 jobs are all that this file takes \("
        ):
            await api.send_many(app, [number.s(8), number.s(9)])

    tell(colour, send)
    assert (app.backlog.size, own.count()) == (4, 4)
    own_server.revive()
    assert app.backlog.flush(30)
    assert (numbers(app), own.count()) == ([0, 1, 2, 3], 0)


def test_next_process_publishes_the_backlog_of_the_last_one(
    own_server: EmbeddedServer, app_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.sqlite"
    script = f"""
        import sys
        from pathlib import Path
        from celery5 import App
        from celery5.sending import memory_backlog
        from tests.redis.sending.test_own_backlog import FileBacklog, declare
        memory_backlog.EXIT_TIMEOUT = 0.5
        app = App({app_name!r}, broker={own_server.url!r}, backlog=FileBacklog(Path({str(path)!r})))
        number = declare(app)
        for n in range(3):
            number.delay(n)
    """
    own_server.kill()
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (
        f"3 jobs of application {app_name!r} could not be published and are left in <jobs in" in ended.stderr
    )
    assert "lost" not in ended.stderr
    own_server.revive()
    app = App(app_name, broker=own_server.url, backlog=FileBacklog(path))
    number = declare(app)
    number.delay(3)
    assert app.backlog.flush(30)
    assert numbers(app) == [0, 1, 2, 3], "what an earlier process has left goes first"
    app.close()


def test_a_backlog_that_fails_costs_no_job_and_ends_nothing(
    kept: tuple[App, FileBacklog], own_server: EmbeddedServer
) -> None:
    app, own = kept
    number: Any = app.tasks["number"]
    own.fails = OSError("the disk is full")
    number.delay(0)  # Redis is there: the backlog is not needed
    own_server.kill()
    with pytest.raises(BacklogFull, match=r"cannot store them: OSError\('the disk is full'\)") as caught:
        number.delay(1)
    assert isinstance(caught.value, BrokerUnavailable)
    own.fails = None
    number.delay(2)
    number.delay(3)
    own.fails = OSError("the disk cannot be read")
    own_server.revive()
    wait_until(lambda: "cannot be read" in app.backlog.why)
    own.fails = None
    assert app.backlog.flush(30)
    assert numbers(app) == [0, 2, 3]
    assert app.backlog.why == ""


class Odd(BaseException):
    """What a backlog raises that is no Exception."""


def raise_odd(*_arguments: object) -> Any:
    """Fail in a way that ends threads."""
    raise Odd("of the backlog")


ODD: dict[str, Any] = {
    "raises": raise_odd,
    "none": lambda *_: None,
    "text": lambda *_: "text",
    "negative": lambda *_: -1,
    "list": lambda *_: [1],
    "fraction": lambda *_: 1.5,
}
RETURNING = ("open", "count", "first")


@pytest.mark.parametrize(
    ("method", "odd"),
    [
        *((method, odd) for method in RETURNING for odd in ODD),
        ("put", "raises"),
        ("remove", "raises"),
    ],
)
def test_own_backlog_loses_no_job_without_telling_its_caller(
    kept: tuple[App, FileBacklog], own_server: EmbeddedServer, method: str, odd: str
) -> None:
    app, own = kept
    number: Any = app.tasks["number"]
    sent: list[int] = []

    def send(value: int) -> None:
        try:
            number.delay(value)
        except BrokerUnavailable:  # it was not sent, and its caller knows
            return
        sent.append(value)

    if method != "open":
        app.backlog.open()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, method, ODD[odd])
        send(0)
        own_server.kill()
        send(1)
        own_server.revive()
        send(2)
        app.backlog.flush(0.2)
    assert app.backlog.flush(30)
    assert sorted(numbers(app)) == sent


def test_a_backlog_that_cannot_count_when_its_last_job_goes_is_counted_later(
    kept: tuple[App, FileBacklog], own_server: EmbeddedServer
) -> None:
    app, own = kept
    number: Any = app.tasks["number"]
    count = own.count
    own_server.kill()
    number.delay(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "count", raise_odd)
        own_server.revive()
        wait_until(lambda: count() == 0)
        wait_until(lambda: "celery5-backlog" not in {thread.name for thread in threading.enumerate()})
    assert app.backlog.flush(30)


async def test_a_coroutine_publishes_from_a_backlog_of_ones_own(
    kept: tuple[App, FileBacklog], own_server: EmbeddedServer
) -> None:
    app, own = kept
    number: Any = app.tasks["number"]
    async with trio.open_nursery() as nursery:
        await nursery.start(app.backlog.run)
        own_server.kill()
        for n in range(3):
            await number.adelay(n)
        await trio.to_thread.run_sync(own_server.revive)
        assert await app.backlog.aflush(30)
        nursery.cancel_scope.cancel()
    assert numbers(app) == [0, 1, 2]
    assert threading.current_thread().name not in own.threads, "it never blocks the event loop"


def test_a_forked_child_opens_its_backlog_anew(
    kept: tuple[App, FileBacklog], own_server: EmbeddedServer
) -> None:
    app, _ = kept
    number: Any = app.tasks["number"]
    own_server.kill()
    number.delay(1)
    child = os.fork()
    if not child:
        os._exit(app.backlog.size + 10 * app.backlog.is_to_be_opened)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10


@pytest.mark.parametrize("value", [object(), FileBacklog, [], {}])
def test_what_is_no_backlog_is_refused_where_the_application_is_made(app_name: str, value: Any) -> None:
    with pytest.raises(
        Misconfigured, match=r"backlog is .*: give how many jobs to keep, or an object with the methods"
    ):
        App(app_name, backlog=value)


def test_the_backlog_of_these_tests_is_one_by_its_methods(tmp_path: Path) -> None:
    assert isinstance(FileBacklog(tmp_path / "x"), OwnBacklog)


@pytest.mark.parametrize("setting", [{"replicas": 1}, {"publisher": "unix:///nowhere/publisher.sock"}])
def test_default_backlog_is_not_used_where_more_than_memory_is_promised(
    own_server: EmbeddedServer, app_name: str, setting: Any
) -> None:
    app = App(app_name, broker=own_server.url, **setting)
    number = declare(app)
    own_server.kill()
    with pytest.raises(BrokerUnavailable):
        number.delay(1)
    app.configure(backlog=10)
    number.delay(1)
    assert app.backlog.size == 1
    own_server.revive()
    app.configure(publisher="")
    assert app.backlog.flush(30)
    app.close()
