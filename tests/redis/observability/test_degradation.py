"""What may fail without stopping work: each feature is broken, all jobs are done, and one event warns of it."""

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest
import redis
import trio

from celery5 import App, progress
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.health import HealthCheck
from celery5.logs.log import Log, LogWriter
from celery5.observability import IncomingJob, MetricsReport, Middleware, no_workers
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.degradation import OPTIONAL_FEATURES
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.protocol.scheduling.declaration import every
from celery5.services.health import health_checks, status_port, vital_sources
from celery5.services.health.status_port import StatusPort
from celery5.services.health.vitals import ProcessStatus
from celery5.services.observability import alert_delivery, metrics_reporter
from celery5.services.scaling import reporter
from celery5.services.worker import progress_reports
from tests.redis.observability.alerted import Receiver
from tests.redis.worker.workers import Lines, start, until, until_async, working
from tests.trio.health.test_status_port import free_port

JOBS = 50
TRIES = 3
"""Refusals that are awaited, so that a warning for each try would be seen."""


@pytest.fixture
def app(own_server: EmbeddedServer, app_name: str) -> Iterator[App]:
    """An application whose every optional feature is in use, and tried again quickly."""
    one = App(app_name, broker=own_server.url, lease=30, metrics_interval=0.05, prioritise="saturation")

    @one.task(name="double")
    async def double(n: int) -> int:
        progress(n)
        return 2 * n

    yield one
    one.close()


