"""Breakers: what a task's circuit breaker does with its jobs: holds them, fails them, watches them, or nothing."""

from functools import partial
from typing import Any, Literal

import pytest
import redis
import trio

from celery5 import App, Misconfigured, Reject, Retry, RetryPolicy, TaskFailed, poisonous
from celery5.health import BreakerPolicy, HealthCheck
from tests.redis.worker.workers import Lines, until, until_async, working

QUICK = BreakerPolicy(threshold=3, reset=0.3)
ONCE = RetryPolicy(max_retries=0)
SPAN = 5.0
"""Seconds, within which a test that stands still for a while still sees what is held meanwhile."""


class Patient:
    """What a task needs, and how often it was asked."""

    def __init__(self) -> None:
        self.ill = True
        self.asked = 0

    def ask(self) -> str:
        self.asked += 1
        if self.ill:
            raise ConnectionError("nobody there")
        return "well"


def declared(app: App, patient: Patient, **said: Any) -> Any:
    """A task that asks."""

    async def ask() -> str:
        return patient.ask()

    return app.task(**{"retry_policy": ONCE, **said})(ask)


async def failed(task: Any, times: int) -> None:
    """So many jobs of it fail, one after the other."""
    for _ in range(times):
        with pytest.raises(TaskFailed, match="nobody there"):
            await (await task.adelay()).aget(timeout=30)


async def test_after_three_failures_jobs_are_held_and_one_probe_sets_them_free(
    app: App, redis_client: "redis.Redis"
) -> None:
    patient = Patient()
    ask = declared(app, patient, breaker=BreakerPolicy(reset=SPAN))
    with Lines() as lines:
        async with working(app):
            await failed(ask, 3)
            sent = [await ask.adelay() for _ in range(5)]
            await until(lambda: redis_client.hlen(app.queue("default").waiting) == 5)
            assert [(await job.astatus()).value for job in sent] == ["HELD"] * 5
            assert patient.asked == 3
            patient.ill = False
            assert [await job.aget(timeout=30) for job in sent] == ["well"] * 5
            assert patient.asked == 8
            await until(lambda: bool(lines.of("breaker:closed")))
    (tripped,) = lines.of("breaker:tripped")
    assert (tripped["level"], tripped["breaker"], tripped["mode"]) == ("warning", ask.name, "delay")
    assert "nobody there" in tripped["why"]
    assert len(lines.of("breaker:half-opened")) == 1
    held = [line for line in lines.of("job") if line["state"] == "HELD"]
    assert {line["attempt"] for line in held} == {1}
    assert [line["attempt"] for line in lines.of("job") if line["state"] == "SUCCESS"] == [1] * 5


async def test_a_probe_that_fails_trips_it_again_and_the_third_trip_is_an_error(app: App) -> None:
    patient = Patient()
    ask = declared(app, patient, breaker=BreakerPolicy(reset=0.05))
    with Lines() as lines:
        async with working(app):
            await failed(ask, 5)
            assert patient.asked == 5
            await until(lambda: len(lines.of("breaker:tripped")) == 3)
    assert [line["level"] for line in lines.of("breaker:tripped")] == ["warning", "warning", "error"]


async def test_a_breaker_that_fails_jobs_fails_them_by_their_retry_policy(app: App) -> None:
    patient = Patient()
    ask = declared(app, patient, breaker=BreakerPolicy(reset=SPAN, mode="fail"))
    async with working(app):
        await failed(ask, 3)
        with pytest.raises(TaskFailed, match=r"CircuitOpen: the circuit breaker of .* is open"):
            await (await ask.adelay()).aget(timeout=30)
        assert patient.asked == 3
        patient.ill = False
        again = ask.options(retry_policy=RetryPolicy(max_retries=9, backoff=0.1, jitter=False))
        assert await (await again.adelay()).aget(timeout=30) == "well"
        assert patient.asked == 4


async def test_unless_said_otherwise_a_breaker_only_warns(app: App) -> None:
    patient = Patient()
    ask = declared(app, patient)
    with Lines() as lines:
        async with working(app):
            await failed(ask, 5)
            assert patient.asked == 5
            await until(lambda: bool(lines.of("breaker:tripped")))
    (tripped,) = lines.of("breaker:tripped")
    assert (tripped["level"], tripped["mode"], tripped["seconds"]) == ("warning", "watch", 30)


async def test_a_breaker_can_be_off(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, breaker=BreakerPolicy(mode="off"))
    patient = Patient()
    ask = declared(app, patient)
    with Lines() as lines:
        async with working(app):
            await failed(ask, 4)
    assert lines.of("breaker:tripped") == []
    app.close()


async def test_the_applications_breaker_is_that_of_all_its_tasks(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, breaker=BreakerPolicy(threshold=1, reset=SPAN))
    patient = Patient()
    ask = declared(app, patient)
    async with working(app):
        await failed(ask, 1)
        held = await ask.adelay()
        await until_async(lambda: has_state(held, "HELD"))
        patient.ill = False
        assert await held.aget(timeout=30) == "well"
    app.close()


