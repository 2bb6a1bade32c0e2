"""Each operation shows and changes a sharded queue as it does a queue without shards: both are asked."""

import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, cast

import msgspec
import pytest
import trio

from celery5 import App, RetryPolicy
from celery5.dashboard.pages import PAGES
from celery5.events.event import Event
from celery5.operations.table import OPERATIONS
from tests.redis.dashboard.client import looking_at
from tests.redis.sharding.declaring import QUEUE, chain, declare
from tests.redis.worker.workers import LEASE, until_async, working

Row = dict[str, Any]

SHOWN: dict[str, list[Row]] = {
    "info:show": [{}],
    "top:show": [{}],
    "metrics:show": [{"queue": QUEUE}, {}],
    "metrics:history": [{"queue": QUEUE}],
    "doctor:run": [{}],
    "audit:list": [{}],
    "alert:list": [{}],
    "bulk:list": [{}],
    "dlq:read": [
        {"queue": [QUEUE]},
        {"queue": [QUEUE], "newest_first": True},
        {"queue": [QUEUE], "task": ["fail"], "limit": 3},
        {"queue": [QUEUE], "ids": ["fail-1"]},
        {},
    ],
    "dlq:count": [{"queue": [QUEUE]}, {"queue": [QUEUE], "by": "queue"}, {"by": "cause"}],
    "dlq:groups": [{"queue": [QUEUE]}, {}],
    "event:list": [{}],
    "event:show": [{"event": "Counted"}],
    "task:show": [
        {"id": "push-1"},
        {"id": "push-1", "queue": QUEUE},
        {"id": "fail-1", "queue": QUEUE},
        {"id": "waits-2", "queue": QUEUE},
    ],
    # Of those that have succeeded, the history keeps some.
    "task:search": [
        {"queue": QUEUE, "state": "DEAD"},
        {"queue": QUEUE, "state": "HELD"},
        {"queue": QUEUE, "state": "SENT"},
        {"queue": QUEUE, "state": "SCHEDULED"},
        {"state": "EXECUTING"},
    ],
    "task:list": [{}],
    "task:limits": [{}],
    "worker:active": [{}],
    "worker:stats": [{}],
    "worker:health": [{}],
    "worker:stack": [{"job": "stuck-1"}],
    "queue:list": [{}],
    "queue:show": [{"queue": QUEUE}],
    "queue:storage": [{}],
    "schedule:list": [{}],
    "schedule:show": [{"name": "nightly-1"}],
    "workflow:list": [{}],
    "workflow:show": [{"id": "run-1"}],
    "workflow:graph": [{"id": "run-1"}],
}
"""The parameters of each operation that shows queues, or what is on them."""

CHANGED: dict[str, list[Row]] = {
    "queue:pause": [{"queue": QUEUE}],
    "task:revoke": [
        {"ids": ["waits-1", "later-2"], "queue": QUEUE},
        {"ids": ["waits-3"]},
        {"ids": ["push-1"]},
    ],
    "task:send": [
        {"task": "push", "args": [1], "queue": QUEUE},
        {"task": "push", "args": [1], "countdown": 60},
    ],
    "worker:revoke": [{"id": "stuck-1"}],
    "schedule:add": [{"name": "hourly", "task": "push", "args": [1], "every": 3600.0, "queue": QUEUE}],
    "schedule:change": [{"name": "hourly", "every": 7200.0}],
    "schedule:pause": [{"name": "hourly"}],
    "schedule:resume": [{"name": "hourly"}],
    "schedule:trigger": [{"name": "hourly"}, {"name": "nightly-1"}],
    "schedule:remove": [{"name": "hourly"}],
    "event:send": [{"event": "Counted", "fields": {"n": 1}}],
    "task:suspend": [{"task": "push"}],
    "task:resume": [{"task": "push"}, {"task": "held"}],
    "task:limit": [{"task": "single", "limit": "3"}, {"task": "single", "limit": "none"}],
    "workflow:retry": [{"id": "run-1"}],
    "workflow:cancel": [{"id": "run-1"}],
    "bulk:retry": [{"queue": QUEUE, "dry_run": True}, {"queue": QUEUE}],
    "dlq:replay": [
        {"queue": [QUEUE], "task": ["fail"], "dry_run": True},
        {"queue": [QUEUE], "task": ["fail"], "limit": 5},
        {"queue": [QUEUE], "ids": ["run-2~1"]},
    ],
    "dlq:purge": [{"queue": [QUEUE], "limit": 2, "dry_run": True}, {"queue": [QUEUE], "task": ["fail"]}],
    "bulk:revoke": [{"queue": QUEUE, "task": "pu*", "dry_run": True}, {"queue": QUEUE, "task": "pu*"}],
    "queue:purge": [{"queue": QUEUE, "dry_run": True}, {"queue": QUEUE}],
    "queue:resume": [{"queue": QUEUE}],
}
"""The parameters of each operation that changes queues, or what is on them, in the order in which they are done."""

