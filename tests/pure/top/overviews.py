"""An overview for tests of the screen: a queue that grows, one that nobody works on, a task that fails, a worker."""

from celery5.cli.top.readings import ActiveJob, Reading
from celery5.protocol.job.dead_letters import DeadJob
from celery5.protocol.job.failure_groups import DeadJobGrouping
from celery5.protocol.observability.overview import (
    DueSchedule,
    LastError,
    Overview,
    OverviewTotals,
    QueueOverview,
    QueueVerdict,
    TaskOverview,
    UnreachableBroker,
    WorkerOverview,
)
from celery5.protocol.observability.queue_flow import QueueFlow
from celery5.protocol.scaling.slot_use import SlotUse

NOW = 1_800_000_000.0


def make_queue(
    name: str, verdict: QueueVerdict, *, waiting: int = 0, is_paused: bool = False
) -> QueueOverview:
    """A queue with one worker."""
    return QueueOverview(
        name=name,
        backlog=waiting,
        held_by="",
        waiting=waiting,
        running=2,
        held=0,
        scheduled=0,
        dead=3,
        runs=0,
        oldest=240.0 if waiting else None,
        workers=1,
        is_paused=is_paused,
        flow=QueueFlow(52.0, 40.0, 12.0),
        verdict=verdict,
    )


def make_task(name: str, *, fails: bool = False) -> TaskOverview:
    """A task, which fails since two minutes or not."""
    error = LastError(type="ValueError", message="no money", at=NOW - 5, queue="orders", job="a1")
    return TaskOverview(
        name=name,
        queues=("orders",),
        ended=1000,
        failed=300 if fails else 0,
        failed_share=0.3 if fails else 0.0,
        ended_per_minute=120.0,
        failed_per_minute=36.0 if fails else 0.0,
        run={"p50": 0.02, "p95": 1.25, "p99": 3.0},
        wait={"p50": 0.001, "p95": 0.5, "p99": 0.6},
        failing_since=int(NOW) - 120 if fails else None,
        last_error=error if fails else None,
    )


def make_worker(name: str, health: str = "ok") -> WorkerOverview:
    """A worker of a queue."""
    return WorkerOverview(
        name=name,
        queues=("orders",),
        running=2,
        health=health,
        host="web",
        uptime=7200.0,
        slots=100,
        slots_by_kind={"trio": SlotUse(2, 4, 100)},
        ended=12345,
        lag=0.002,
        memory=60 * 1024 * 1024,
        reported=4.0,
    )


def make_overview(*, unreachable: str = "") -> Overview:
    """The overview."""
    grows = QueueVerdict("grows", "grows by 12/s", needs_attention=True)
    return Overview(
        app="shop",
        at=NOW,
        since=NOW - 3600,
        totals=OverviewTotals(
            ended_per_second=40.0,
            failed_per_second=0.6,
            backlog=12000,
            waiting=12000,
            running=4,
            held=0,
            scheduled=0,
            dead=6,
            workers=1,
            routers=0,
            schedulers=0,
            controllers=0,
            publishers=0,
        ),
        queues=(
            make_queue("mail", QueueVerdict("steady", "steady")),
            make_queue("orders", grows, waiting=12000),
            make_queue("slow", QueueVerdict("paused", "paused"), waiting=7, is_paused=True),
        ),
        tasks=(make_task("shop.charge", fails=True), make_task("shop.mail")),
        workers=(make_worker("web1"), make_worker("web2", "not ready")),
        schedules=(DueSchedule("nightly", "shop.report", "orders", NOW + 60),),
        unreachable=(UnreachableBroker(unreachable, "refused"),) if unreachable else (),
    )


def make_dead(number: int, *, task: str = "shop.charge", message: str = "no money") -> DeadJob:
    """A dead letter."""
    return DeadJob(
        queue="orders",
        entry=f"{number}-0",
        id=f"job{number}",
        task=task,
        args=[],
        kwargs={},
        attempt=1,
        replays=0,
        key="",
        reason="retries-exhausted",
        type="ValueError",
        message=message,
        error_args=(),
        traceback="Traceback (most recent call last):\n  boom\nValueError: no money\n",
        worker="web1",
        died=NOW - number,
        sent=NOW - 100,
        failures=(),
        raw=b"",
    )


def make_reading(**more: object) -> Reading:
    """What was read for each view."""
    jobs = (ActiveJob("j1", "shop.charge", "web1", "orders", 12.0, 1, "order=7"),)
    grouping = DeadJobGrouping()
    for job in (make_dead(1), make_dead(2), make_dead(3, task="shop.mail")):
        grouping.add(job)
    dead = grouping.finish(looked_at=3, total=3, last=None).groups
    parts: dict[str, object] = {"overview": make_overview(), "dead": dead, "jobs": jobs}
    return Reading(**{**parts, **more})  # type: ignore[arg-type]
