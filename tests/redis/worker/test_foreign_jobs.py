"""Foreign jobs: what the code of one worker cannot run goes to workers whose code can, and costs it nothing."""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import redis
import trio

from celery5 import App, Event, JobState, ResultTimeout, TaskFailed, agather, current_job
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.job.messages import Refusal
from celery5.protocol.job.story import JobDetails, explain_awaited_code
from tests.redis.scaling.test_resource_budgets import run_cli
from tests.redis.worker.workers import (
    LEASE,
    Lines,
    held,
    start,
    until,
    until_async,
    working,
)

GRACE = 30.0
EXPIRES = 1.0


class Versions:
    """Two versions of one application's code; the newer one knows tasks and parameters that the older one does not."""

    def __init__(self, name: str, url: str, **settings: Any) -> None:
        settings = {
            "lease": LEASE,
            "concurrency": 20,
            "cpu_slots": 4,
            "unknown_task_grace": GRACE,
            **settings,
        }
        self.old, self.new = (App(name, broker=url, **settings) for _ in range(2))
        self.apps = (self.old, self.new)
        self.runs: list[tuple[Any, int, int]] = []

    def note(self, value: Any) -> Any:
        """Note which attempt of which job runs."""
        job = current_job()
        assert job is not None
        self.runs.append((value, job.attempt, len(job.sections or ())))
        return value

    def declare(self, app: App, kind: Any, name: str, *, resized: bool = True, **options: Any) -> Any:
        """Declare a task; `resized` says whether it has the parameter that came later."""

        def now(n: int, size: int = 1) -> int:
            return int(self.note(n)) * size

        def before(n: int) -> int:
            return int(self.note(n))

        function = now if resized else before
        if kind == "thread":
            return app.task(name=name, **options)(function)

        if resized:

            async def later(n: int, size: int = 1) -> int:
                return now(n, size)

            return app.task(name=name, loop=kind, **options)(later)

        async def earlier(n: int) -> int:
            return before(n)

        return app.task(name=name, loop=kind, **options)(earlier)


@pytest.fixture
def versions(url: str, app_name: str) -> Iterator[Versions]:
    both = Versions(app_name, url)
    yield both
    for app in both.apps:
        app.close()


