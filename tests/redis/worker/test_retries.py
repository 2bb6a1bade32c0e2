"""Retries: how often, when and for what a job is tried again, and what a task may say to that itself, on a worker."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis
import trio

from celery5 import (
    App,
    BrokerUnavailable,
    JobState,
    Misconfigured,
    Reject,
    Retry,
    RetryPolicy,
    TaskFailed,
    current_job,
    optional,
    poisonous,
    retry,
)
from celery5.errors import TaskRejected
from celery5.tasks import CurrentJob
from tests.redis.worker.workers import Lines, entries, of_kind, working

KINDS = ["trio", "asyncio", "thread"]


async def end(sent: Any) -> TaskFailed:
    """How a job failed."""
    with pytest.raises(TaskFailed) as caught:
        await sent.aget(timeout=30)
    return caught.value


def history(client: "redis.Redis", app: App) -> list[tuple[int, str, str]]:
    """The failures that the last dead job remembers: attempt, type, message."""
    kept = json.loads(entries(client, app.queue("default").dead)[-1][b"job"])
    return [(failure.get("attempt", 1), failure["type"], failure["message"]) for failure in kept["failures"]]


def attempt() -> int:
    """Which attempt runs."""
    job = current_job()
    assert job is not None
    return job.attempt


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_asks_to_be_tried_again_after_so_many_seconds(app: App, kind: str) -> None:
    def body() -> int:
        if attempt() == 1:
            raise Retry(countdown=0.25)
        return attempt()

    with Lines() as lines:
        async with working(app):
            sent = await of_kind(app, kind, body).adelay()
            assert await sent.aget(timeout=30) == 2
    first, second = lines.of("job")
    assert (first["state"], first["delay"], second["attempt"]) == ("RETRY", 0.25, 2)
    assert second["timestamp"] - first["timestamp"] >= 0.25


async def test_requested_try_counts_and_keeps_its_failure(app: App, redis_client: "redis.Redis") -> None:
    @app.task
    async def asks(most: int | None) -> None:
        try:
            raise ConnectionError("refused")
        except ConnectionError:
            raise Retry("later", countdown=0, max_retries=most)  # noqa: B904  the context is enough

    @app.task
    async def plain() -> None:
        raise Retry(f"attempt {attempt()}")

    async with working(app):
        for most, runs in ((None, 3), (0, 1), (4, 5)):
            failure = await end(await asks.adelay(most))
            assert (failure.reason, failure.attempt) == ("not-retried" if most == 0 else "exhausted", runs)
            assert (failure.type, failure.message) == ("ConnectionError", "refused")
            assert "celery5.errors.Retry: later" in failure.traceback
        await end(await plain.adelay())
    assert history(redis_client, app) == [(number, "Retry", f"attempt {number}") for number in (1, 2, 3)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_rejects_its_job_which_is_no_failure(
    app: App, redis_client: "redis.Redis", kind: str
) -> None:
    def body() -> None:
        raise Reject("the order was cancelled")

    with Lines() as lines:
        async with working(app):
            sent = await of_kind(app, kind, body).adelay()
            with pytest.raises(TaskRejected, match="the order was cancelled"):
                await sent.aget(timeout=30)
            assert await sent.astatus() is JobState.REJECTED
    (line,) = lines.of("job")
    assert (line["level"], line["state"], line["why"]) == ("warning", "REJECTED", "the order was cancelled")
    assert redis_client.xlen(app.queue("default").dead) == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bound_task_is_given_its_job_and_sent_without_it(app: App, kind: str) -> None:
    def body(self: CurrentJob, n: int, *, factor: int = 2) -> tuple[str, int, int]:
        if self.attempt < 3:
            self.retry(countdown=0, max_retries=2)
        assert self == current_job()
        return self.id, self.attempt, n * factor

    async def coroutine(self: CurrentJob, n: int, *, factor: int = 2) -> tuple[str, int, int]:
        return body(self, n, factor=factor)

    task: Any
    if kind == "thread":
        task = app.task(bind=True, name="bound", max_retries=0)(body)
    else:
        task = app.task(
            bind=True, name="bound", max_retries=0, loop="asyncio" if kind == "asyncio" else "trio"
        )(coroutine)
    async with working(app):
        sent = await task.adelay(4, factor=3)
        assert await sent.aget(timeout=30) == (sent.id, 3, 12)


async def test_a_job_is_tried_again_by_a_policy_that_it_names_itself(app: App) -> None:
    """The proposal's own example (C22)."""

    @app.task(bind=True)
    async def foo(self: CurrentJob) -> None:
        try:
            raise OSError("first operation")
        except OSError:
            self.retry(
                retry_policy={
                    "max_retries": 3,
                    "interval_start": 0,
                    "interval_step": 0.02,
                    "interval_max": 0.03,
                }
            )

    with Lines() as lines:
        async with working(app):
            failure = await end(await foo.adelay())
    assert (failure.type, failure.attempt) == ("OSError", 4)
    assert [line["delay"] for line in lines.of("job")[:3]] == [0, 0.02, 0.03]


class Wrong(ValueError):
    """An error of the application's own."""


