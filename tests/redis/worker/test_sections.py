"""Sections: parts of a task that are tried again, ignored or given up by rules of their own, on a worker."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
import redis
import trio
import trio.to_thread

from celery5 import (
    App,
    Misconfigured,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    TaskFailed,
    current_job,
    optional,
    poisonous,
    retry,
)
from celery5.errors import TaskRejected
from tests.redis.worker.workers import Lines, entries, of_kind, working

KINDS = ["trio", "asyncio", "thread"]


def quick(retries: int, **more: Any) -> Any:
    """A section that is tried again at once."""
    return retry(max_retries=retries, backoff=0, **more)


async def failed(app: App, body: Any, kind: str = "trio", **options: Any) -> TaskFailed:
    """How a job that does `body` failed."""
    task = of_kind(app, kind, body).options(**options)
    async with working(app):
        with pytest.raises(TaskFailed) as caught, trio.fail_after(30):
            await (await task.adelay()).aget()
    return caught.value


async def done(app: App, body: Any, kind: str = "trio", **options: Any) -> Any:
    """What a job that does `body` came to."""
    async with working(app):
        with trio.fail_after(30):
            return await (await of_kind(app, kind, body).options(**options).adelay()).aget()


@pytest.mark.parametrize("kind", KINDS)
async def test_each_retry_section_has_a_counter_of_its_own_and_the_task_keeps_its_retries(
    app: App, redis_client: "redis.Redis", kind: str
) -> None:
    runs: Counter[str] = Counter()

    def body() -> None:
        runs["begun"] += 1
        with quick(4, name="first"):
            runs["first"] += 1
            if runs["first"] <= 3:
                raise OSError("first")
        with quick(5):
            runs["second"] += 1
            if runs["second"] <= 2:
                raise OSError("second")
        raise ValueError("after both")

    failure = await failed(app, body, kind)
    # 3 and 2 times for the sections, and then as often as the task's own policy has it.
    assert runs == {"begun": 3 + 2 + 3, "first": 8, "second": 5}
    assert (failure.type, failure.reason, failure.attempt) == ("ValueError", "exhausted", 8)
    (fields,) = entries(redis_client, app.queue("default").dead)
    kept = json.loads(fields[b"job"])
    name = f"{__name__}.{body.__qualname__}:6"  # the line of its `with`
    assert kept["sections"] == {"first": 3, name: 2}
    assert [(past["attempt"], past["message"]) for past in kept["failures"]] == [
        (4, "second"), (5, "second"), *[(number, "after both") for number in (6, 7, 8)]
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_job_dies_when_the_retries_of_its_section_are_used_up(app: App, kind: str) -> None:
    runs: list[int] = []

    def body() -> None:
        runs.append(1)
        with quick(1):
            raise OSError("always")

    failure = await failed(app, body, kind, max_retries=50)
    assert (failure.reason, len(runs)) == ("exhausted", 2)


@pytest.mark.parametrize("kind", KINDS)
async def test_poisonous_beats_autoretry(app: App, kind: str) -> None:
    runs: list[int] = []

    def body() -> None:
        runs.append(1)
        with poisonous():
            raise ValueError("never again")

    failure = await failed(app, body, kind, autoretry_for=[ValueError], max_retries=5)
    assert (failure.reason, failure.type, runs) == ("poisonous", "ValueError", [1])


@pytest.mark.parametrize("kind", KINDS)
async def test_what_an_optional_section_raises_is_a_warning_and_the_job_goes_on(app: App, kind: str) -> None:
    def body() -> int:
        with optional(ConnectionError, TimeoutError):
            raise ConnectionResetError("the raw data")
        return 7

    with Lines() as lines:
        assert await done(app, body, kind) == 7
    (line,) = lines.of("section:ignored")
    assert (line["level"], line["error"]) == ("warning", "ConnectionResetError: the raw data")
    assert line["section"] == f"{__name__}.{body.__qualname__}:1:14"
    (job,) = lines.of("job")
    assert (line["job"], line["task"], line["worker"]) == (job["job"], job["task"], job["worker"])


async def test_optional_ignores_only_what_it_names(app: App) -> None:
    def body() -> None:
        with optional(ConnectionError, TimeoutError):
            raise ValueError("wrong")

    assert (await failed(app, body)).reason == "exhausted"


async def test_optional_section_continues_the_job_when_retries_are_used_up(
    app: App,
) -> None:
    runs: list[int] = []

    def body() -> int:
        with optional():
            runs.append(1)
            with quick(2):
                raise OSError("always")
        return len(runs)

    assert await done(app, body, max_retries=0) == 3


async def test_a_retry_section_around_another_counts_for_itself(app: App) -> None:
    runs: list[Any] = []

    def body() -> None:
        with quick(2, name="outer"), quick(3, name="inner"):
            job = current_job()
            assert job is not None
            runs.append(dict(job.sections or {}))
            raise OSError("always")

    assert (await failed(app, body, max_retries=0)).reason == "exhausted"
    assert runs[-1] == {"inner": 3, "outer": 2}
    assert len(runs) == 1 + 3 + 2


async def test_the_innermost_section_decides(app: App) -> None:
    runs: Counter[str] = Counter()

    def tried_again() -> None:
        runs["again"] += 1
        with poisonous(), quick(2):
            raise OSError("poisonous only when the retries are used up")

    def never() -> None:
        runs["never"] += 1
        with quick(5), optional(), poisonous():
            raise OSError("poisonous at once")

    async with working(app):
        for body, name in ((tried_again, "again"), (never, "never")):
            task = app.task(name=name)(body)
            with pytest.raises(TaskFailed, match="poisonous"):
                await (await task.adelay()).aget()
    assert runs == {"again": 3, "never": 1}


async def test_an_error_that_is_caught_outside_of_its_section_has_been_handled(app: App) -> None:
    def body() -> int:
        error = ValueError("one object, raised twice")
        for section in (poisonous(), quick(1), quick(0)):
            try:
                with section:
                    raise error
            except ValueError:
                pass
        return 1

    assert await done(app, body) == 1


async def test_sections_hold_in_what_a_job_starts_elsewhere(app: App) -> None:
    """In the children of a nursery, in threads and in asyncio tasks: a group of errors is looked through."""
    runs: Counter[str] = Counter()

    async def child() -> None:
        with quick(2, name="child"):
            raise OSError("in a child")

    def poison() -> None:
        with poisonous():
            raise OSError("in a thread")

    @app.task(name="nursery")
    async def nursery() -> None:
        runs["nursery"] += 1
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            inner.start_soon(child)
            outer.start_soon(trio.sleep_forever)

    @app.task(name="thread", autoretry_for=[OSError])
    async def thread() -> None:
        runs["thread"] += 1
        with quick(3):
            await trio.to_thread.run_sync(poison)

    @app.task(name="taskgroup", loop="asyncio")
    async def taskgroup() -> None:
        runs["taskgroup"] += 1
        async with asyncio.TaskGroup() as group:
            group.create_task(child())

    @app.task(name="elsewhere", loop="asyncio")
    async def elsewhere() -> None:
        runs["elsewhere"] += 1
        await asyncio.to_thread(poison)

    reasons = {}
    async with working(app):
        for task in (nursery, thread, taskgroup, elsewhere):
            with pytest.raises(TaskFailed) as caught:
                await (await task.adelay()).aget()
            reasons[task.name] = caught.value.reason
    assert runs == {"nursery": 3, "thread": 1, "taskgroup": 3, "elsewhere": 1}
    assert list(reasons.values()) == ["exhausted", "poisonous", "exhausted", "poisonous"]


async def test_optional_ignores_a_group_only_when_it_may_ignore_all_of_it(app: App) -> None:
    @app.task(max_retries=0)
    async def grouped(names: list[str]) -> str:
        async def fail(name: str) -> None:
            raise {"connection": ConnectionError, "value": ValueError, "reject": Reject}[name](name)

        with optional(ConnectionError):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(fail, name)
        return "went on"

    async with working(app):
        assert await (await grouped.adelay(["connection", "connection"])).aget() == "went on"
        with pytest.raises(TaskFailed, match="ExceptionGroup"):
            await (await grouped.adelay(["connection", "value"])).aget()
        with pytest.raises(TaskRejected):
            await (await grouped.adelay(["connection", "reject"])).aget()


@pytest.mark.parametrize("kind", KINDS)
async def test_no_section_swallows_a_word_to_the_worker(app: App, kind: str) -> None:
    runs: list[int] = []

    def body() -> None:
        runs.append(1)
        with quick(5), poisonous(), optional():
            if len(runs) == 1:
                raise Retry(countdown=0)
            raise Reject("seen it")

    async with working(app):
        with pytest.raises(TaskRejected, match="seen it"):
            await (await of_kind(app, kind, body).adelay()).aget()
    assert len(runs) == 2


async def test_optional_section_passes_on_cancellation_and_time_limits(app: App) -> None:
    def told() -> None:
        with optional():
            raise SoftTimeLimitExceeded("clean up and end")

    def named() -> str:
        with optional(SoftTimeLimitExceeded):
            raise SoftTimeLimitExceeded("clean up and end")
        return "ended by itself"

    async def cancelled() -> str:
        with trio.move_on_after(0.01), optional():
            await trio.sleep_forever()
        return "went on after the scope, not after the section"

    async with working(app):
        with pytest.raises(TaskFailed, match="SoftTimeLimitExceeded"):
            await (await app.task(name="told", max_retries=0)(told).adelay()).aget()
        assert await (await app.task(name="named")(named).adelay()).aget() == "ended by itself"
        assert "scope" in await (await app.task(name="cancelled")(cancelled).adelay()).aget()
    with pytest.raises(Misconfigured, match=r"optional\(...\) has <class 'KeyboardInterrupt'>"):
        optional(KeyboardInterrupt)  # type: ignore[arg-type]


async def test_a_section_waits_no_longer_than_its_cap(app: App) -> None:
    runs: list[str] = []

    @retry(backoff=5, cap=0.02, jitter=False)
    async def again_in_place() -> None:
        runs.append("in place")
        if len(runs) == 1:
            raise OSError("first")

    @app.task
    async def task() -> int:
        await again_in_place()
        runs.append("in the section")
        with retry(backoff=5, cap=0.02, jitter=False):
            if len(runs) < 5:
                raise OSError("second")
        return len(runs)

    with Lines() as lines:
        async with working(app):
            assert await (await task.adelay()).aget(30) == 5
    assert [line["delay"] for line in lines.of("section:retried")] == [0.02]
    assert [line["delay"] for line in lines.of("job") if line["state"] == "RETRY"] == [0.02]


async def test_counters_go_with_the_message_to_another_worker(app: App) -> None:
    seen: list[tuple[str, Any]] = []

    @app.task(max_retries=0)
    async def section() -> int:
        job = current_job()
        assert job is not None
        seen.append((job.worker, job.sections))
        with retry(max_retries=2, backoff=0.3, jitter=False, name="it"):
            raise OSError("always")

    async with working(app, name="one"):
        sent = await section.adelay()
        with trio.fail_after(30):
            while not seen:
                await trio.sleep(0.005)
    async with working(app, name="two"):
        with pytest.raises(TaskFailed) as caught:
            await sent.aget(timeout=30)
    assert [counts for _, counts in seen] == [None, {"it": 1}, {"it": 2}]
    assert seen[0][0] != seen[1][0]
    assert (caught.value.attempt, caught.value.reason) == (3, "exhausted")


async def test_names_made_without_end_do_not_make_a_job_run_without_end(app: App) -> None:
    runs: list[int] = []

    def body() -> None:
        runs.append(1)
        with quick(1, name=f"section {len(runs)}"):
            raise OSError("always")

    assert (await failed(app, body)).reason == "exhausted"
    assert len(runs) == 101


async def test_retry_in_place_does_not_count_as_an_attempt(app: App) -> None:
    runs: list[Any] = []

    @retry(max_retries=2, backoff=0)
    async def fetch() -> int:
        runs.append(1)
        if len(runs) < 3:
            raise ConnectionError("not yet")
        return len(runs)

    @app.task
    async def task() -> tuple[int, int]:
        job = current_job()
        assert job is not None
        return await fetch(), job.attempt

    with Lines() as lines:
        async with working(app):
            assert await (await task.adelay()).aget() == (3, 1)
    assert [line["failed"] for line in lines.of("section:retried")] == [1, 2]