@pytest.fixture
def own_client(own_server: EmbeddedServer) -> Iterator["redis.Redis"]:
    """A client of the server of the test."""
    with redis.Redis.from_url(own_server.url) as client:
        yield client


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again quickly."""
    monkeypatch.setattr(health_checks, "RETRY_DELAY", 0.05)
    monkeypatch.setattr(status_port, "RETRY_DELAY", 0.05)
    monkeypatch.setattr(vital_sources, "DEPTH_INTERVAL", 0.05)
    monkeypatch.setattr(reporter, "REPORT_INTERVAL", 0.05)
    monkeypatch.setattr(progress_reports, "WRITE_INTERVAL", 0.05)


def allow_all_but(prefix: str) -> list[str]:
    """Return the patterns of an ACL that no key fits which begins with `prefix`, and every other key does."""
    plain = [f"~{prefix[:at]}[^{letter}]*" for at, letter in enumerate(prefix)]
    return [re.sub(r"(?<=\[\^)([\\\]^-])", r"\\\1", pattern) for pattern in plain]


@contextmanager
def refused(client: "redis.Redis", prefix: str) -> Iterator[None]:
    """Refuse every command on keys that begin with `prefix`, for a while."""
    untyped: Any = client
    untyped.execute_command("ACL", "LOG", "RESET")
    untyped.execute_command("ACL", "SETUSER", "default", "resetkeys", *allow_all_but(prefix))
    try:
        yield
    finally:
        untyped.execute_command("ACL", "SETUSER", "default", "allkeys")


def count_refusals(client: "redis.Redis") -> int:
    """Return how many commands the server has refused."""
    entries: Any = client.acl_log()
    return sum(int(entry["count"]) for entry in entries)


def count_wrong_types(client: "redis.Redis") -> int:
    """Return how many commands have found a key of another type."""
    found: Any = client.info("errorstats")
    return int(found.get("errorstat_WRONGTYPE", {}).get("count", 0))


async def do_jobs(app: App) -> None:
    """Send jobs, and check that each of them is done once with its result."""
    sent = await app.asend_many([app.tasks["double"].s(n) for n in range(JOBS)])
    assert [await job.aget(timeout=30) for job in sent] == [2 * n for n in range(JOBS)]


def check_warned_once(lines: Lines, event: str, *, level: str = "warning") -> dict[str, Any]:
    """Check that this event has warned once, and that nothing has ended a step or an incarnation."""
    warnings = [line for line in lines.of(event) if line["level"] == level]
    assert len(warnings) == 1, warnings
    assert lines.of("worker:restarted") + lines.of("step:failed") + lines.of("step:crashed") == []
    return warnings[0]


@dataclass(frozen=True)
class RefusedKeys:
    """A feature whose keys are refused."""

    event: str
    # What its keys begin with, after `celery5:{app`.
    prefix: str


REFUSED = [
    RefusedKeys("metrics:report-failed", "}:metrics:reports"),
    RefusedKeys("metrics:rollup-interrupted", "}:metrics:turn"),
    RefusedKeys("history:write-failed", "}:history:"),
    RefusedKeys("alerts:interrupted", "}:alerts"),
    RefusedKeys("progress:write-failed", ":default}:progress:"),
    RefusedKeys("inbox:read-failed", "}:inbox:"),
    RefusedKeys("health:share-failed", "}:check"),
    RefusedKeys("autoscale:report-failed", "}:report:"),
]


@pytest.mark.parametrize("feature", REFUSED, ids=[refusal.event for refusal in REFUSED])
async def test_jobs_run_and_one_warning_is_logged_when_keys_are_refused(
    app: App, own_client: "redis.Redis", feature: RefusedKeys
) -> None:
    check = app.health_check.add(HealthCheck("bank", scope="global", period=0.2))
    end = trio.Event()

    @app.task(name="long")
    async def run_long() -> str:
        progress(1, 4)
        await end.wait()
        return "done"

    status = ProcessStatus(app=app.name)
    with Lines() as lines, refused(own_client, f"celery5:{{{app.name}{feature.prefix}"):
        async with working(app, process_status=status, name="one"):
            long = await run_long.adelay()
            await do_jobs(app)

            async def has_tried() -> bool:
                check.report("unhealthy", "no answer")
                own_client.publish(app.keys.inbox("one"), "")
                return count_refusals(own_client) >= TRIES

            await until_async(has_tried)
            end.set()
            assert await long.aget(timeout=30) == "done"
            await do_jobs(app)
            assert status.get_readiness().ok
    check_warned_once(lines, feature.event)


async def test_jobs_run_and_one_warning_is_logged_when_a_key_is_not_measured(
    app: App, own_client: "redis.Redis"
) -> None:
    app.configure(status_port=free_port())
    status = ProcessStatus(app=app.name)
    own_client.set(app.queue("default").dead, "no stream")
    with Lines() as lines:
        async with working(app, process_status=status):
            await do_jobs(app)
            await until(lambda: count_wrong_types(own_client) >= 2 * TRIES)
            await do_jobs(app)
            assert status.get_readiness().ok
    own_client.delete(app.queue("default").dead)
    check_warned_once(lines, "depths:read-failed")


async def test_jobs_run_and_one_warning_is_logged_when_counting_fails(
    app: App, own_client: "redis.Redis"
) -> None:
    status = ProcessStatus(app=app.name)
    own_client.set(app.queue("default").flow, "no hash")
    with Lines() as lines:
        async with working(app, process_status=status):
            for _ in range(TRIES):
                before = count_wrong_types(own_client)
                await do_jobs(app)
                await until(lambda before=before: count_wrong_types(own_client) > before)  # type: ignore[misc]
            assert status.get_readiness().ok
    own_client.delete(app.queue("default").flow)
    check_warned_once(lines, "flow:count-failed")


class BrokenOutlet:
    """An outlet that cannot send anything."""

    def __init__(self) -> None:
        self.calls = 0

    async def send(self, _report: MetricsReport) -> None:
        self.calls += 1
        raise OSError("no route to host")


async def test_an_outlet_that_raises_warns_once(app: App) -> None:
    outlet = BrokenOutlet()
    app.metrics.add_outlet(outlet)
    with Lines() as lines:
        async with working(app):
            await do_jobs(app)
            await until(lambda: outlet.calls >= TRIES)
            await do_jobs(app)
    assert check_warned_once(lines, "metrics:report-failed")["to"] == "BrokenOutlet"


async def test_an_outlet_that_fails_three_times_gets_no_metrics_until_a_probe_succeeds(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_reporter, "OUTLET_BREAKER", BreakerPolicy(reset=0.5))
    outlet = FailingOutlet()
    app.metrics.add_outlet(outlet)
    status = ProcessStatus(app=app.name)

    def read_state() -> dict[str, float]:
        families = [family for family in status.metric_families() if family.name == "celery5_breaker_state"]
        return {
            family.labels["of"]: family.value
            for metric_family in families
            for family in metric_family.samples
        }

    with Lines() as lines:
        async with working(app, name="w1", process_status=status):
            await until(lambda: lines.of("breaker:tripped") != [])
            assert outlet.calls == 3
            found = read_state()
            assert found["outlet:FailingOutlet"] == 2
            assert {"connection:redis", "connection:reader", "connection:push"} < found.keys()
            assert "webhook:alerts" not in found
            (reply,) = await app.control.asend("health", to="w1")
            assert ("outlet:FailingOutlet", "open", "it gets no metrics") in [
                (breaker["of"], breaker["state"], breaker["effect"]) for breaker in reply.answer["breakers"]
            ]
            outlet.fails = False
            await until(lambda: lines.of("breaker:closed") != [])
            await until(lambda: outlet.calls >= 5)
    assert lines.of("breaker:tripped")[0]["breaker"] == "outlet:FailingOutlet"


class FailingOutlet:
    """An outlet that fails while it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = True

    async def send(self, _report: MetricsReport) -> None:
        self.calls += 1
        if self.fails:
            raise OSError("no route to host")


async def test_a_webhook_of_alerts_that_refuses_warns_once(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_delivery, "RETRY_DELAYS", (0.01,) * 100)
    status = ProcessStatus(app=app.name)
    with Receiver() as receiver, Lines() as lines:
        receiver.status = 503
        app.configure(**receiver.settings)
        app.alert("lonely", no_workers(), for_=0)
        await app.tasks["double"].options(queue="elsewhere").adelay(1)
        async with working(app, process_status=status):
            await do_jobs(app)
            await until(lambda: receiver.attempts >= TRIES)
            await do_jobs(app)
            assert status.get_readiness().ok
    check_warned_once(lines, "alerts:webhook-failed")