OF_OTHER_THINGS = {
    "alert": "rules history silence unsilence test",
    "bulk": "show stop resume",
    "config": "show",
    "event": "unsubscribe resubscribe",
    "worker": "ping shutdown reload retry-boot-step set-log-level budget prefetch concurrency run tell",
    "controller": "stop reload status restart scale",
    "autoscale": "status",
    "stream": "list show tail parked send release quarantine seek reset reshard",
    "dlq": "read-records replay-records purge-records",
    "workflow": "signal",
}
"""The operations on anything else: none has a queue among its parameters."""

OF_ONE_JOB = frozenset(
    {"task:show", "task:search", "dlq:read", "task:revoke", "worker:active", "worker:stack"}
) | {
    "workflow:list",
    "workflow:show",
    "workflow:graph",
}
"""The operations that show single jobs and runs, each with its shard."""
PAGES_OF_JOBS = frozenset({"jobs", "dead/jobs", "workflows"})
"""The pages that do."""


def test_each_operation_is_asked_of_a_sharded_queue_or_has_none() -> None:
    others = [f"{noun}:{verb}" for noun, verbs in OF_OTHER_THINGS.items() for verb in verbs.split()]
    assert sorted([*SHOWN, *CHANGED, *others]) == sorted(OPERATIONS)
    for name in others:
        fields = {field.name for field in msgspec.structs.fields(OPERATIONS[name].parameters)}
        assert not fields & {"queue", "queues"}, name
    assert {name for name in (*SHOWN, *CHANGED) if OPERATIONS[name].is_change} == set(CHANGED)


def make(name: str, url: str, shards: int) -> App:
    """An application with so many shards of its queue."""
    app = App(
        name,
        broker=url,
        lease=LEASE,
        cpu_slots=4,
        concurrency=20,
        retry_policy=RetryPolicy(max_retries=0),
        metrics_interval=0.1,
        grace_period=0.1,
        alert_dead=0,
        shards={QUEUE: shards},
    )

    async def push(n: int) -> int:
        return n

    async def fail(n: int) -> None:
        raise ValueError(f"no {n}")

    async def breaks(n: int) -> None:
        raise KeyError(n)

    async def stuck(n: int) -> None:
        await trio.sleep_forever()

    async def held(n: int) -> None: ...

    async def single(n: int) -> None: ...

    for function in (push, fail, breaks, stuck, held):
        declare(app, function)
    declare(app, single, limit=1)

    @app.event(name="Counted")
    class Counted(Event):
        n: int

    Counted.subscribe(app.tasks["push"])
    return app


async def fill(app: App) -> None:
    """Jobs in each state, runs, and schedules: all with the same ids."""
    tasks: Any = app.tasks
    await app.limits.asuspend("held", why="a test")
    for n in range(8):
        await tasks["push"].options(id=f"push-{n}").adelay(n)
        await tasks["fail"].options(id=f"fail-{n}").adelay(n)
        await tasks["held"].options(id=f"held-{n}").adelay(n)
        await chain(tasks["push"].s(1), tasks["breaks"].partial()).astart(id=f"run-{n}")
    for n in range(4):
        await tasks["stuck"].options(id=f"stuck-{n}").adelay(n)

    async def are_done() -> bool:
        state = (await app.ainfo()).queues[QUEUE]
        return (state.dead, state.running, state.held, state.waiting) == (16, 4, 8, 0)

    await until_async(are_done)
    await app.control.asend("pause-queue", {"queue": QUEUE})
    for n in range(12):
        await tasks["push"].options(id=f"waits-{n}", priority=("high", "low", "normal")[n % 3]).adelay(n)
        await tasks["push"].options(id=f"later-{n}", countdown=3600).adelay(n)
    for n in range(3):
        await tasks["push"].options(id=f"key-{n}", key=f"key-{n}", expires=600.0).adelay(n)
    for n in range(5):
        await app.schedule.aadd(tasks["push"].s(n), 3600.0, name=f"nightly-{n}")

    async def are_measured() -> bool:
        points = await app.metrics.ahistory(QUEUE)
        ended = sum(sum(task.counts.values()) for point in points for task in point.tasks)
        return ended == 32 and len((await app.jobs.asearch(queue=QUEUE, state="DEAD")).jobs) == 16

    await until_async(are_measured)


