"""Revoke jobs that this worker holds.

A channel may lose messages, and a message may come before the reply that brings the job. So messages are remembered
for a short time; and at each heartbeat the worker reads the places of the jobs that it has held for a while. The place
in Redis decides: a worker that has missed a revocation finds it when it settles the job.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import trio

from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.states import Place
from celery5.services.job.in_flight import InFlightJobs
from celery5.services.worker.task_execution import TaskExecution

MIN_HELD_SECONDS = 0.5
"""Seconds that a job is held before its place is read at the next heartbeat."""
PAGE_SIZE = 500
"""Places read in one call."""
REMEMBER_SECONDS = 1.0
"""Seconds that a revocation is remembered whose job this worker does not hold (yet)."""
POLL_INTERVAL = 0.05
"""Seconds between checks for such jobs."""
MAX_REMEMBERED = 10_000
"""The most revocations that are remembered."""

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
        self._in_flight = in_flight
        self._execution = task_execution
        self._log = log
        self._remembered: dict[EntryKey, float] = {}
        self._pending_filter: Callable[[Delivery], bool] | None = None
        self._changed = trio.Event()

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [keys.revoke for keys in self._queues.values()]

    def on_message(self, channel: bytes, payload: bytes) -> None:
        """Remember a revocation: of the entry `payload` in the stream of a queue, which some worker holds."""
        if len(self._remembered) < MAX_REMEMBERED:
            self._remembered[self._queues[channel].queue, payload] = trio.current_time() + REMEMBER_SECONDS
            self._changed.set()

    def on_heartbeat(self, _keys: QueueKeys, _pulse: HeartbeatReply) -> None:
        """Read the places of held jobs, if one has been held for a while."""
        oldest = self._in_flight.get_oldest()
        if oldest is not None and _is_held_long(oldest):
            self._pending_filter = self._pending_filter or _is_held_long
            self._changed.set()

    def recheck(self) -> None:
        """Read the places of all held jobs: the listening connection is new, and messages may have been missed."""
        self._pending_filter = _is_any
        self._changed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Revoke jobs until cancelled."""
        task_status.started()
        while True:
            with trio.move_on_after(POLL_INTERVAL if self._remembered else float("inf")):
                await self._changed.wait()
            self._changed = trio.Event()
            self._revoke_remembered()
            if self._pending_filter is not None:
                await self._revoke_by_place()

    def _revoke_remembered(self) -> None:
        now = trio.current_time()
        for place, until in list(self._remembered.items()):
            delivery = self._in_flight.find(place)
            if delivery is not None:
                self._execution.revoke(delivery)
            if delivery is not None or until < now:
                del self._remembered[place]

    async def _revoke_by_place(self) -> None:
        """Read the places of held jobs, and revoke those that were revoked in Redis."""
        is_selected, self._pending_filter = self._pending_filter, None
        by_queue: dict[str, list[Delivery]] = {keys.queue: [] for keys in self._queues.values()}
        for delivery in self._in_flight:
            if delivery.command is not None and is_selected is not None and is_selected(delivery):
                by_queue[delivery.queue].append(delivery)
        for keys in self._queues.values():
            pages = list(_split_in_pages(by_queue[keys.queue]))
            ids = [[delivery.command.id for delivery in page if delivery.command] for page in pages]
            try:
                replies = await self._redis.perform_all([jobs_calls.get_places(keys, page) for page in ids])
            except BrokerError as error:
                self._log.event("revocations:read-failed", "debug", queue=keys.queue, why=str(error))
                continue  # the next heartbeat reads them again
            for page, places in zip(pages, replies, strict=True):
                for delivery, place in zip(page, places, strict=True):
                    if place == _REVOKED + delivery.entry:
                        self._execution.revoke(delivery)


_REVOKED = Place.REVOKED.encode()


def _is_held_long(delivery: Delivery) -> bool:
    return delivery.read < time.time() - MIN_HELD_SECONDS


def _is_any(_delivery: Delivery) -> bool:
    return True


def _split_in_pages(deliveries: Sequence[Delivery]) -> Iterable[Sequence[Delivery]]:
    return [deliveries[at : at + PAGE_SIZE] for at in range(0, len(deliveries), PAGE_SIZE)]