class BrokenExporter(Middleware):
    """A middleware whose exporter raises around every job, once it is received and once it is run."""

    def __init__(self) -> None:
        self.calls = 0

    def received(self, jobs: Sequence[IncomingJob]) -> None:
        raise ConnectionError("no collector")

    def running(self, job: IncomingJob) -> None:
        self.calls += 1
        raise ConnectionError("no collector")


async def test_middleware_that_raises_warns_once(app: App) -> None:
    middleware = BrokenExporter()
    app.add_middleware(middleware)
    status = ProcessStatus(app=app.name)
    with Lines() as lines:
        async with working(app, process_status=status):
            await do_jobs(app)
            assert status.get_readiness().ok
    assert middleware.calls == JOBS
    assert check_warned_once(lines, "middleware:failed")["middleware"] == "BrokenExporter"


async def test_an_action_whose_audit_entry_is_refused_is_done_and_warns_once(
    app: App, own_client: "redis.Redis"
) -> None:
    @app.task(name="act")
    async def act() -> bool:
        return await app.limits.asuspend("other", why="the bank is closed")

    @app.task(name="other")
    async def other() -> None: ...

    with Lines() as lines, refused(own_client, app.keys.audit):
        async with working(app):
            await (await act.adelay()).aget(timeout=30)
            await do_jobs(app)
            assert (await app.limits.alist())["other"].suspended is not None
            await app.limits.aresume("other")
    assert check_warned_once(lines, "audit:write-failed")["action"] == "task:suspend"


class FullDisk(StringIO):
    """A stream on a disk that is full."""

    is_full = True
    tries = 0

    def write(self, text: str, /) -> int:
        """Refuse, or take the text."""
        self.tries += 1
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


async def test_jobs_run_and_losses_are_logged_when_the_log_is_not_writable(
    app: App, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = FullDisk()
    status = ProcessStatus(app=app.name)
    with LogWriter(stream) as writer:
        async with working(app, process_status=status):
            await do_jobs(app)
            await until(lambda: stream.tries >= TRIES and writer.counts.lost >= JOBS)
            await do_jobs(app)
            assert status.get_readiness().ok
            stream.is_full = False
            await until(lambda: "celery5:log:dropped" in stream.getvalue())
            await do_jobs(app)
    assert capsys.readouterr().err.count("log messages are lost") == 1
    assert stream.getvalue().count("celery5:log:dropped") == 1


async def test_while_schedules_cannot_be_read_jobs_are_done_and_afterwards_they_catch_up(
    app: App, own_client: "redis.Redis"
) -> None:
    await app.schedule.aadd(app.tasks["double"].s(1), every(0.2), name="often")
    status = ProcessStatus(app=app.name)
    with Lines() as lines:
        async with working(app):
            with refused(own_client, app.keys.schedule_queues):
                async with trio.open_nursery() as nursery:
                    scheduler = await start(nursery, app, page=SCHEDULER, process_status=status)
                    await do_jobs(app)
                    await until(lambda: count_refusals(own_client) >= TRIES)
                    assert status.get_readiness().ok
                    untyped: Any = own_client
                    untyped.execute_command("ACL", "SETUSER", "default", "allkeys")
                    await until(lambda: bool(lines.of("schedule:fired")))
                    await scheduler.stop()
        await app.schedule.aremove("often")
    check_warned_once(lines, "timetable:interrupted")
    assert lines.of("scheduler:restarted") == []


async def test_while_the_status_port_is_taken_jobs_are_done_and_one_event_warns(app: App) -> None:
    status = ProcessStatus(app=app.name)
    with Lines() as lines, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = StatusPort(
            process_status=status,
            log=Log(worker="one", app=app.name),
            port=taken.getsockname()[1],
            host="127.0.0.1",
        )
        async with trio.open_nursery() as nursery, working(app, process_status=status):
            await nursery.start(port.run)
            await do_jobs(app)
            await until(lambda: len(lines.of("status:port-taken")) >= TRIES)
            assert status.get_readiness().ok
            nursery.cancel_scope.cancel()
    check_warned_once(lines, "status:open-failed", level="error")


BROKEN_HERE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (refusal.event for refusal in REFUSED),
        test_jobs_run_and_one_warning_is_logged_when_keys_are_refused,
    ),
    "depths:read-failed": test_jobs_run_and_one_warning_is_logged_when_a_key_is_not_measured,
    "alerts:webhook-failed": test_a_webhook_of_alerts_that_refuses_warns_once,
    "middleware:failed": test_middleware_that_raises_warns_once,
    "audit:write-failed": test_an_action_whose_audit_entry_is_refused_is_done_and_warns_once,
    "log:dropped": test_jobs_run_and_losses_are_logged_when_the_log_is_not_writable,
    "timetable:interrupted": test_while_schedules_cannot_be_read_jobs_are_done_and_afterwards_they_catch_up,
    "flow:count-failed": test_jobs_run_and_one_warning_is_logged_when_counting_fails,
    "status:open-failed": test_while_the_status_port_is_taken_jobs_are_done_and_one_event_warns,
}
"""The test that breaks each feature."""


def test_each_feature_that_may_fail_is_broken_here() -> None:
    assert set(BROKEN_HERE) == {feature.event for feature in OPTIONAL_FEATURES}
