"""Deduplicating: a task's own policy rejects jobs on the worker, before they run."""

import json
from typing import Any

import pytest
import redis

from celery5 import App, JobState, TaskFailed, current_job
from celery5.errors import TaskRejected
from celery5.tasks.deduplication import DEFAULT_REASON
from tests.redis.worker.workers import Lines, until, working

KINDS = ["trio", "asyncio", "thread"]


def welcome(app: App, kind: str, answer: Any, runs: list[str]) -> Any:
    """A task of that kind which notes whom it runs for, with a policy that gives what `answer(to)` gives."""

    def policy(to: str, *, language: str = "en") -> Any:
        return answer(to)

    async def async_policy(to: str, *, language: str = "en") -> Any:
        return answer(to)

    def send(to: str, *, language: str = "en") -> str:
        runs.append(to)
        return f"welcome, {to}"

    async def async_send(to: str, *, language: str = "en") -> str:
        return send(to)

    if kind == "thread":
        return app.task(name="welcome", deduplicate=policy)(send)
    loop: Any = kind
    return app.task(name="welcome", deduplicate=async_policy, loop=loop)(async_send)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_job_that_the_policy_does_not_want_is_rejected_and_says_why(
    app: App, redis_client: "redis.Redis", kind: str
) -> None:
    answers = {"ada": True, "bob": "sent on Monday", "cleo": False, "dan": None, "eve": ""}
    runs: list[str] = []
    task = welcome(app, kind, answers.get, runs)
    with Lines() as lines:
        async with working(app):
            sent = {to: await task.adelay(to, language="fr") for to in answers}
            for to in ("cleo", "dan", "eve"):
                assert await sent[to].aget() == f"welcome, {to}"
            for to, why in (("ada", DEFAULT_REASON), ("bob", "sent on Monday")):
                with pytest.raises(TaskRejected, match=why) as caught:
                    await sent[to].aget()
                assert caught.value.reason == why
                assert await sent[to].astatus() is JobState.REJECTED
        await until(lambda: len(lines.of("job")) == 5)
        told = [line for line in lines.of("job") if line.get("state") == "REJECTED"]
    assert sorted(runs) == ["cleo", "dan", "eve"]
    assert sorted(line["why"] for line in told) == sorted([DEFAULT_REASON, "sent on Monday"])
    assert {line["level"] for line in told} == {"warning"}
    document = json.loads(bytes(redis_client.get(sent["bob"].key)))  # type: ignore[arg-type]
    assert (document["state"], document["reason"]) == ("REJECTED", "sent on Monday")
    keys = app.queue("default")
    assert not redis_client.exists(keys.dead, keys.jobs), "rejected is not dead"


async def test_a_reason_of_any_length_and_without_bytes_is_kept_as_what_can_be_shown(app: App) -> None:
    answers = {"ada": "half of a pair: \udc80", "bob": "x" * 3_000_000}

    async def answer(to: str) -> str:
        return answers[to]

    @app.task(deduplicate=answer)
    async def greet(to: str) -> None: ...

    async with working(app):
        for to, why in (("ada", "half of a pair: \\udc80"), ("bob", "x" * 2000)):
            with pytest.raises(TaskRejected) as caught:
                await (await greet.adelay(to)).aget(30)
            assert caught.value.reason == why


@pytest.mark.parametrize("kind", KINDS)
async def test_a_policy_that_fails_is_a_failed_attempt_and_is_asked_again(app: App, kind: str) -> None:
    asked: list[int] = []
    runs: list[str] = []

    def answer(to: str) -> bool:
        job = current_job()
        assert job is not None
        asked.append(job.attempt)
        if to == "never" or job.attempt < 3:
            raise OSError("the mail provider is away")
        return False

    task = welcome(app, kind, answer, runs)
    async with working(app):
        assert await (await task.adelay("ada")).aget() == "welcome, ada"
        assert (asked, runs) == ([1, 2, 3], ["ada"])
        with pytest.raises(TaskFailed, match="the mail provider is away") as caught:
            await (await task.adelay("never")).aget()
    assert (caught.value.reason, caught.value.attempt, runs) == ("exhausted", 3, ["ada"])