async def send(how: str, task: Any, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Send jobs one by one, with a pause in which workers read, or all at once."""
    if how == "bulk":
        return list(await task.app.asend_many([task.s(*call) for call in calls]))
    sent: list[Any] = []
    for call in calls:
        sent.append(await task.adelay(*call))
        await trio.sleep(0.002)
    return sent


def is_idle(client: "redis.Redis", app: App) -> bool:
    """Return whether no worker has a job, and none is on the stream."""
    return client.xlen(app.queue("default").stream) == 0 and not any(held(client, app).values())


@pytest.mark.parametrize("how", ["delay", "bulk"])
@pytest.mark.parametrize("changed", ["task", "signature"])
@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_jobs_that_old_workers_cannot_run_are_run_by_new_ones(
    versions: Versions, redis_client: "redis.Redis", kind: str, changed: str, how: str
) -> None:
    if changed == "signature":
        versions.declare(versions.old, kind, "resize", resized=False)
    task = versions.declare(versions.new, kind, "resize")
    with Lines() as lines:
        async with working(versions.old, name="old"), working(versions.new, name="new"):
            sent = await send(how, task, [(n, 2) for n in range(40)])
            assert await agather(sent, timeout=20) == [2 * n for n in range(40)]
    assert Counter(value for value, *_ in versions.runs) == Counter(range(40))
    assert {attempt for _, attempt, _ in versions.runs} == {1}
    assert redis_client.xlen(versions.new.queue("default").dead) == 0
    refusals = Counter(line["job"] for line in lines.of("job") if line["state"] == "HELD")
    assert refusals, "the old worker has read some"
    assert max(refusals.values()) == 1, "each at most once"


async def test_foreign_jobs_wait_while_no_worker_knows_them_and_run_when_one_comes(
    versions: Versions, redis_client: "redis.Redis"
) -> None:
    task = versions.declare(versions.new, "trio", "resize")
    async with trio.open_nursery() as nursery:
        old = await start(nursery, versions.old, name="old")
        sent = await send("bulk", task, [(n,) for n in range(40)])

        async def all_wait() -> bool:
            return all([await job.astatus() is JobState.HELD for job in sent])

        await until_async(all_wait)
        assert is_idle(redis_client, versions.old), "the old worker keeps none of them"
        new = await start(nursery, versions.new, name="new")
        assert await agather(sent, timeout=20) == list(range(40))
        await new.stop()
        await old.stop()
    assert [value for value, *_ in versions.runs] == list(range(40)), "in the order in which they were sent"


@pytest.mark.parametrize("bad", ["task", "arguments"])
async def test_a_job_that_is_bad_for_every_worker_is_dead_after_the_grace_period(
    url: str, app_name: str, redis_client: "redis.Redis", bad: str
) -> None:
    versions = Versions(app_name, url, unknown_task_grace=1.5)
    for app in versions.apps:
        versions.declare(app, "trio", "resize", resized=app is versions.new)
    keys = versions.new.queue("default")
    fields = {"task": "nobody.knows"} if bad == "task" else {"task": "resize", "args": ["three"]}
    async with working(versions.old, name="old"), working(versions.new, name="new"):
        began = trio.current_time()
        redis_client.xadd(keys.stream, {"job": json.dumps({"v": 1, "id": "bad", **fields})})
        await until(lambda: redis_client.xlen(keys.dead) == 1, within=20)
        assert 1.5 <= trio.current_time() - began < 6
        with pytest.raises(TaskFailed) as caught:
            await versions.new.result("bad").aget(timeout=5)
    assert caught.value.reason == ("unknown-task" if bad == "task" else "bad-arguments")
    assert caught.value.attempt == 1
    for app in versions.apps:
        app.close()


async def test_without_a_grace_period_a_job_that_nobody_knows_is_dead_at_once(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    versions = Versions(app_name, url, unknown_task_grace=0.0)
    task = versions.declare(versions.new, "trio", "resize")
    async with working(versions.old, name="old"):
        with pytest.raises(TaskFailed, match="unknown-task"):
            await (await task.adelay(1)).aget(timeout=10)
        async with working(versions.new, name="new"):
            sent = await send("bulk", task, [(n,) for n in range(40)])
            assert await agather(sent, timeout=20) == list(range(40)), "a live worker knows these"
    for app in versions.apps:
        app.close()


async def test_foreign_jobs_keep_to_limits_keys_and_priorities(
    versions: Versions, redis_client: "redis.Redis"
) -> None:
    running, most = 0, 0

    @versions.new.task(name="narrow", limit=1)
    async def narrow(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(0.005)
        running -= 1
        return int(versions.note(n))

    async with working(versions.old, name="old"):
        sent = [await narrow.options(priority="low" if n < 5 else "high").adelay(n) for n in range(10)]
        once = narrow.options(key="one")
        first, second = await once.adelay(100), await once.adelay(100)
        assert first.id == second.id

        async def all_wait() -> bool:
            return all([await job.astatus() is JobState.HELD for job in [*sent, first]])

        await until_async(all_wait)
        third = await once.adelay(100)
        assert third.id == first.id, "a job that waits for other code has its key"
        async with working(versions.new, name="new"):
            await agather([*sent, first], timeout=20)
    assert most == 1
    assert [value for value, *_ in versions.runs] == [5, 6, 7, 8, 9, 100, 0, 1, 2, 3, 4]
    assert redis_client.hgetall(versions.new.queue("default").slots) == {}


async def test_foreign_jobs_and_others_do_not_wait_for_each_other(versions: Versions) -> None:
    known, _ = [versions.declare(app, "trio", "known") for app in versions.apps]
    task = versions.declare(versions.new, "trio", "resize")
    async with working(versions.old, name="old"):
        foreign = await send("bulk", task, [(n,) for n in range(400)])

        async def all_wait() -> bool:
            return await foreign[-1].astatus() is JobState.HELD

        await until_async(all_wait)
    others = await send("bulk", known, [(1000 + n,) for n in range(400)])
    async with working(versions.new, name="new"):
        await agather(foreign, timeout=20)
        await agather(others, timeout=20)
    order = [value >= 1000 for value, *_ in versions.runs]
    half = order[: len(order) // 2]
    assert 50 < sum(half) < 350, "both kinds have run in the first half"


async def test_a_foreign_job_that_is_revoked_or_expires_never_runs(
    versions: Versions, redis_client: "redis.Redis"
) -> None:
    task = versions.declare(versions.new, "trio", "resize")
    async with working(versions.old, name="old"):
        revoked, kept = await task.adelay(1), await task.adelay(2)
        expired = await task.options(expires=0.3).adelay(3)

        async def all_wait() -> bool:
            return all([await job.astatus() is JobState.HELD for job in (revoked, kept, expired)])

        await until_async(all_wait)
        await revoked.arevoke()
        await trio.sleep(0.3)
        async with working(versions.new, name="new"):
            assert await kept.aget(timeout=20) == 2
            await until_async(lambda: has_state(expired, JobState.EXPIRED))
            assert await revoked.astatus() is JobState.REVOKED
    assert [value for value, *_ in versions.runs] == [2]


async def has_state(result: Any, state: JobState) -> bool:
    """Return whether a job is in that state."""
    return await result.astatus() is state


async def test_a_foreign_job_that_fails_is_tried_again_with_all_its_retries(versions: Versions) -> None:
    @versions.new.task(name="moody", max_retries=2, backoff=0.05)
    async def moody() -> int:
        attempt: int = versions.note("moody") and current_job().attempt  # type: ignore[union-attr]
        if attempt < 3:
            raise OSError("not yet")
        return attempt

    async with working(versions.old, name="old"), working(versions.new, name="new"):
        assert await agather([await moody.adelay() for _ in range(5)], timeout=20) == [3] * 5
    assert Counter(attempt for _, attempt, _ in versions.runs) == {1: 5, 2: 5, 3: 5}


async def test_steps_of_workflows_and_their_undo_go_to_workers_that_know_them(versions: Versions) -> None:
    for app in versions.apps:
        versions.declare(app, "trio", "first")
    undone: list[int] = []

    @versions.new.task(name="undo")
    async def undo(n: int) -> None:
        undone.append(n)

    first = versions.new.tasks["first"]

    @versions.new.task(name="second", undo=undo)
    async def second(n: int) -> int:
        return n + 1

    @versions.new.task(name="fail", max_retries=0)
    async def fail(n: int) -> int:
        raise ValueError(n)

    async with working(versions.old, name="old"), working(versions.new, name="new"):
        runs = [await (first.s(n) | second.s()).astart() for n in range(20)]
        assert [await run.aget(timeout=20) for run in runs] == [n + 1 for n in range(20)]
        failing = [await (first.s(n) | second.s() | fail.s()).astart() for n in range(20)]
        for run in failing:
            with pytest.raises(TaskFailed):
                await run.aget(timeout=20)
        await until(lambda: sorted(undone) == list(range(1, 21)))


async def test_an_argument_whose_class_has_changed_goes_to_a_worker_that_reads_it(versions: Versions) -> None:
    class Old(msgspec.Struct, forbid_unknown_fields=True):
        n: int

    class New(msgspec.Struct, forbid_unknown_fields=True):
        n: int
        size: int

    got: list[int] = []

    @versions.old.task(name="on_placed")
    async def on_old(event: Old) -> None:
        got.append(-1)

    @versions.new.task(name="on_placed")
    async def on_new(event: New) -> None:
        got.append(event.size)

    async with working(versions.old, name="old"), working(versions.new, name="new"):
        await agather([await on_new.adelay(New(n, 7)) for n in range(20)], timeout=20)
    assert got == [7] * 20


async def test_an_old_scheduler_fires_the_schedule_of_a_task_that_only_new_workers_know(
    versions: Versions,
) -> None:
    task = versions.declare(versions.new, "trio", "resize")
    async with (
        working(versions.old, page=SCHEDULER, name="clock"),
        working(versions.old, name="old"),
        working(versions.new, name="new"),
    ):
        await versions.new.schedule.aadd(task.s(7), 0.1, name="often")
        await until(lambda: len(versions.runs) >= 5)
        await versions.new.schedule.aremove("often")
    assert {(value, attempt) for value, attempt, _ in versions.runs} == {(7, 1)}


async def test_the_subscriber_of_an_event_with_a_changed_field_runs_where_it_is_known(
    versions: Versions,
) -> None:
    got: list[str] = []

    @versions.old.task(name="on_placed")
    async def on_old(order: int) -> None:
        got.append("old")

    @versions.new.event(name="Placed")
    class Placed(Event):
        order: str

    @Placed.subscribe
    @versions.new.task(name="on_placed")
    async def on_new(order: str) -> None:
        got.append(order)

    async with (
        working(versions.old, page=ROUTER, name="router"),
        working(versions.old, name="old"),
        working(versions.new, name="new"),
    ):
        for n in range(20):
            await Placed.adelay(order=f"order-{n}")
        await until(lambda: len(got) >= 20)
    assert sorted(got) == sorted(f"order-{n}" for n in range(20))


@pytest.mark.parametrize("corrupt", ["code_versions", "foreign_jobs"])
async def test_what_redis_refuses_of_foreign_jobs_ends_no_worker_and_holds_up_no_job(
    versions: Versions, redis_client: "redis.Redis", corrupt: str
) -> None:
    keys = versions.new.queue("default")
    known = versions.declare(versions.old, "trio", "known")
    task = versions.declare(versions.new, "trio", "resize")
    async with working(versions.old, name="old") as old:
        redis_client.delete(getattr(keys, corrupt))
        redis_client.set(getattr(keys, corrupt), "not what it should be")
        foreign = await send("bulk", task, [(n,) for n in range(300)])
        others = await send("delay", known, [(n,) for n in range(20)])
        assert await agather(others, timeout=20) == list(range(20))
        assert not old.ended.is_set()
        redis_client.delete(getattr(keys, corrupt))
    assert len(foreign) == 300


@pytest.mark.parametrize("changed", ["task", "signature"])
async def test_a_foreign_job_shows_which_code_it_waits_for_and_until_when(
    versions: Versions, changed: str
) -> None:
    code, reason = "has task resize", "unknown-task"
    if changed == "signature":
        versions.declare(versions.old, "trio", "resize", resized=False)
        code, reason = "has task resize with other parameters than [0-9a-f]+", "bad-arguments"
    task = versions.declare(versions.new, "trio", "resize")
    async with working(versions.old, name="old"):
        job = await task.adelay(1, 2)
        await until_async(partial(has_state, job, JobState.HELD))
        details = await versions.old.afind(job.id)
        assert details is not None
        assert GRACE - 10 < details.due - time.time() <= GRACE
        assert re.fullmatch(
            f"a worker whose code {code}: none is live; if none comes by noon, it is dead: {reason}",
            explain_awaited_code(details, "noon"),
        )
        counted = (await versions.old.ainfo("default")).queues["default"]
        assert (counted.held, counted.scheduled) == (0, 1), "it is HELD, and not at a limit"
        async with working(versions.new, name="new"):
            assert await job.aget(20) == 2
    details = await versions.old.afind(job.id)
    assert details is not None
    assert explain_awaited_code(details, "noon") == ""


def test_a_foreign_job_that_a_live_worker_knows_waits_for_its_free_slot() -> None:
    details = JobDetails("id", "default", JobState.HELD, "resize", waits_for_code=Refusal(("abc", "def")))
    assert explain_awaited_code(details, "noon") == (
        "a worker whose code has task resize with other parameters than abc, def: "
        "one was live at the last look, and gets it when it has a free slot; the next look is at noon"
    )


@pytest.mark.parametrize(
    ("way", "state", "grace"),
    [
        ("revoke", JobState.REVOKED, GRACE),
        ("purge", JobState.REVOKED, GRACE),
        ("expire", JobState.EXPIRED, GRACE),
        ("die", JobState.DEAD, 3.0),
        ("run", JobState.SUCCESS, GRACE),
    ],
)
async def test_a_foreign_job_that_waits_no_more_is_not_counted_whatever_ended_it(
    url: str, app_name: str, redis_client: "redis.Redis", way: str, state: JobState, grace: float
) -> None:
    versions = Versions(app_name, url, unknown_task_grace=grace)
    task = versions.declare(versions.new, "trio", "resize").options(
        expires=EXPIRES if way == "expire" else None
    )
    app = versions.old

    async def read_awaits() -> str:
        return (await app.ainfo()).queues["default"].awaits

    async def waits() -> bool:
        return await read_awaits() == "2 jobs wait for a worker whose code has task resize"

    async def none_waits() -> bool:
        return await read_awaits() == ""

    async def have_ended() -> bool:
        return [await job.astatus() for job in sent] == [state] * 2

    async with working(app, name="old"), trio.open_nursery() as nursery:
        sent_at = trio.current_time()
        sent = await app.asend_many([task.s(1), task.s(2)])
        await until_async(waits)
        if way == "revoke":
            await sent[0].arevoke()
            assert await read_awaits() == "1 job waits for a worker whose code has task resize"
            await sent[1].arevoke()
        elif way == "purge":
            assert await app.aempty("default") == 2
        elif way in ("run", "expire"):
            await trio.sleep_until(sent_at + (EXPIRES if way == "expire" else 0))
            await start(nursery, versions.new, name="new")
        await until_async(have_ended)
        await until_async(none_waits)
        keys = app.queue("default")
        assert not redis_client.exists(keys.foreign_jobs, keys.foreign_list("resize -"))
        nursery.cancel_scope.cancel()
    for other in versions.apps:
        other.close()


@pytest.mark.parametrize("is_unfit", [False, True])
async def test_a_task_that_no_worker_has_is_named_on_every_surface(
    url: str, app_name: str, *, is_unfit: bool
) -> None:
    settings: dict[str, Any] = {"broker": url, "lease": LEASE, "unknown_task_grace": GRACE}
    app = App(app_name, inbox_signatures=False, **settings)
    newer = App(app_name, **settings)

    @newer.task(name="shop.nope")
    async def nope() -> None: ...

    code = "a worker whose code has task shop.nope"
    if is_unfit:
        code += " with other parameters, which the arguments fit"

        @app.task(name="shop.nope")
        async def older(number: int) -> None: ...

    line = f"2 jobs wait for {code}"
    async with working(app):
        sent = await newer.asend_many([nope.s(), nope.s()])

        async def waits() -> bool:
            return (await app.ainfo()).queues["default"].awaits == line

        await until_async(waits)
        for command in ["info"], ["doctor"], ["queue", "list"]:
            assert f"queue default: {line}" in await trio.to_thread.run_sync(run_cli, app, command)
        (listed,) = json.loads(await trio.to_thread.run_sync(run_cli, app, ["queue", "list", "--json"]))
        assert listed["awaits"] == line
        overview = await app.metrics.aoverview()
        assert [queue.awaits for queue in overview.queues] == [line]
        with pytest.raises(ResultTimeout, match=rf"HELD on queue .* waits for {code}"):
            await sent[0].aget(timeout=0.01)
    app.close()
