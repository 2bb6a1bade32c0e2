"""Beginning again: a process whose next incarnation meets a Redis that refuses to write waits for it, at each step."""

import contextvars
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import redis
import trio

from celery5 import App, BootStep, every
from celery5.bootsteps.boot import BootFailed, BootGraph
from celery5.broker.calls import leases
from celery5.broker.keys import EVENTS
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import (
    BootStepFailed,
    BrokerDenied,
    BrokerReplied,
    BrokerUnavailable,
    LeaseLost,
    UnreadableReply,
)
from celery5.processes import controller
from celery5.processes.controller import ClusterOptions
from celery5.processes.foreground import WORKER
from celery5.processes.lifecycle import incarnations as lives
from celery5.processes.lifecycle.incarnations import ProcessKind, should_restart
from celery5.processes.publisher import PUBLISHER
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.services.health.vitals import ProcessStatus
from tests.faults.connections.proxy import FaultyProxy, Refusal
from tests.redis.worker.workers import Lines, start, until

REFUSALS = {
    "OOM": "OOM command not allowed when used memory > 'maxmemory'.",
    "MISCONF": "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "NOREPLICAS": "NOREPLICAS Not enough good replicas to write.",
}
MOST = 200
"""Commands of one boot, at most: a bound for the test."""


class Incarnations:
    """The incarnations of one process behind a proxy: ends each on demand, and has the next one refused."""

    def __init__(self, proxy: FaultyProxy) -> None:
        self.proxy = proxy
        self.begun = self.up = 0
        self.refusal: Refusal | None = None
        self.error: Exception = LeaseLost("so says the test")
        self._end = trio.Event()

    def begins(self) -> None:
        """A boot graph is about to come up."""
        self.begun += 1
        self.proxy.refusal = self.refusal

    async def live(self) -> None:
        """End by the error when the test says so: by default the lease is lost."""
        await self._end.wait()
        self._end = trio.Event()
        raise self.error

    def started(self, status: trio.TaskStatus[None]) -> None:
        """All of the boot graph is up."""
        self.up += 1
        status.started()

    async def again(self, refusal: Refusal) -> bool:
        """Begin again while Redis refuses; then it does no more. Gives whether anything was refused."""
        up = self.up
        self.refusal = refusal
        self._end.set()
        await until(lambda: refusal.refused > 0 or self.up > up)
        refused = refusal.refused > 0
        self.refusal = self.proxy.refusal = None
        await until(lambda: self.up > up)
        return refused


CURRENT: contextvars.ContextVar[Incarnations | None] = contextvars.ContextVar("CURRENT", default=None)


class Status(trio.TaskStatus[None]):
    """Tells that all is up."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def started(self, value: None = None) -> None:
        self._tell()


@pytest.fixture
def interruptible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of a test loses its lease on demand, and does not wait before it begins again."""
    inner = BootGraph.run

    async def run(self: BootGraph, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        one = CURRENT.get()
        if one is None:
            await inner(self, task_status=task_status)
            return
        CURRENT.set(None)  # a boot graph within this one is no incarnation
        try:
            one.begins()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.live)
                await inner(self, task_status=Status(lambda: one.started(task_status)))
        finally:
            CURRENT.set(one)

    monkeypatch.setattr(BootGraph, "run", run)
    monkeypatch.setattr(lives, "full_jitter", lambda *_a, **_k: 0.005)


def shop(name: str, broker: str) -> App:
    """An application with something to do for each kind of process."""
    app = App(name, broker=broker, lease=5.0, concurrency=2, cpu_slots=1)

    @app.task(name="one", limit=1)
    async def one() -> None:
        pass

    @app.event
    class Placed:
        n: int

    Placed.subscribe(one.options())  # type: ignore[attr-defined]
    app.schedule(one.s(), every(3600), name="hourly")

    @app.health_check(period=3600, scope="global")
    async def well() -> None:
        pass

    return app