async def has_state(result: Any, state: str) -> bool:
    return bool((await result.astatus()) == state)


async def test_only_what_fails_unexpectedly_counts(app: App) -> None:
    """A retried exception counts; what was asked for, is poisonous or never began does not (C38)."""
    policy = BreakerPolicy(threshold=1, reset=60)
    app.retry_policy = ONCE

    @app.task(breaker=policy)
    async def poisoned() -> None:
        with poisonous():
            raise ValueError("bad input")

    @app.task(breaker=policy)
    async def asking() -> None:
        raise Retry(max_retries=0)

    @app.task(breaker=policy)
    async def rejecting() -> None:
        raise Reject("not mine")

    @app.task(breaker=policy)
    async def typed(number: int) -> int:
        return number

    @app.task(breaker=policy, retry_policy=RetryPolicy(max_retries=1, backoff=60))
    async def retried() -> None:
        raise ValueError("once more")

    with Lines() as lines:
        async with working(app):
            for task in (poisoned, asking, rejecting):
                for _ in range(2):
                    with pytest.raises(TaskFailed):
                        await (await task.adelay()).aget(timeout=30)
            late = await typed.options(countdown=0.05, expires=0.01).adelay(1)
            with pytest.raises(TaskFailed):
                await late.aget(timeout=30)
            revoked = await typed.options(countdown=60).adelay(1)
            await revoked.arevoke()
            assert await (await typed.adelay(2)).aget(timeout=30) == 2
            await retried.adelay()
            await until(lambda: bool(lines.of("breaker:tripped")))
    assert [line["breaker"] for line in lines.of("breaker:tripped")] == [retried.name]


async def test_a_held_job_can_be_revoked_and_expires_like_any_other(app: App) -> None:
    patient = Patient()
    ask = declared(app, patient, breaker=BreakerPolicy(threshold=1, reset=30))
    async with working(app):
        await failed(ask, 1)
        gone, late = await ask.adelay(), await ask.options(expires=SPAN).adelay()
        await until_async(lambda: has_state(gone, "HELD"))
        await until_async(lambda: has_state(late, "HELD"))
        assert await gone.arevoke()
        assert (await gone.astatus()) == "REVOKED"
        await until_async(lambda: has_state(late, "EXPIRED"))
        assert patient.asked == 1


async def test_held_jobs_are_run_by_a_worker_that_comes_later(app: App) -> None:
    patient = Patient()
    ask = declared(app, patient, breaker=BreakerPolicy(threshold=1, reset=SPAN))
    async with working(app):
        await failed(ask, 1)
        held = await ask.adelay()
        await until_async(lambda: has_state(held, "HELD"))
    patient.ill = False
    async with working(app):
        assert await held.aget(timeout=30) == "well"


async def test_a_probe_that_is_revoked_leaves_the_way_to_the_next(app: App) -> None:
    ill = True
    stuck = trio.Event()

    @app.task(breaker=BreakerPolicy(threshold=1, reset=0.2), retry_policy=ONCE)
    async def ask(wait: bool = False) -> str:
        if ill:
            raise ConnectionError("nobody there")
        if wait:
            stuck.set()
            await trio.sleep_forever()
        return "well"

    async with working(app):
        await failed(ask, 1)
        ill = False
        probe = await ask.adelay(wait=True)
        await stuck.wait()
        other = await ask.adelay()
        await until_async(lambda: has_state(other, "HELD"))
        await probe.arevoke()
        assert await other.aget(timeout=30) == "well"


async def test_a_health_check_trips_the_breaker_of_its_task_and_failures_alone_do_not(app: App) -> None:
    check = HealthCheck("patient", allowed={"unhealthy": 1}, window=10)
    patient = Patient()
    ask = declared(app, patient, checks=[check])
    with Lines() as lines:
        async with working(app):
            await failed(ask, 4)
            patient.ill = False
            check.report("unhealthy", "coughs")
            assert await (await ask.adelay()).aget(timeout=30) == "well"
            check.report("unhealthy", "coughs")
            held = await ask.adelay()
            await until_async(lambda: has_state(held, "HELD"))
            assert await held.arevoke()
    (tripped,) = lines.of("breaker:tripped")
    assert tripped["why"] == "health check patient is unhealthy: coughs"


