"""A worker that is stopped while it joins its queues leaves them: it does not count as lost when its lease lapses."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import trio

from celery5.bootsteps.worker_steps import EventsMembership, QueueMembership
from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.logs.log import NullLog
from celery5.services.process.lease import Lease
from celery5.services.process.step_status import StepStatus

KEYS = Keys("shop")


class Redis:
    """A Redis that runs a call to join and does not answer it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has_joined = trio.Event()

    async def perform(self, call: Call[Any], /) -> Any:
        (reply,) = await self.perform_all([call])
        return reply

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        await trio.lowlevel.checkpoint()
        names = [call.script.name.rpartition("/")[2] for call in calls if call.script is not None]
        self.calls += names
        if "join" in names:
            self.has_joined.set()
            await trio.sleep_forever()
        return [0] * len(calls)


class Departure:
    """A departure that no error causes."""

    is_death = False

    def report_left(self, *, holding: bool) -> None:
        assert not holding


def make_membership(kind: type, redis: Redis) -> Any:
    """Return what joins the queue `mail`."""
    common: dict[str, Any] = {
        "redis": redis,
        "consumed": [KEYS.for_queue("mail")],
        "lease": Lease(seconds=10.0),
        "log": NullLog(),
        "worker": "till:a",
    }
    if kind is EventsMembership:
        return EventsMembership(**common, step_status=StepStatus())
    return QueueMembership(
        **common,
        keys=KEYS,
        departure=cast("Any", Departure()),
        used=(),
        doubted=set(),
        recipients={},
    )


@pytest.mark.parametrize("kind", [QueueMembership, EventsMembership])
async def test_worker_that_is_stopped_while_it_joins_leaves_its_queues(kind: type) -> None:
    redis = Redis()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make_membership(kind, redis).run)
            await redis.has_joined.wait()
            nursery.cancel_scope.cancel()
    assert redis.calls == ["join", "leave"]