def pages(folder: Path) -> dict[str, ProcessKind]:
    """Every kind of process, by its name."""
    (folder / "cluster.toml").write_text("[workers.none]\ncount = 0\n")
    options = ClusterOptions("shop", file=str(folder / "cluster.toml"))
    run = partial(controller.run, cluster_options=options)
    kept = ProcessKind("controller", run, lambda _app: None)
    return {page.name: page for page in (WORKER, ROUTER, SCHEDULER, PUBLISHER, kept)}


@pytest.mark.parametrize("word", ["worker", "router", "scheduler", "publisher", "controller"])
@pytest.mark.usefixtures("interruptible")
async def test_a_process_that_begins_again_waits_for_a_redis_that_refuses_at_any_step(
    server: EmbeddedServer, app_name: str, short_path: Path, word: str
) -> None:
    """From the first command of its boot on, from the second on, and so on; each of the three refusals."""
    page, most = pages(short_path)[word], dict[str, int]()

    async def one(code: str, error: str) -> None:
        proxy = FaultyProxy(str(server.socket))
        await nursery.start(proxy.run)
        app = shop(f"{app_name}-{code.lower()}", proxy.url)
        app.configure(publisher_socket=str(short_path / code))
        incarnations = Incarnations(proxy)
        CURRENT.set(incarnations)
        process = await start(nursery, app, page=page)
        for spared in range(MOST):
            if not await incarnations.again(Refusal(error, spared)):
                most[code] = spared
                break
        await process.stop()
        app.close()

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as all_of_them:
                for code, error in REFUSALS.items():
                    all_of_them.start_soon(one, code, error)
            nursery.cancel_scope.cancel()
    assert most.keys() == REFUSALS.keys()
    if word != "publisher":  # whose boot needs nothing of Redis
        assert min(most.values()) >= 2, most


def misconfigure(client: "redis.Redis") -> Callable[[], None]:
    """Have the server fail to save; gives what ends that."""
    place = Path(str(client.config_get("dir")["dir"])) / str(client.config_get("dbfilename")["dbfilename"])
    with suppress(FileNotFoundError):
        place.unlink()
    (place / "in the way").mkdir(parents=True)
    client.config_set("save", "3600 1")
    client.bgsave()

    def end() -> None:
        client.config_set("save", "")

    return end


def refuse(client: "redis.Redis", code: str) -> Callable[[], None]:
    """Have a real server refuse to write; gives what ends that."""
    if code == "MISCONF":
        return misconfigure(client)
    setting = {"OOM": "maxmemory", "NOREPLICAS": "min-replicas-to-write"}[code]
    client.config_set(setting, 1)

    def end() -> None:
        client.config_set(setting, 0)

    return end


@pytest.mark.parametrize("code", list(REFUSALS))
async def test_processes_without_a_lease_wait_for_a_server_that_refuses(
    own_server: EmbeddedServer, app_name: str, code: str
) -> None:
    app = shop(app_name, own_server.url)
    app.configure(lease=0.6)
    with redis.Redis.from_url(own_server.url, decode_responses=True) as client, Lines() as lines:
        async with trio.open_nursery() as nursery:
            processes = [await start(nursery, app, page=page) for page in (WORKER, ROUTER)]
            for queue in ("default", EVENTS):
                keys = app.queue(queue)
                for worker in client.zrange(keys.leases, 0, -1):
                    call = leases.recover(
                        keys, worker=worker, max_deliveries=3, limit=9, ttl=60, message_limit=1_000_000
                    )
                    await app.aperform(call)
            end = refuse(client, code)

            def refused(event: str) -> bool:
                return any(code in line["why"] for line in lines.of(event))

            for word in ("worker", "router"):
                if code == "OOM":  # what they do takes no memory: they begin again at once
                    await until(lambda word=word: bool(lines.of(f"{word}:restarted")))  # type: ignore[misc]
                    await until(lambda word=word: bool(lines.of(f"{word}:started")))  # type: ignore[misc]
                else:
                    await until(partial(refused, f"{word}:restarted"))
            assert code != "OOM" or not any(refused(f"{word}:restarted") for word in ("worker", "router"))
            end()
            for word in ("worker", "router"):
                await until(lambda word=word: bool(lines.of(f"{word}:started")))  # type: ignore[misc]
            await app.tasks["one"].adelay()
            for process in processes:
                await process.stop()
    app.close()


