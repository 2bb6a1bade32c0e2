"""Failing: jobs that fail are tried again; jobs that cannot run become dead letters with the reason; workers live."""

import json
from typing import Any

import pytest
import redis
import trio
import trio.lowlevel

from celery5 import App, JobState, TaskFailed, agather, current_job
from celery5.errors import BadResult
from celery5.services.job.outcome_handler import CHECKED_RESULTS
from tests.redis.worker.workers import Lines, entries, held, of_kind, until, working


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_job_that_fails_is_tried_again_until_it_succeeds(app: App, kind: str) -> None:
    runs: list[int] = []

    def body() -> int:
        job = current_job()
        assert job is not None
        runs.append(job.attempt)
        if len(runs) < 3:
            raise OSError("not yet")
        return len(runs)

    task = of_kind(app, kind, body)
    async with working(app):
        assert await (await task.adelay()).aget() == 3
    assert runs == [1, 2, 3]


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
@pytest.mark.parametrize("error", [ValueError("wrong \udc80 \N{SNOWMAN}", 7), SystemExit(3)], ids=repr)
async def test_job_that_never_succeeds_dies_with_its_error(
    app: App, redis_client: "redis.Redis", kind: str, error: BaseException
) -> None:
    def body() -> None:
        raise error

    task = of_kind(app, kind, body)
    async with working(app):
        sent = await task.adelay()
        with pytest.raises(TaskFailed, match="exhausted") as caught:
            await sent.aget()
        assert await sent.astatus() is JobState.DEAD
    failure = caught.value
    assert failure.type == type(error).__name__
    assert failure.attempt == 3
    assert "in body" in failure.traceback
    assert failure.worker
    (fields,) = entries(redis_client, app.queue("default").dead)
    kept = json.loads(fields[b"job"])
    assert kept["id"] == sent.id
    assert [past.get("attempt", 1) for past in kept["failures"]] == [1, 2, 3]
    assert held(redis_client, app) == {}
    assert redis_client.exists(app.queue("default").result(sent.id)), "the failure is kept as its result, too"


async def test_error_groups_and_exits_in_a_nursery_only_fail_their_job(app: App) -> None:
    @app.task(max_retries=0)
    async def grouped(leave: bool) -> None:
        async def fail() -> None:
            raise SystemExit(1) if leave else ValueError("inside")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)

    async with working(app) as one:
        for leave, name in ((False, "ExceptionGroup"), (True, "BaseExceptionGroup")):
            with pytest.raises(TaskFailed) as caught:
                await (await grouped.adelay(leave)).aget()
            assert caught.value.type == name
        assert not one.ended.is_set()


class Awkward(Exception):
    """An error that cannot be shown."""

    args: Any = property(lambda self: 1 / 0)

    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_error_that_cannot_be_shown_still_becomes_a_dead_letter(app: App) -> None:
    @app.task(max_retries=0)
    async def awkward() -> None:
        raise Awkward

    async with working(app):
        with pytest.raises(TaskFailed, match="cannot be shown"):
            await (await awkward.adelay()).aget()


async def test_job_that_cannot_run_becomes_a_dead_letter_with_the_reason(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task
    async def strange() -> object:
        return object()

    @app.task
    async def large() -> str:
        return "x" * 2_000_000

    keys = app.queue("default")

    def inject(job_id: str, **fields: Any) -> None:
        command = {"v": 1, "id": job_id, "task": double.name, "args": [], "sent": 0.0, **fields}
        redis_client.xadd(keys.stream, {"job": json.dumps(command)})

    async with working(app) as one:
        inject("unknown", task="no.such.task")
        inject("bad", args=["three"])
        inject("future", v=99)
        redis_client.xadd(keys.stream, {"job": b"\xff not json"})
        redis_client.xadd(keys.stream, {"something": "else"})
        odd, big = await strange.adelay(), await large.adelay()
        await until(lambda: redis_client.xlen(keys.dead) == 7)
        assert await (await double.adelay(4)).aget() == 8
        assert not one.ended.is_set()
        for sent, reason in ((odd, "unencodable-result"), (big, "result-too-large")):
            with pytest.raises(TaskFailed, match=reason):
                await sent.aget()
    reasons = [json.loads(fields[b"document"])["reason"] for fields in entries(redis_client, keys.dead)]
    assert sorted(reasons) == sorted(
        ["unknown-task", "bad-arguments", "unencodable-result", "result-too-large", *["corrupt"] * 3]
    )
    assert redis_client.xlen(keys.stream) == 0


@pytest.mark.parametrize("wanted", [False, True])
async def test_a_retry_logs_one_line_and_the_last_attempt_its_traceback(
    url: str, app_name: str, wanted: bool
) -> None:
    app = App(app_name, broker=url, retry_tracebacks=wanted)

    @app.task(max_retries=2, backoff=0.001)
    async def fails() -> None:
        raise ValueError("no")

    with Lines() as lines:
        async with working(app):
            with pytest.raises(TaskFailed, match="exhausted"):
                await (await fails.adelay()).aget()
    told = [(line["state"], line["error"], "traceback" in line) for line in lines.of("job")]
    retry = ("RETRY", "ValueError: no", wanted)
    assert told == [retry, retry, ("DEAD", "ValueError: no", True)]


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_result_of_another_type_than_declared_is_warned_of_once_for_each_task(
    app: App, kind: str
) -> None:
    def declared(name: str, annotation: Any, *values: Any) -> Any:
        left = list(values)

        def body() -> Any:
            return left.pop(0) if len(left) > 1 else left[0]

        async def coroutine() -> Any:
            return body()

        function: Any = body if kind == "thread" else coroutine
        function.__annotations__["return"] = annotation
        return app.task(name=name, loop="asyncio" if kind == "asyncio" else "trio")(function)

    wrong = declared("wrong", int, 1, "seven")
    right = declared("right", list[int], [1, 2])
    anything = declared("anything", Any, "seven")
    late = declared("late", int, *[1] * CHECKED_RESULTS, "seven")  # nobody looks any more
    with Lines() as lines:
        async with working(app):
            for task, times in ((wrong, 3), (right, 3), (anything, 3), (late, CHECKED_RESULTS), (late, 1)):
                found = await agather([await task.adelay() for _ in range(times)])
            assert isinstance(found[-1], BadResult)
    (line,) = lines.of("job:result-mismatched")
    assert (line["task"], line["level"]) == ("wrong", "warning")
    assert "the result is not what the task declares, int" in line["why"]
    assert {logged["state"] for logged in lines.of("job")} == {"SUCCESS"}
