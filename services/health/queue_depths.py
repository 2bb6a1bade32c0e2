"""Queue Depths: measures how far behind queues are, for /metrics.

A worker measures its own queues, a Controller all of its application's. Each queue is one script whose cost does not
grow with the queue. A process without a status port measures nothing, since nobody could see it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import trio

from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import QueueDepth
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.broker.routing.broker_router import run_all_async
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.services.health.vitals import ProcessStatus

EVERY = 5.0
"""Seconds between two measurements."""
EACH = 2.0
"""Seconds between two measurements for each queue, where there are several: at most half a command in a second."""
MOST = 64
"""Queues of one broker that are measured."""

T = TypeVar("T")


class QueueDepths:
    """Measures the queues `measured`, or, where that is None, all queues that the application has used.

    `depth_ways` lead to the brokers, by name; `home` returns the broker that a queue is on.
    """

    def __init__(
        self,
        *,
        depth_brokers: Mapping[str, AsyncDriver],
        find_broker: Callable[[str], str],
        keys: Keys,
        measured_queues: Sequence[str] | None,
        is_measuring: bool,
        process_status: ProcessStatus,
        log: Log,
    ) -> None:
        self._ways = depth_brokers
        self._home = find_broker
        self._keys = keys
        self._measured = measured_queues
        self._measures = is_measuring
        self._vitals = process_status
        self._log = log
        self._queues: dict[str, QueueKeys] = {}
        self._known: dict[str, set[str]] = {}
        self._warned: set[str] = set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Measure until cancelled."""
        task_status.started()
        if not self._measures:
            await trio.sleep_forever()
        try:
            while True:
                counts = await run_all_async([partial(self._measure, broker) for broker in self._ways])
                for broker, count in zip(self._ways, counts, strict=True):
                    if isinstance(count, BrokerError):
                        # An old number would say that all is well with a queue of which nothing is known.
                        self._publish(broker, {})
                        self._log.event("depths:read-failed", "debug", broker=broker, why=str(count))
                most = max((each for each in counts if isinstance(each, int)), default=0)
                await trio.sleep(max(EVERY, EACH * most))
        finally:
            for broker in self._ways:
                self._publish(broker, {})

    async def _measure(self, broker: str) -> int:
        """Measure the queues of one broker; return how many there are."""
        redis, names = self._ways[broker], self._measured
        if names is None:
            used = await redis.perform(jobs.list_queues(self._keys))
            names = [name for name in used if self._home(name) == broker]
        names = sorted(names)
        self._warn_of(names[MOST:], broker)
        names = names[:MOST]
        asked = [
            jobs.get_queue_depth(self._queues.setdefault(name, self._keys.for_queue(name))) for name in names
        ]
        found = await redis.perform_all(asked) if asked else []
        self._publish(broker, dict(zip(names, found, strict=True)))
        return len(names)

    def _warn_of(self, left_out: Sequence[str], broker: str) -> None:
        """Say once for each broker that some of its queues have no numbers, and name the first of them."""
        if left_out and broker not in self._warned:
            self._warned.add(broker)
            self._log.event(
                "depths:truncated",
                "warning",
                broker=broker,
                queues=len(left_out),
                first=left_out[0],
                most=MOST,
            )

    def _publish(self, broker: str, found: Mapping[str, QueueDepth]) -> None:
        """Replace what is known of a broker's queues."""
        depths = self._vitals.depths
        for queue in self._known.get(broker, set()) - found.keys():
            depths.pop(queue, None)
        self._known[broker] = set(found)
        depths.update(found)