@pytest.mark.parametrize("code", list(REFUSALS))
async def test_a_process_that_meets_a_refusal_at_its_first_start_ends_with_one_line(
    server: EmbeddedServer, app_name: str, code: str
) -> None:
    proxy = FaultyProxy(str(server.socket))
    proxy.refusal = Refusal(REFUSALS[code])
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.run)
        app = shop(app_name, proxy.url)
        with pytest.raises(BaseExceptionGroup) as caught:
            await start(nursery, app)
        nursery.cancel_scope.cancel()
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # several steps come up at once, and each may be refused
    assert isinstance(error, BrokerReplied)
    assert error.code == code
    assert "\n" not in str(error)
    app.close()


@pytest.mark.usefixtures("interruptible")
async def test_a_mandatory_step_of_the_application_that_is_refused_is_waited_for_too(
    server: EmbeddedServer, app_name: str
) -> None:
    proxy, refusing = FaultyProxy(str(server.socket)), False

    async def prepare() -> None:
        if refusing:
            raise BrokerReplied(REFUSALS["OOM"], code="OOM")

    incarnations = Incarnations(proxy)
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            await nursery.start(proxy.run)
            app = App(app_name, broker=proxy.url, bootsteps=[BootStep("prepare", prepare)])
            CURRENT.set(incarnations)
            process = await start(nursery, app)
            refusing = True
            incarnations._end.set()
            await until(lambda: any("prepare" in line["why"] for line in lines.of("worker:restarted")))
            refusing = False
            await until(lambda: incarnations.up == 2)
            await process.stop()
            nursery.cancel_scope.cancel()
    app.close()


@pytest.mark.parametrize("word", ["worker", "router", "scheduler", "publisher", "controller"])
@pytest.mark.usefixtures("interruptible")
async def test_process_that_restarts_after_an_error_sends_no_stopping(
    server: EmbeddedServer, app_name: str, short_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """STOPPING=1 cannot be taken back: systemd, or a Controller, ends the process some time later."""
    app, heard, address = shop(app_name, server.url), list[str](), str(short_path / "notify")
    app.configure(publisher_socket=str(short_path / "publisher"))
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    status = ProcessStatus(app=app.name)
    with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM) as systemd:
        await systemd.bind(address)

        async def listen() -> None:
            while True:
                heard.extend((await systemd.recv(4096)).decode().split("\n"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            incarnations = Incarnations(FaultyProxy(str(server.socket)))
            incarnations.error = REFUSED
            CURRENT.set(incarnations)
            process = await start(nursery, app, page=pages(short_path)[word], process_status=status)
            incarnations._end.set()
            await until(lambda: heard.count("READY=1") == 2)
            assert "STOPPING=1" not in heard
            status.mark_stopping()
            await process.stop()
            await until(lambda: "STOPPING=1" in heard)
            nursery.cancel_scope.cancel()
    app.close()


UNAVAILABLE = BrokerUnavailable("away")
REFUSED = BrokerReplied("OOM", code="OOM")


@pytest.mark.parametrize(
    ("error", "first", "first_of_several", "later"),
    [
        (LeaseLost("lost"), True, True, True),
        (BootFailed("late"), False, False, True),
        (UNAVAILABLE, False, True, True),
        *[(BrokerReplied(refusal, code=refusal), False, True, True) for refusal in REFUSALS],
        (BrokerReplied("ERR what", code="ERR"), False, False, False),
        (BrokerReplied("WRONGTYPE", code="WRONGTYPE"), True, True, True),
        (UnreadableReply("odd"), True, True, True),
        (BrokerDenied("no"), False, True, True),
        (BootStepFailed("no"), False, False, False),
        (ValueError("no"), False, False, False),
        (ExceptionGroup("all", [REFUSED]), False, False, False),
    ],
)
def test_what_a_process_survives(
    error: Exception, *, first: bool, first_of_several: bool, later: bool
) -> None:
    assert should_restart(error, is_first=True, unreachable_reported=False) is first
    assert should_restart(error, is_first=True, unreachable_reported=True) is first_of_several
    assert should_restart(error, is_first=False, unreachable_reported=False) is later