@pytest.mark.parametrize("mode", ["delay", "fail"])
async def test_bad_check_holds_or_fails_jobs_until_it_is_healthy(
    app: App, mode: Literal["delay", "fail"]
) -> None:
    patient, state = Patient(), ["unhealthy"]
    patient.ill = False
    check = app.health_check(name="room", period=0.05, allowed={"unhealthy": 0})(lambda: state[0])
    ask = declared(app, patient, checks=[check], breaker=BreakerPolicy(threshold=None, reset=0.1, mode=mode))
    async with working(app):
        await until(lambda: check.state == "unhealthy")
        sent = await ask.options(max_retries=0).adelay()
        if mode == "delay":
            await until_async(lambda: has_state(sent, "HELD"))
        else:
            with pytest.raises(TaskFailed, match=r"CircuitOpen: .* health check room is unhealthy"):
                await sent.aget(timeout=30)
        assert patient.asked == 0
        state[0] = "healthy"
        await until(lambda: check.state == "healthy")
        last = sent if mode == "delay" else await ask.options(max_retries=20, backoff=0.1).adelay()
        assert await last.aget(timeout=30) == "well"
    assert patient.asked == 1


def test_what_is_no_breaker_and_no_check_is_refused_at_once(app: App) -> None:
    declare: Any = app.task
    for wrong in ({"breaker": 3}, {"checks": ["disk"]}):
        with pytest.raises(Misconfigured):
            declare(**wrong)(lambda: None)


async def test_each_worker_has_its_own_breaker_and_what_one_holds_another_may_run(
    app: App, url: str, app_name: str
) -> None:
    ill, well = Patient(), Patient()
    well.ill = False
    other = App(app_name, broker=url, lease=1.0)
    ask = declared(app, ill, name="ask", breaker=BreakerPolicy(threshold=1, reset=SPAN))
    declared(other, well, name="ask", breaker=BreakerPolicy(threshold=1, reset=SPAN))
    with Lines() as lines:
        async with working(app, name="ill"):
            await failed(ask, 1)
            held = await ask.adelay()
            await until_async(lambda: has_state(held, "HELD"))
            async with working(other, name="well"):
                sent = [held, *[await ask.adelay() for _ in range(20)]]
                done = [await _outcome(job) for job in sent]
    assert well.asked > 0
    assert done.count("well") == well.asked
    assert (
        done.count("nobody there") + 1 == ill.asked
    )  # its probes: the jobs that it begins when it may close
    assert len(lines.of("breaker:half-opened")) == done.count("nobody there")
    other.close()


async def _outcome(job: Any) -> str:
    try:
        return str(await job.aget(timeout=30))
    except TaskFailed as error:
        return error.message


async def test_held_jobs_are_counted_among_those_that_have_not_ended(app: App) -> None:
    patient = Patient()
    ask = declared(app, patient, breaker=BreakerPolicy(threshold=1, reset=30))
    async with working(app):
        await failed(ask, 1)
        sent = [await ask.adelay() for _ in range(3)]
        for job in sent:
            await until_async(partial(has_state, job, "HELD"))
        state = await app.ainfo()
        queue = state.queues["default"]
        assert (state.unfinished, queue.scheduled, queue.waiting, queue.running) == (3, 3, 0, 0)
        assert queue.next_due is not None
        assert 20 < queue.next_due <= 30
        story = await app.afind(sent[0].id)
        assert story is not None
        assert story.state == "HELD"
        for job in sent:
            await job.arevoke()
        assert (await app.ainfo()).unfinished == 0


async def test_a_burst_ends_when_held_jobs_have_run(app: App) -> None:
    patient = Patient()
    ask = declared(app, patient, breaker=BreakerPolicy(threshold=1, reset=SPAN))
    sent = [await ask.adelay() for _ in range(3)]
    async with working(app, burst=True) as worker:
        await until_async(lambda: has_state(sent[0], "DEAD"))
        patient.ill = False
        with trio.fail_after(30):
            await worker.done.wait()
    assert [await _outcome(job) for job in sent[1:]] == ["well", "well"]


async def test_a_held_job_keeps_its_key(app: App) -> None:
    patient = Patient()
    ask = declared(app, patient, breaker=BreakerPolicy(threshold=1, reset=SPAN)).options(key="one")
    async with working(app):
        await failed(ask, 1)
        held = await ask.adelay()
        await until_async(lambda: has_state(held, "HELD"))
        patient.ill = False
        again = await ask.adelay()  # the same: no second one is sent
        assert again.id == held.id
        assert await held.aget(timeout=30) == "well"
    assert patient.asked == 2


async def test_a_job_whose_probe_is_cut_off_by_the_end_of_its_worker_runs_again(app: App) -> None:
    patient, started = Patient(), trio.Event()
    stuck = True

    @app.task(breaker=BreakerPolicy(threshold=1, reset=0.1), retry_policy=ONCE)
    async def ask() -> str:
        if not patient.ill:
            started.set()
            if stuck:
                await trio.sleep_forever()
        return patient.ask()

    app.configure(grace_period=0.1)
    async with working(app):
        await failed(ask, 1)
        patient.ill = False
        job = await ask.adelay()
        await started.wait()
        stuck = False
    async with working(app):
        assert await job.aget(timeout=30) == "well"
