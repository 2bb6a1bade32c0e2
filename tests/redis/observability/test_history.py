"""Reports of real workers become the history of an application, and each job counts once in it."""

import socket
import time
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.calls import observability as calls
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BrokerUnavailable, Misconfigured, UnknownQueue
from celery5.logs.log import Log
from celery5.observability.metrics import HistoryPoint
from celery5.observability.outlets import StatsDOutlet
from celery5.protocol.observability.report import Measurements, MetricsReport, compress
from celery5.protocol.observability.rollup import HOURS, MINUTES, MetricsGroup, name_point, pack_point
from celery5.protocol.observability.sketch import Sketch
from celery5.services.health.vitals import ProcessStatus
from celery5.services.observability import history_rollup
from celery5.services.observability.history_rollup import HistoryRollup
from tests.redis.worker.workers import LEASE, until, until_async, working

FAST: dict[str, Any] = {"metrics_interval": 0.1}


def declare(app: App) -> None:
    """Two tasks on their own queue."""

    @app.task(name="pay", queue="slow")
    async def pay() -> None: ...

    @app.task(name="fail", queue="slow", max_retries=0)
    async def fail() -> None:
        raise ValueError("no")


def count(points: list[HistoryPoint]) -> dict[str, int]:
    """How many jobs ended in each state."""
    total: dict[str, int] = {}
    for point in points:
        for task in point.tasks:
            for state, number in task.counts.items():
                total[state] = total.get(state, 0) + number
    return total