async def test_a_policy_is_the_applications_the_tasks_or_the_calls(app: App) -> None:
    @app.task(name="app's")
    async def of_app() -> None:
        raise Wrong

    @app.task(name="task's", max_retries=1, dont_autoretry_for=[KeyError])
    async def of_task(key: bool) -> None:
        raise KeyError if key else Wrong

    async with working(app):
        calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], int]] = [
            (of_app, (), {}, 3),
            (of_app, (), {"max_retries": 4, "autoretry_for": [ValueError]}, 5),
            (of_app, (), {"max_retries": 4, "autoretry_for": [KeyError]}, 1),
            (of_app, (), {"max_retries": 4, "dont_autoretry_for": [f"{__name__}.Wrong"]}, 1),
            (of_task, (False,), {}, 2),
            (of_task, (True,), {}, 1),
            (of_task, (False,), {"retry_policy": RetryPolicy(max_retries=0)}, 1),
        ]
        for task, args, said, runs in calls:
            failure = await end(await task.options(**said).adelay(*args))
            reason = "not-retried" if runs == 1 else "exhausted"
            assert (failure.attempt, failure.reason) == (runs, reason), said


async def test_the_proposals_spelling_of_a_policy_waits_as_it_says(app: App) -> None:
    even = {"max_retries": 3, "interval_start": 0, "interval_step": 0.02, "interval_max": 0.02}

    @app.task(retry_policy=even)
    async def foo() -> None:
        raise OSError

    with Lines() as lines:
        async with working(app):
            assert (await end(await foo.adelay())).attempt == 4
    assert [line["delay"] for line in lines.of("job")[:3]] == [0, 0.02, 0.02]


async def test_a_backoff_of_ones_own_is_asked_for_each_retry_and_may_fail(app: App, url: str) -> None:
    asked: list[int] = []

    def mine(n: int) -> float:
        asked.append(n)
        return n / 50

    def broken(n: int) -> float:
        raise LookupError("no idea\nat all")

    @app.task(name="mine", retry_backoff=mine)
    async def of_task() -> None:
        raise OSError

    @app.task(name="broken", retry_backoff=broken, max_retries=1)
    async def of_another() -> None:
        raise OSError

    with Lines() as lines:
        async with working(app):
            await end(await of_task.adelay())
            await end(await of_another.adelay())
    assert asked == [0, 1]
    first, second, _, third, _ = lines.of("job")
    assert [first["delay"], second["delay"], third["delay"]] == [0, 0.02, 0.01]  # the policy's, last
    assert third["backoff_error"].endswith("broken(0) failed: LookupError: no idea at all")
    assert "note" not in first

    other = App(app.name, broker=url, retry_backoff=lambda n: 0)
    assert other.task(name="any")(mine).backoff is other.retry_backoff


def raising(*errors: Callable[[], BaseException]) -> Callable[[], Any]:
    """A coroutine function whose nursery gets all of these errors at once."""

    async def fail(error: Callable[[], BaseException]) -> None:
        raise error()

    async def body() -> None:
        async with trio.open_nursery() as nursery:
            for error in errors:
                nursery.start_soon(fail, error)

    return body


@pytest.mark.parametrize(
    ("errors", "state", "runs"),
    [
        ([OSError, lambda: Reject("no")], JobState.REJECTED, 1),
        ([lambda: Retry(countdown=0, max_retries=1), lambda: Reject("no")], JobState.REJECTED, 1),
        ([lambda: Retry(countdown=0, max_retries=1), OSError], JobState.DEAD, 2),
        ([OSError, OSError], JobState.DEAD, 4),
        ([OSError, ValueError], JobState.DEAD, 1),
        ([OSError, KeyError], JobState.DEAD, 1),
    ],
    ids=["reject", "reject beats retry", "retry", "all covered", "one not covered", "one never"],
)
async def test_of_several_errors_the_strictest_decides(
    app: App, errors: list[Callable[[], BaseException]], state: JobState, runs: int
) -> None:
    task: Any = app.task(
        name="many", max_retries=3, autoretry_for=[OSError, KeyError], dont_autoretry_for=[LookupError]
    )(raising(*errors))
    with Lines() as lines:
        async with working(app):
            sent = await task.adelay()
            await end(sent)
            assert await sent.astatus() is state
    assert len(lines.of("job")) == runs


async def test_an_attempt_that_was_postponed_is_told_of_and_its_policy_still_counts(
    app: App, redis_client: "redis.Redis"
) -> None:
    """A worker that has just connected does not know yet whether a broker is away for all, or for this job only."""

    @app.task(name="away", max_retries=3, autoretry_for=[OSError])
    async def away() -> None:
        raise BrokerUnavailable(f"no answer at {trio.current_time()}")

    @app.task(name="poison", max_retries=3)
    async def poison() -> None:
        with poisonous():
            raise BrokerUnavailable("after the money was taken")

    async with working(app):
        assert (await end(await poison.adelay())).reason == "poisonous"
        failure = await end(await away.adelay())
    assert (failure.reason, failure.attempt) == ("not-retried", 1)
    assert [item[:2] for item in history(redis_client, app)] == [(1, "BrokerUnavailable")]


async def test_what_makes_no_sense_is_the_failure_of_the_job_that_says_it(app: App) -> None:
    @app.task(max_retries=0)
    async def senseless(which: str) -> None:
        job = current_job()
        assert job is not None
        if which == "countdown":
            job.retry(countdown=-1)
        elif which == "policy":
            job.retry(retry_policy={"maxretries": 3})
        elif which == "section":
            with retry(backoff=float("nan")):
                pass
        else:
            with optional(5):  # type: ignore[arg-type]
                pass

    async with working(app):
        for which in ("countdown", "policy", "section", "optional"):
            failure = await end(await senseless.adelay(which))
            assert failure.type == Misconfigured.__name__, which
