"""No line of the log about an error of user code shows a password that its text or traceback has."""

import msgspec
import pytest

from celery5 import App, RetryPolicy, chain
from celery5.health import BreakerPolicy, HealthCheck
from celery5.streams import StreamEvents
from tests.redis.dashboard.test_secrets import SECRET, TEXTS
from tests.redis.worker.workers import Lines, until, working

pytestmark = pytest.mark.parametrize("text", TEXTS)
MASKED = ("job", "timer:failed", "breaker:tripped", "health:check-failed", "health:changed")


class Order(msgspec.Struct):
    """A record."""

    user: str


def declare(app: App, text: str) -> None:
    """User code that raises this text wherever it can."""
    sick = HealthCheck("sick", allowed={"unhealthy": 0})

    @app.task(name="refuse", retry_policy=RetryPolicy(max_retries=1, backoff=0.01))
    async def refuse() -> None:
        raise ConnectionError(text)

    @app.task(name="trip", max_retries=0, breaker=BreakerPolicy(threshold=1, reset=600.0), checks=[sick])
    async def trip() -> None: ...

    @app.task(name="once", max_retries=0, breaker=BreakerPolicy(threshold=1, reset=600.0))
    async def once() -> None:
        raise ConnectionError(text)

    @app.task(name="last")
    async def last(before: None) -> None: ...

    @app.task(name="ask")
    async def ask() -> None:
        sick.report("unhealthy", text)

    @app.timer(0.05)
    async def clock() -> None:
        raise ConnectionError(text)

    @app.health_check(period=0.05)
    def look() -> str:
        raise ConnectionError(text)

    stream = app.stream("orders", Order, by=lambda order: order.user, partitions=1)

    @app.processor(stream, then="park-key", on_error=RetryPolicy(max_retries=0))
    async def bill(events: StreamEvents[Order]) -> None:
        async for _ in events.records():
            raise ConnectionError(text)


async def test_lines_about_errors_show_no_password(app: App, text: str) -> None:
    declare(app, text)
    with Lines() as lines:
        async with working(app, name="one"):
            tasks = app.tasks
            await tasks["refuse"].adelay()
            await chain(tasks["refuse"].s(), tasks["last"].partial()).astart(id="run-1")
            await tasks["once"].adelay()
            await tasks["ask"].adelay()
            await app.streams["orders"].asend(Order("bob"))
            await until(lambda: all(lines.of(name) for name in (*MASKED, "key:parked")))
            await until(lambda: len(lines.of("job")) >= 6)
    shown = lines._stream.getvalue()
    assert SECRET not in shown, next(line for line in shown.splitlines() if SECRET in line)
    assert all("***" in str(lines.of(name)) for name in MASKED)
