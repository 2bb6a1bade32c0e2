"""Queue depths: how far behind queues are, as /metrics and `info` tell it, and what it costs to know."""

import io
import time
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.calls import jobs, leases
from celery5.broker.calls import queues as queue_calls
from celery5.broker.keys import Keys
from celery5.errors import BrokerUnavailable
from celery5.logs.log import Log, LogWriter
from celery5.protocol.observability.exposition import format_exposition
from celery5.protocol.observability.queue_depth import QueueDepth
from celery5.services.health.vital_sources import QueueDepths
from celery5.services.health.vitals import ProcessStatus
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.health.test_probes import numbers, start
from tests.redis.worker.one_queue import Queue, command


def test_queue_depth_and_age_are_of_jobs_that_no_worker_has(
    queue: Queue,
) -> None:
    assert queue(queue_calls.get_queue_depth(queue.keys)) == QueueDepth(0, None, 0)
    queue.publish("a")  # before any worker came, so that there is no consumer group
    time.sleep(0.05)
    assert queue(queue_calls.get_queue_depth(queue.keys)).oldest >= 0.05
    queue.join("w")
    time.sleep(0.05)
    queue.publish("b")
    queue(jobs.publish_unique(queue.keys.on_lane("l"), [("c", command("c"), "", "", None)]))
    queue(leases.renew_lease(queue.keys, "w", lease=30))  # now the lane can be read
    old = queue(queue_calls.get_queue_depth(queue.keys))
    assert (old.waiting, old.dead) == (3, 0)
    assert old.oldest >= 0.1
    queue.read("w", count=1)
    younger = queue(queue_calls.get_queue_depth(queue.keys))
    assert younger.waiting == 2
    assert 0 <= younger.oldest < old.oldest + 30
    assert queue(queue_calls.get_queue_state(queue.keys)).oldest_waiting >= younger.oldest
    queue.read("w")
    assert queue(queue_calls.get_queue_depth(queue.keys)).waiting == 1  # the one of low priority
    assert queue(jobs.read_jobs([queue.keys.on_lane("l")], "w", count=9, block_seconds=0))
    assert queue(queue_calls.get_queue_depth(queue.keys)) == QueueDepth(0, None, 0, workers=1, running=3)
    assert queue(queue_calls.get_queue_state(queue.keys)).oldest_waiting is None


def test_a_deep_queue_costs_no_more_to_measure_than_an_empty_one(queue: Queue) -> None:
    queue.join("w")

    def commands() -> int:
        before = queue.client.info("commandstats")
        queue(queue_calls.get_queue_depth(queue.keys))
        after = queue.client.info("commandstats")
        return sum(
            after[name]["calls"] - before.get(name, {"calls": 0})["calls"]
            for name in after
            if name != "cmdstat_info"
        )

    few = commands()
    queue.publish(*map(str, range(2000)))
    assert commands() == few < 30


def test_jobs_that_wait_at_a_limit_are_counted_apart(queue: Queue) -> None:
    queue.client.hset(queue.keys.limited_counts, mapping={"shop.t": 10_000, "shop.u": 2})
    assert queue(queue_calls.get_queue_depth(queue.keys)) == QueueDepth(
        0, None, 0, held=10_002, backlog=10_002, held_tasks={"shop.t": 10_000, "shop.u": 2}
    )
    queue.client.delete(queue.keys.limited_counts)


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 120])
@pytest.mark.parametrize("lists", [1, 3, 90])
def test_the_oldest_job_at_a_limit_is_found_however_many_tasks_and_lists_there_are(
    queue: Queue, tasks: int, lists: int
) -> None:
    """Each task has parked lists; the first of each has the oldest job."""
    prefix, client = queue.keys.waiting_list_prefix, queue.client
    now = time.time()
    names = [f"t{number}" for number in range(tasks)]
    pipe = client.pipeline(transaction=False)
    for name in names:
        for number in range(lists):
            pipe.zadd(f"{prefix}full {name}", {f"k{number}": number})
            pipe.zadd(f"{prefix}parked {name} k{number}", {"": 0})
            pipe.zadd(f"{prefix}line {name}  k{number}", {f"{name}-{number}": (now - 100 + number) * 1e6})
    pipe.execute()
    client.hset(queue.keys.limited_counts, mapping=dict.fromkeys(names, lists))
    depth = queue(queue_calls.get_queue_depth(queue.keys))
    assert depth.held == tasks * lists
    assert depth.oldest is not None
    assert 99 <= depth.oldest <= 160
    assert queue(queue_calls.get_queue_state(queue.keys)).held == tasks * lists
    client.delete(queue.keys.limited_counts, *client.scan_iter(f"{prefix}*", count=10_000))


def test_held_jobs_that_have_expired_are_held_and_not_overdue(queue: Queue) -> None:
    client, jobs_held = queue.client, [f"j{number}" for number in range(500)]
    client.hset(queue.keys.limited_counts, mapping={"shop.t": 500, " expires": 500})
    client.zadd(queue.keys.due, dict.fromkeys(jobs_held, 1.0))
    client.hset(queue.keys.jobs, mapping=dict.fromkeys(jobs_held, "G shop.t  "))
    depth = queue(queue_calls.get_queue_depth(queue.keys))
    assert (depth.held, depth.scheduled, depth.overdue, depth.backlog) == (500, 0, 0, 500)
    client.delete(queue.keys.limited_counts, queue.keys.due, queue.keys.jobs)


