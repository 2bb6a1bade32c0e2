"""Event Acts: what a Router itself does at an event, besides making jobs of it: it suspends and resumes tasks.

Each act may be done again, when its Router dies before the event has ended.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec

from celery5.broker.calls import limits
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import Corrupt
from celery5.logs.log import Log
from celery5.protocol.events.messages import EventMessage, format_subject
from celery5.protocol.limits import Suspension

EventAction = Callable[[EventMessage], Awaitable[None]]
"""Takes the event. Raises Corrupt for fields that make no sense, BrokerError when AsyncDriver does not serve."""

T = TypeVar("T")


class _Suspended(msgspec.Struct):
    task: str
    why: str = ""


class _Resumed(msgspec.Struct):
    task: str


class EventActions:
    """The acts of one Router, by what they are done at."""

    def __init__(self, *, redis: AsyncDriver, keys: Keys, log: Log) -> None:
        self._redis = redis
        self._keys = keys
        self._log = log

    @property
    def actions(self) -> Mapping[str, EventAction]:
        """Each act by the event and its version."""
        return {
            format_subject("celery5.TaskSuspended", 1): self._suspend,
            format_subject("celery5.TaskResumed", 1): self._resume,
        }

    async def _suspend(self, event: EventMessage) -> None:
        said = _fields(event, _Suspended)
        what = Suspension(why=said.why, by=f"event {event.id}", since=event.sent)
        await self._redis.perform(limits.suspend_task(self._keys, said.task, what))
        self._log.event("events:task-suspended", "warning", task=said.task, why=said.why)

    async def _resume(self, event: EventMessage) -> None:
        said = _fields(event, _Resumed)
        await self._redis.perform(limits.resume_task(self._keys, said.task))
        self._log.event("events:task-resumed", task=said.task)


S = TypeVar("S", _Suspended, _Resumed)


def _fields(event: EventMessage, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(msgspec.json.encode(event.fields), type=kind)
    except ValueError as error:
        raise Corrupt(f"event {event.event}: {error}") from None