@pytest.fixture
def apps(url: str, app_name: str) -> Iterator[tuple[App, App]]:
    """One application whose queue has no shards, and one whose queue has four."""
    with (
        closing(make(f"{app_name}-plain", url, 1)) as plain,
        closing(make(f"{app_name}-shard", url, 4)) as sharded,
    ):
        yield plain, sharded


@asynccontextmanager
async def filled(apps: tuple[App, App]) -> AsyncGenerator[None, None]:
    """The applications with a worker each, while the block lasts."""
    async with working(apps[0], name="one"), working(apps[1], name="one"):
        for app in apps:
            await fill(app)
        try:
            yield
        finally:
            for app in apps:
                await app.limits.aresume("held")
                await app.control.asend("resume-queue", {"queue": QUEUE})


VOLATILE = frozenset(
    {"servers", "others", "results", "memory", "seconds", "at", "steps", "replies", "last_error", "attempts"}
)
"""Fields that differ between two applications, as between two times, or that are samples."""
BY_CHANCE = re.compile(r"-(plain|shard)\b|one:[\w-]+|[\w-]{22}|\b\d+(\.\d+)?( ms|-\d+)?\b|ahead of|behind")
"""The names of the applications, incarnations and ids, and numbers, in texts."""


def normalize(value: Any, *, is_of_jobs: bool) -> Any:
    """Return an answer without what differs by chance: times, names of incarnations, bytes, the order of jobs."""
    match value:
        case dict():
            fields = cast("dict[str, Any]", value)
            return {
                normalize(name, is_of_jobs=is_of_jobs): normalize(part, is_of_jobs=is_of_jobs)
                for name, part in fields.items()
                if name not in VOLATILE and not name.endswith("_bytes")
            }
        case list() | tuple():
            members = cast("Sequence[Any]", value)
            parts = [normalize(part, is_of_jobs=is_of_jobs) for part in members]
            return sorted(parts, key=repr)
        case float():
            return "a number"
        case str():
            text = re.sub(rf"{QUEUE}#\d", QUEUE, value) if is_of_jobs else value
            return BY_CHANCE.sub("X", text)
        case int() if value > 100_000:
            return "a time"
        case _:
            return value


async def ask_both(apps: tuple[App, App], name: str, row: Row) -> tuple[Any, Any]:
    """What the operation answers, without shards and with them."""
    answers: list[Any] = []
    operation = OPERATIONS[name]
    for app in apps:
        answer = await operation.perform(app, operation.parse(row, is_text=False))
        answers.append(normalize(msgspec.to_builtins(answer, enc_hook=repr), is_of_jobs=name in OF_ONE_JOB))
    return answers[0], answers[1]


async def test_each_operation_shows_a_sharded_queue_as_one_queue(apps: tuple[App, App]) -> None:
    async with filled(apps):
        for name, rows in SHOWN.items():
            for row in rows:
                without, sharded = await ask_both(apps, name, row)
                with trio.move_on_after(20):  # what the history adds comes within seconds, for each by itself
                    while sharded != without:
                        await trio.sleep(0.1)
                        without, sharded = await ask_both(apps, name, row)
                assert sharded == without, (name, row)
        async with looking_at(apps[1]) as client:
            for page in PAGES:
                if "{" not in page.path and page.path not in PAGES_OF_JOBS:
                    text = await client.look(page.path)
                    assert f"{QUEUE}#" not in text, text
        for app in apps:
            for family in await app.metrics.atotals():
                assert f"{QUEUE}#" not in repr(family)


async def test_each_operation_changes_a_sharded_queue_as_one_queue(apps: tuple[App, App]) -> None:
    async with filled(apps):
        for name, rows in CHANGED.items():
            for row in rows:
                without, sharded = await ask_both(apps, name, row)
                assert sharded == without, (name, row)
                await until_async(lambda: are_alike(apps))


async def are_alike(apps: tuple[App, App]) -> bool:
    """Whether the queues of both have the same counts, after all bulk actions."""
    counts: list[Any] = []
    for app in apps:
        if not all(status.ended for status in await app.bulk.alist()):
            return False
        state = (await app.ainfo(QUEUE)).queues[QUEUE]
        counts.append(
            (
                state.waiting,
                state.high,
                state.low,
                state.held,
                state.scheduled,
                state.dead,
                state.runs,
                state.keys,
            )
        )
    return bool(counts[0] == counts[1])
