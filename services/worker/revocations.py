"""Revocations: tells jobs in this worker that they were revoked (C107).

A channel may lose what is said on it, and may be quicker than the answer that brings the job. So what is heard is kept
for a moment; and at each beat the worker asks for the places of what it has held for a while. The place in Redis is
what counts: whoever misses a revocation altogether finds it when it settles the job.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import trio

from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls.jobs import HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery
from celery5.services.worker.in_flight import InFlightJobs
from celery5.services.worker.task_execution import TaskExecution

MIN_HELD_SECONDS = 0.5
"""Seconds after which a job's place is asked for at the next beat."""
PAGE_SIZE = 500
"""Places asked for in one call."""
REMEMBER_SECONDS = 1.0
"""Seconds that a revocation is remembered whose job is not here (yet)."""
POLL_INTERVAL = 0.05
"""Seconds between looks for such jobs."""
MAX_REMEMBERED = 10_000
"""How many of them are remembered."""

EntryKey = tuple[str, bytes]


class Revocations:
    """Listens for revocations on the queues of one worker."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        consumed: Sequence[QueueKeys],
        in_flight: InFlightJobs,
        task_execution: TaskExecution,
        log: Log,
    ) -> None:
        self._redis = redis
        self._queues: Mapping[bytes, QueueKeys] = {keys.revoke.encode(): keys for keys in consumed}
        self._ledger = in_flight
        self._execution = task_execution
        self._log = log
        self._heard: dict[EntryKey, float] = {}
        self._asked: Callable[[Delivery], bool] | None = None
        self._news = trio.Event()

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [keys.revoke for keys in self._queues.values()]

    def on_message(self, channel: bytes, payload: bytes) -> None:
        """A job of this queue, the entry `payload` of its stream, was revoked while a worker had it: this one?"""
        if len(self._heard) < MAX_REMEMBERED:
            self._heard[self._queues[channel].queue, payload] = trio.current_time() + REMEMBER_SECONDS
            self._news.set()

    def on_heartbeat(self, _keys: QueueKeys, _pulse: HeartbeatReply) -> None:
        """At each beat of the heart: ask, if something has been held for a while."""
        oldest = self._ledger.get_oldest()
        if oldest is not None and _held(oldest):
            self._asked = self._asked or _held
            self._news.set()

    def recheck(self) -> None:
        """The listening connection was made anew: something may have been missed."""
        self._asked = _any
        self._news.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Withdraw what was revoked, until cancelled."""
        task_status.started()
        while True:
            with trio.move_on_after(POLL_INTERVAL if self._heard else float("inf")):
                await self._news.wait()
            self._news = trio.Event()
            self._withdraw_heard()
            if self._asked is not None:
                await self._ask()

    def _withdraw_heard(self) -> None:
        now = trio.current_time()
        for place, until in list(self._heard.items()):
            delivery = self._ledger.find(place)
            if delivery is not None:
                self._execution.revoke(delivery)
            if delivery is not None or until < now:
                del self._heard[place]

    async def _ask(self) -> None:
        """Ask for the places of what is held, and withdraw what was revoked."""
        asked, self._asked = self._asked, None
        by_queue: dict[str, list[Delivery]] = {keys.queue: [] for keys in self._queues.values()}
        for delivery in self._ledger:
            if delivery.envelope is not None and asked is not None and asked(delivery):
                by_queue[delivery.queue].append(delivery)
        for keys in self._queues.values():
            portions = list(_portions(by_queue[keys.queue]))
            ids = [[each.envelope.id for each in some if each.envelope] for some in portions]
            try:
                answers = await self._redis.perform_all([jobs_calls.get_places(keys, some) for some in ids])
            except BrokerError as error:
                self._log.event("revocations:read-failed", "debug", queue=keys.queue, why=str(error))
                continue  # the next beat asks again
            for some, places in zip(portions, answers, strict=True):
                for delivery, place in zip(some, places, strict=True):
                    if place == b"V" + delivery.entry:
                        self._execution.revoke(delivery)


def _held(delivery: Delivery) -> bool:
    return delivery.read < time.time() - MIN_HELD_SECONDS


def _any(_delivery: Delivery) -> bool:
    return True


def _portions(deliveries: Sequence[Delivery]) -> Iterable[Sequence[Delivery]]:
    return [deliveries[at : at + PAGE_SIZE] for at in range(0, len(deliveries), PAGE_SIZE)]