def test_the_metrics_tell_of_jobs_that_wait_at_a_limit() -> None:
    vitals = ProcessStatus()
    vitals.depths["q"] = QueueDepth(0, None, 0, held=10_000, backlog=10_000)
    shown = format_exposition(vitals.metric_families())
    assert b'celery5_queue_depth{queue="q"} 10000' in shown
    assert b'celery5_queue_held{queue="q"} 10000' in shown


class Counted:
    """A way to a broker with so many queues, which counts commands; with `away` it is not there."""

    def __init__(self, queues: int) -> None:
        self.queues = [f"q{number:02}" for number in range(queues)]
        self.commands = 0
        self.away = False

    async def perform(self, call: Call[Any]) -> Any:
        self.commands += 1
        if self.away:
            raise BrokerUnavailable("away")
        return {} if "INFO" in call.words else self.queues  # of a server that says nothing of its memory

    async def perform_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self.commands += len(calls)
        if self.away:
            raise BrokerUnavailable("away")
        return [QueueDepth(7, 1.5, 2, backlog=7) for _ in calls]


def measuring(
    process_status: ProcessStatus, way: Counted, measured: Sequence[str] | None, *, measures: bool = True
) -> QueueDepths:
    """A service that measures queues on that way."""
    return QueueDepths(
        depth_brokers={"default": way},
        find_broker=lambda _queue: "default",
        keys=Keys("shop"),
        measured_queues=measured,
        is_measuring=measures,
        process_status=process_status,
        log=Log(worker="w", app="shop"),
    )


@pytest.mark.parametrize("queues", [1, 10, 200])
async def test_measuring_costs_less_than_a_command_a_second(autojump_clock: MockClock, queues: int) -> None:
    vitals, way = ProcessStatus(), Counted(queues)
    with trio.move_on_after(600):
        await measuring(vitals, way, None).run()
    assert 0 < way.commands <= 0.7 * 600
    assert vitals.depths == {}  # who has ended knows nothing


async def test_nothing_is_measured_where_nobody_can_see_it(autojump_clock: MockClock) -> None:
    way = Counted(3)
    with trio.move_on_after(600):
        await measuring(ProcessStatus(), way, None, measures=False).run()
    assert way.commands == 0


async def test_the_log_warns_once_of_queues_that_are_left_out(autojump_clock: MockClock) -> None:
    for queues, warned in ((64, 0), (70, 1)):
        stream = io.StringIO()
        with LogWriter(stream), trio.move_on_after(1000):
            await measuring(ProcessStatus(), Counted(queues), None).run()
        lines = [line for line in stream.getvalue().splitlines() if '"first":"q64"' in line]
        assert len(lines) == warned
        assert all('"queues":6' in line and "depths:truncated" in line for line in lines)


async def test_a_queue_of_a_broker_that_is_away_has_no_numbers_rather_than_old_ones(
    autojump_clock: MockClock,
) -> None:
    vitals, way = ProcessStatus(), Counted(2)
    async with trio.open_nursery() as nursery:
        await nursery.start(measuring(vitals, way, ["q01"]).run)
        await trio.sleep(1)
        assert vitals.depths == {"q01": QueueDepth(7, 1.5, 2, backlog=7)}
        assert b'celery5_queue_depth{queue="q01"} 7' in format_exposition(
            vitals.add_incarnation("far").metric_families()
        )
        way.away = True
        await trio.sleep(6)
        assert b"celery5_queue" not in format_exposition(vitals.metric_families())
        way.away = False
        await trio.sleep(6)
        assert vitals.depths.keys() == {"q01"}
        nursery.cancel_scope.cancel()


def test_a_workers_metrics_tell_how_far_behind_its_queues_are(staff: Staff) -> None:
    app = staff.app
    _, port = start(staff, concurrency=1)
    app.tasks["nap"].delay(60)
    wait_until(lambda: numbers(port)["celery5_jobs_running"] == 1)
    app.send_many([app.tasks["nap"].s(0) for _ in range(3000)])  # more than it reads ahead
    wait_until(lambda: numbers(port).get('celery5_queue_depth{queue="default"}', 0) > 0)
    found = numbers(port)
    assert found['celery5_queue_oldest_seconds{queue="default"}'] > 0
    assert found['celery5_queue_dead{queue="default"}'] == 0


def test_a_report_on_metrics_leaves_queues_to_whoever_rolls_reports_up() -> None:
    status = ProcessStatus()
    status.replace_depths((), {"mail": QueueDepth(1, 2.0, 3)})
    assert any(family.name == "celery5_queue_dead" for family in status.metric_families())
    report = status.report_maker.make(status.metric_families(), kind="worker")
    assert not [series for series in report.measurements.gauges if series[0].startswith("celery5_queue_")]