async def test_rollup_saves_what_it_read_while_reports_arrive_faster(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(app)
    saved: list[str] = []
    advance = calls.advance_rollup

    def note(*args: Any, **words: Any) -> Any:
        saved.append(words["cursor"])
        return advance(*args, **words)

    monkeypatch.setattr(calls, "REPORTS_READ", 1)
    monkeypatch.setattr(history_rollup, "FIRST_PAGE", 1)
    monkeypatch.setattr(calls, "advance_rollup", note)
    redis = await app.connections.get_async_driver()
    series = ("celery5_jobs_total", "queue", "slow", "state", "SUCCESS", "task", "pay")
    for number in range(1, 101):
        report = MetricsReport("w:1", "worker", number, Measurements(counters={series: 1.0}), frozenset())
        await redis.perform(calls.send_report(app.keys, "w:1", number, report.pack()))
    log = Log(worker="w", app=app.name)
    rollup = HistoryRollup(
        default_redis=redis,
        all_brokers={"default": redis},
        keys=app.keys,
        worker="w",
        metrics_interval=0.002,  # less than it takes to read them one by one
        log=log,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rollup.run)

        async def is_counted() -> bool:
            return count(await app.metrics.ahistory("slow")) == {"SUCCESS": 100}

        await until_async(is_counted)
        nursery.cancel_scope.cancel()
    log.finish()
    assert len(set(saved)) > 2, "each turn saves what it has read"


async def send(app: App, pays: int, fails: int = 0) -> None:
    """Send so many jobs."""
    jobs = [app.tasks["pay"].s() for _ in range(pays)] + [app.tasks["fail"].s() for _ in range(fails)]
    await app.asend_many(jobs)


async def test_what_two_workers_have_done_is_in_the_history_of_the_queue(app: App) -> None:
    app.configure(**FAST)
    declare(app)
    await send(app, 300, 20)
    async with working(app, name="one"), working(app, name="two"):

        async def is_counted() -> bool:
            return count(await app.metrics.ahistory("slow")) == {"SUCCESS": 300, "DEAD": 20}

        await until_async(is_counted)
    before = time.time()
    points = await app.metrics.ahistory("slow")
    assert all(point.at + point.seconds <= time.time() for point in points if point.is_over)
    assert all(point.at + point.seconds > before for point in points if not point.is_over)
    pay = next(task for point in points for task in point.tasks if task.task == "pay")
    assert pay.run is not None
    assert pay.wait is not None
    assert 0 <= pay.run["p50"] <= pay.run["p95"] <= pay.run["p99"] < 30
    assert 0 < pay.wait["p50"] < 60
    assert max(point.dead for point in points) <= 20


async def test_a_summary_adds_up_each_task_of_each_queue_since_the_full_hour(app: App) -> None:
    app.configure(**FAST)
    declare(app)
    await send(app, 30, 20)
    async with working(app):

        async def is_counted() -> bool:
            return count(list((await app.metrics.asummary()).values())) == {"SUCCESS": 30, "DEAD": 20}

        await until_async(is_counted)
    summary = (await app.metrics.asummary("slow", since=7200))["slow"]
    fail, pay = summary.tasks
    assert (fail.task, fail.counts, fail.failed_share) == ("fail", {"DEAD": 20}, 1.0)
    assert (pay.task, pay.counts, pay.failed_share) == ("pay", {"SUCCESS": 30}, 0.0)
    assert pay.run is not None
    assert 0 <= pay.run["p50"] <= pay.run["p95"] <= pay.run["p99"] < 30
    assert summary.at % 3600 == 0
    assert 7200 <= summary.seconds < 10800 + 60
    with pytest.raises(UnknownQueue, match="no queue 'nobody' here; used so far: "):
        await app.metrics.asummary("nobody")
    with pytest.raises(UnknownQueue):
        await app.metrics.ahistory("nobody")


async def test_the_history_of_all_queues_adds_up_what_each_has_measured(
    app: App, redis_client: "redis.Redis"
) -> None:
    at = int(time.time()) // 60 * 60 - 120
    redis_client.hset(app.keys.metrics_state, "index", compress(["", "one", "two"]))
    for queue, jobs, oldest in (("one", 2.0, 7.0), ("two", 3.0, 5.0)):
        counters: dict[tuple[str, ...], float] = {
            ("celery5_jobs_total", "state", "SUCCESS", "task", "pay"): jobs
        }
        gauges: dict[tuple[str, ...], float] = {
            ("celery5_queue_depth",): jobs,
            ("celery5_queue_oldest_seconds",): oldest,
        }
        group = MetricsGroup(waiting={HOURS.name: [], MINUTES.name: [at]})
        redis_client.hset(app.keys.metrics_state, f"group:{queue}", group.pack())
        point = pack_point(Measurements(counters=counters, gauges=gauges))
        redis_client.hset(app.keys.metrics_state, name_point(MINUTES, at, queue), point)
    (both,) = await app.metrics.ahistory()
    assert (both.at, both.depth, both.oldest, count([both])) == (at, 5.0, 7.0, {"SUCCESS": 5})
    (two,) = await app.metrics.ahistory("two")
    assert (two.depth, two.oldest, count([two])) == (3.0, 5.0, {"SUCCESS": 3})
    redis_client.delete(app.keys.metrics_state)


async def test_a_summary_of_hours_has_the_percentiles_of_all_of_them(
    app: App, redis_client: "redis.Redis"
) -> None:
    hour = int(time.time()) // 3600 * 3600
    points = list[tuple[int, Measurements]]()
    for ago, seconds in ((2, 1.0), (1, 100.0)):
        point = Measurements()
        sketch = point.sketches["celery5_job_run_seconds", "task", "pay"] = Sketch()
        for _ in range(100):
            sketch.add(seconds)
        point.counters["celery5_jobs_total", "state", "SUCCESS", "task", "pay"] = 100
        points.append((hour - ago * 3600, point))
    group = MetricsGroup(waiting={HOURS.name: [at for at, _ in points], MINUTES.name: []})
    redis_client.hset(
        app.keys.metrics_state, mapping={"index": compress(["slow"]), "group:slow": group.pack()}
    )
    for at, point in points:
        redis_client.hset(app.keys.metrics_state, name_point(HOURS, at, "slow"), pack_point(point))
    (pay,) = (await app.metrics.asummary("slow", since=7200))["slow"].tasks
    assert pay.counts == {"SUCCESS": 200}
    assert pay.run is not None
    assert list(pay.run) == ["p50", "p95", "p99"]
    assert list(pay.run.values()) == pytest.approx([1, 100, 100], rel=0.05)
    (lately,) = (await app.metrics.asummary("slow", since=time.time() - hour + 60))["slow"].tasks
    assert lately.counts == {"SUCCESS": 100}
    redis_client.delete(app.keys.metrics_state)


async def test_the_last_jobs_of_a_worker_that_stops_are_reported(app: App) -> None:
    app.configure(metrics_interval=3600 / 12)
    declare(app)
    await send(app, 30)
    async with working(app, burst=True, queues=("slow",)) as worker:
        await worker.done.wait()
    app.configure(**FAST)
    async with working(app, queues=("default",)):

        async def is_counted() -> bool:
            return count(await app.metrics.ahistory("slow")) == {"SUCCESS": 30}

        await until_async(is_counted)


async def test_nothing_is_stored_without_an_interval(app: App, redis_client: "redis.Redis") -> None:
    app.configure(metrics_interval=0)
    declare(app)
    await send(app, 3)
    async with working(app, burst=True) as worker:
        await worker.done.wait()
    assert not [key for key in redis_client.scan_iter(f"*{app.name}*") if b":metrics:" in key]


async def test_every_key_of_the_history_has_a_time_to_live(app: App, redis_client: "redis.Redis") -> None:
    app.configure(**FAST)
    declare(app)
    await send(app, 3)
    async with working(app):

        async def is_counted() -> bool:
            return bool(count(await app.metrics.ahistory("slow")))

        await until_async(is_counted)
        found = [key for key in redis_client.scan_iter(f"*{app.name}*") if b":metrics:" in key]
        assert {key.split(b":metrics:")[1].split(b":")[0] for key in found} == {
            b"reports",
            b"sent",
            b"state",
            b"turn",
        }
        assert all(redis_client.pttl(key) > 0 for key in found)


async def test_what_was_counted_while_redis_was_unreachable_is_not_lost(
    app_name: str, own_server: EmbeddedServer
) -> None:
    own_app = App(app_name, broker=own_server.url, lease=LEASE, **FAST)
    declare(own_app)
    await send(own_app, 50)

    async def is_counted() -> bool:
        try:
            return count(await own_app.metrics.ahistory("slow")) == {"SUCCESS": 50, "DEAD": 5}
        except BrokerUnavailable:  # it is not back yet
            return False

    status = ProcessStatus(app=own_app.name)
    async with working(own_app, process_status=status):
        await until(lambda: status.jobs.count_by_state() == {"SUCCESS": 50})
        await trio.to_thread.run_sync(own_server.kill)
        await until(lambda: status.report_maker.has_pending)
        status.jobs.count_unstarted("slow", "pay", "DEAD", 5)
        await trio.to_thread.run_sync(own_server.revive)
        await until_async(is_counted)


async def test_a_report_that_comes_twice_counts_once(app: App) -> None:
    redis_driver = await app.connections.get_async_driver()
    packed = MetricsReport("host:1", "worker", 1, Measurements()).pack()
    for _ in range(3):
        await redis_driver.perform(calls.send_report(app.keys, "host:1", 1, packed))
    waiting = await redis_driver.perform(calls.read_reports(app.keys, ""))
    assert len(waiting) == 1


async def test_only_one_of_two_that_save_a_group_does(app: App) -> None:
    redis_driver = await app.connections.get_async_driver()

    async def save(before: str, after: str, value: str) -> bool:
        states = [
            calls.StateChange(f"group:{name}", before if name == "slow" else "", after, [change])
            for name in (f"of-{value}", "slow")
            for change in [("set", f"group:{name}", value, "")]
        ]
        return await redis_driver.perform(calls.save_rollup(app.keys, states))

    assert await save("", "5-0/1", "first")
    assert not await save("", "6-0/1", "second")
    assert await save("5-0/1", "6-0/2", "third")
    names = ["group:slow", "mark:group:slow", "group:of-second", "group:of-third"]
    assert await redis_driver.perform(calls.read_state(app.keys, names)) == {
        "group:slow": b"third",
        "mark:group:slow": b"6-0/2",
        "group:of-third": b"third",
    }


async def test_only_one_of_two_notes_up_to_which_report_all_is_rolled_up(app: App) -> None:
    redis_driver = await app.connections.get_async_driver()
    assert await redis_driver.perform(calls.advance_rollup(app.keys, before="", cursor="5-0"))
    assert not await redis_driver.perform(calls.advance_rollup(app.keys, before="", cursor="6-0"))
    assert await redis_driver.perform(calls.advance_rollup(app.keys, before="5-0", cursor="6-0"))


async def test_statsd_gets_what_redis_gets(app: App) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(30)
        app.configure(**FAST, statsd=f"udp://127.0.0.1:{listener.getsockname()[1]}?tags=dogstatsd")
        declare(app)
        await send(app, 7)
        async with working(app):
            total, pattern = 0, b"celery5.jobs_total:"
            with trio.fail_after(30):
                while total < 7:
                    datagram = await trio.to_thread.run_sync(listener.recv, 65536)
                    for line in datagram.split(b"\n"):
                        if line.startswith(pattern) and b"state:SUCCESS" in line:
                            total += int(line[len(pattern) :].partition(b"|")[0])
        assert total == 7


async def test_an_outlet_that_fails_is_logged_once_and_stops_nothing(app: App) -> None:
    app.configure(**FAST)
    declare(app)
    calls_made: list[MetricsReport] = []

    class Broken:
        async def send(self, report: MetricsReport) -> None:
            calls_made.append(report)
            raise OSError("no route")

    app.metrics.add_outlet(Broken())
    await send(app, 7)
    async with working(app):

        async def is_counted() -> bool:
            return count(await app.metrics.ahistory("slow")) == {"SUCCESS": 7}

        await until_async(is_counted)
        await until(lambda: len(calls_made) >= 3)
    assert len({report.number for report in calls_made}) == len(calls_made)


def test_an_address_that_is_none_is_refused_in_one_line() -> None:
    with pytest.raises(Misconfigured, match="statsd is 'stats:8125': give udp://host:port"):
        StatsDOutlet("stats:8125")
    with pytest.raises(Misconfigured, match="statsd"):
        _ = App("shop", statsd="stats:8125").settings
