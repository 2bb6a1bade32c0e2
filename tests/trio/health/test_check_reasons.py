"""Check reasons: whatever is wrong, a health check that celery5 brings along says what it saw."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.errors import BrokerUnavailable
from celery5.health import checks
from celery5.health.checks import (
    BrokerPing,
    Disk,
    EventLoopLag,
    HttpEndpoint,
    Memory,
    QueueLength,
    UnpublishedMessages,
)
from celery5.health.health_check import CheckContext, HealthCheck
from celery5.protocol.observability.queue_depth import QueueDepth


class Broken:
    """A ground on which everything is wrong: Redis `answers` so, after this many seconds."""

    def __init__(self, answer: Any, after: float = 0.0) -> None:
        self._answer = answer
        self._after = after

    async def perform(self, call: Call[Any], /) -> Any:
        await trio.sleep(self._after)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def perform_all(self, calls: Any, /) -> Any:
        return [await self.perform(call) for call in calls]


AWAY = Broken(BrokerUnavailable("broker is away"))
CASES: list[tuple[Callable[[], HealthCheck], Broken, str]] = [
    (BrokerPing, AWAY, "broker is away"),
    (lambda: BrokerPing(limit=0.05), Broken(b"PONG", 30), "the limit is 0.05 s"),
    (lambda: EventLoopLag(limit=1e-9), AWAY, "late; the limit is"),
    (lambda: Memory(needed=2**60), AWAY, "are available,"),
    (lambda: Memory(needed=1, limit=1), AWAY, "this process has"),
    (lambda: Disk(needed=2**60), AWAY, "are free on the disk of /"),
    (
        lambda: QueueLength("mail", limit=5),
        Broken(QueueDepth(waiting=4, oldest=1.0, dead=0, held=3, backlog=7)),
        "7 jobs wait on queue mail; the limit is 5",
    ),
    (
        lambda: UnpublishedMessages(SimpleNamespace(size=7), limit=5),
        AWAY,
        "7 messages wait that Redis has not got; the limit is 5",
    ),
    (lambda: HttpEndpoint("http://127.0.0.1:1/"), AWAY, "refused"),
    (lambda: HttpEndpoint("http://127.0.0.1:1/", is_secure=lambda: False), AWAY, "the network is not secure"),
]


@pytest.mark.parametrize(("make", "ground", "reason"), CASES)
async def test_a_check_that_is_not_healthy_says_why(
    make: Callable[[], HealthCheck], ground: Broken, reason: str
) -> None:
    check = make()
    found = await check.run_check(
        check.functions[0] if check.functions else None, CheckContext(Keys("shop"), ground)
    )
    states = [found] if isinstance(found, str) else list(found)  # type: ignore[call-overload]
    assert set(states) - {check.good_state}
    assert reason in check.why


def test_every_check_that_celery5_brings_along_was_asked() -> None:
    there = {
        checked
        for checked in vars(checks).values()
        if inspect.isclass(checked)
        and issubclass(checked, HealthCheck)
        and checked.__module__ == checks.__name__
    }
    assert {type(make()) for make, _, _ in CASES} == there
