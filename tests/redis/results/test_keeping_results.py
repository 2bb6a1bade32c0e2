"""Keeping results: for how long, whether at all, and what waiting for them says then."""

from datetime import timedelta
from typing import Any

import pytest
import redis

from celery5 import App, JobState, TaskFailed, gather, wait
from celery5.errors import ResultsDisabled
from tests.redis.sending.test_producers import Api, in_every_colour, tell, worker_elsewhere


def test_results_are_kept_as_the_setting_the_task_or_the_call_says(
    app: App, redis_client: "redis.Redis"
) -> None:
    app.configure(results_ttl=600)

    @app.task
    async def usual() -> int:
        return 1

    @app.task(results_ttl=timedelta(hours=5))
    async def long() -> int:
        return 2

    @app.task(results_ttl=300, max_retries=0)
    async def fail() -> None:
        raise ValueError

    said = [usual, usual.options(results_ttl=120), long, long.options(results_ttl=90), fail]
    with worker_elsewhere(app):
        sent = [task.delay() for task in said]
        gather(sent, timeout=30)
        kept: list[Any] = [redis_client.ttl(job.key) for job in sent]
    for ttl, asked in zip(kept, (600, 120, 18000, 90, 300), strict=True):
        assert asked - 15 <= ttl <= asked


@in_every_colour
def test_the_setting_ignore_result_holds_unless_a_task_or_a_call_says_otherwise(
    app: App, redis_client: "redis.Redis", colour: str
) -> None:
    app.configure(ignore_result=True)

    @app.task
    async def ignored() -> int:
        return 1

    @app.task(ignore_result=False)
    async def kept() -> int:
        return 2

    async def story(api: Api) -> None:
        one, two = await api.delay(ignored), await api.delay(kept)
        three = await api.delay(ignored.options(ignore_result=False))
        four = await api.delay(kept.options(ignore_result=True))
        assert [await api.get(result, timeout=30) for result in (two, three)] == [2, 1]
        for job in (one, four):
            with pytest.raises(ResultsDisabled, match="was sent with ignore_result"):
                await api.get(job, timeout=30)
        done, left = await api.wait([one, four], timeout=30)
        assert (len(done), left) == (2, set())
        assert await api.status(one) is JobState.SUCCESS
        # A handle that was made again knows it from the document.
        again: Any = app.result(one.id)
        told = await api.gather([again, two, four], timeout=30)
        assert [type(error) for error in told] == [ResultsDisabled, int, ResultsDisabled]
        with pytest.raises(ResultsDisabled):
            await api.get(again, timeout=30)
        ttl: Any = redis_client.ttl(one.key)
        assert ttl <= 60

    with worker_elsewhere(app):
        tell(colour, story)


def test_a_result_that_is_too_large_fails_its_job_with_a_clear_error(app: App) -> None:
    app.configure(message_limit=2000)

    @app.task
    async def large() -> str:
        return "x" * 3000

    with worker_elsewhere(app):
        with pytest.raises(
            TaskFailed, match=r"3002 bytes, over the limit of 2000: return a reference"
        ) as caught:
            large.delay().get(timeout=30)
        done, _ = wait([large.delay()], timeout=30)
    error = caught.value
    assert (error.reason, error.type, error.attempt) == ("result-too-large", "MessageTooLarge", 1)
    assert len(done) == 1


def test_a_failure_tells_all_that_is_known_of_it(app: App) -> None:
    @app.task(name="pay", max_retries=1)
    async def pay(order: int) -> None:
        raise KeyError("order", order)

    with worker_elsewhere(app):
        sent = pay.delay(7)
        with pytest.raises(TaskFailed) as caught:
            sent.get(timeout=30)
    error = caught.value
    assert (error.job_id, error.task, error.type, error.reason) == (sent.id, "pay", "KeyError", "exhausted")
    assert (error.message, error.error_args) == ("('order', 7)", ("'order'", "7"))
    assert (error.attempt, bool(error.worker)) == (2, True)
    assert 'raise KeyError("order", order)' in error.traceback
