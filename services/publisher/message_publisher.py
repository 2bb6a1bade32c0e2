"""Message publisher: publish the waiting messages of one broker, over a varying number of connections.

A queue uses one connection at a time, with at most 200 messages or 4 MiB in one trip, so its order is kept.
Messages that Redis refused, or whose result is unknown, are published again: Redis recognises their ids. When
queues wait although all connections are busy, another connection is opened, up to the limit; one that is idle
for a while is closed.
"""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.connection.link import LinkEvent
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.broker.timing import Timing
from celery5.broker.topologies import ClusterFound, remember_clusters
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.health.checks import BrokerPing
from celery5.health.health_check import HealthCheck
from celery5.logs.log import Level, Log
from celery5.protocol.job.job import Job
from celery5.protocol.job.messages import read_headers
from celery5.protocol.job.retry_policy import full_jitter
from celery5.protocol.observability.families import MetricFamily, make_counter, make_gauge
from celery5.protocol.publisher.frames import make_job
from celery5.runners.operations import operating
from celery5.sending.messages_backlog import StoredMessage
from celery5.sending.publisher import PublishPlanner
from celery5.sending.publishing_checks import PublishingChecks
from celery5.services.publisher.messages_store import MessagesStore

GROW_AFTER = 0.1
"""Seconds that a queue waits for a connection before another one is opened."""
IDLE_LIMIT = 10.0
"""Seconds without work after which a connection above the minimum is closed."""
BREAKER_RESET = 1.0
"""Seconds that the breaker of the broker's check stays open."""
PING_PERIOD = 10.0
REFUSED_PAUSE = 5.0
"""Seconds until a broker that refused authentication is tried again."""
DRAIN_POLL_PERIOD = 0.1
"""Seconds between checks whether the broker accepts anything while the process stops."""
MAX_LOGGED_ERRORS = 100
"""The most current errors that are logged."""
BACKOFF_CAP = 2.0
"""The most seconds between attempts to publish what Redis refuses.

The delay doubles up to this, with full jitter.
"""


def make_broker_check(broker: str) -> HealthCheck:
    """Return the default check of a broker: whether it answers. Three failures in two minutes trip its breaker."""
    return BrokerPing(f"broker-{broker}", limit=5.0, period=PING_PERIOD, allowed={"unhealthy": 2})


T = TypeVar("T")


class _FirstConnection:
    """The first of several connections, for the broker's health check."""

    def __init__(self, connections: Sequence[TrioRedis]) -> None:
        self._connections = connections

    async def perform(self, call: Call[T], /) -> T:
        """Perform one call. Raises BrokerError."""
        return await self._first().perform(call)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Perform several calls in one write. Raises BrokerError."""
        return await self._first().perform_all(calls)

    def _first(self) -> TrioRedis:
        if not self._connections:
            raise BrokerUnavailable("there is no connection yet")
        return self._connections[0]


class PublisherConnections(msgspec.Struct, frozen=True, kw_only=True):
    """How a Message Publisher connects to its broker."""

    endpoint: Endpoint
    timing: Timing
    # The name of the process; the server lists it.
    name: str
    # Called with what happens to a connection.
    on_link_event: Callable[[LinkEvent], None]
    # The least and the most connections at a time.
    min_count: int
    max_count: int

    def connect(self) -> TrioRedis:
        """Return another connection, which is not running yet."""
        return open_redis(
            endpoint=self.endpoint,
            timing=self.timing,
            name=f"{self.name}:publisher",
            watch=self.on_link_event,
        )


class MessagePublisher:
    """Publishes the messages in `store` to one broker.

    Args:
        own_checks: the application's own checks, which hold up all its brokers.
        drain_limit: the most seconds to go on publishing after cancellation, while the broker accepts messages.
    """

    def __init__(
        self,
        *,
        store: MessagesStore,
        keys: Keys,
        connections: PublisherConnections,
        own_checks: PublishingChecks,
        drain_limit: float,
        log: Log,
    ) -> None:
        self._store = store
        self._planner = PublishPlanner(keys=keys)
        self._connections = connections
        self._open: list[TrioRedis] = []
        self._broker_check = make_broker_check(store.broker)
        self._broker_checks = PublishingChecks(
            checks=[self._broker_check],
            keys=keys,
            log=log,
            redis=_FirstConnection(self._open),
            reset=BREAKER_RESET,
        )
        self._all_checks = (own_checks, self._broker_checks)
        self._drain_limit = drain_limit
        self._log = log
        self._failures_in_a_row: dict[str, int] = {}  # by queue
        self._attempts = 0
        self._failures = 0
        self._logged_errors: set[str] = set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled, then publish what is left.

        What Redis does not accept by then stays in the store.
        """
        async with trio.open_nursery() as nursery:
            work = trio.CancelScope(shield=True)
            nursery.start_soon(self._publish_all, work)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                with trio.move_on_after(self._drain_limit, shield=True):
                    await self._drain()
                work.cancel()
                self._log_messages_left()

    # ---- connections

    async def _publish_all(self, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._broker_checks.run)
                for _ in range(self._connections.min_count):
                    nursery.start_soon(self._serve, self._open_connection())
                await self._grow(nursery)

    async def _grow(self, nursery: trio.Nursery) -> None:
        """Open another connection when a queue has waited for one for a while."""
        while True:
            await self._store.wait_for_queues()
            await trio.sleep(GROW_AFTER)
            while self._needs_connection:
                nursery.start_soon(self._serve, self._open_connection())
                await trio.sleep(GROW_AFTER)

    @property
    def _needs_connection(self) -> bool:
        return (
            self._store.find_free_queue() is not None
            and self._may_publish
            and len(self._open) < self._connections.max_count
        )

    def _open_connection(self) -> TrioRedis:
        """Open another connection. It counts at once, before its task runs, so that the limit holds."""
        redis = self._connections.connect()
        self._open.append(redis)
        return redis

    async def _serve(self, redis: TrioRedis) -> None:
        """Publish over this connection until it is idle for a while and others remain.

        If it leads to a cluster, another one takes its place.
        """
        is_to_be_replaced = False
        extra = len(self._open) > self._connections.min_count
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_connected, redis)
                while True:
                    queue = ""
                    with trio.move_on_after(IDLE_LIMIT if extra else float("inf")):
                        queue = await self._take_queue()
                    if not queue:
                        break
                    await self._publish_first(redis, queue, nursery)
                nursery.cancel_scope.cancel()
        except* ClusterFound as errors:
            is_to_be_replaced = True
            remember_clusters(errors)
        finally:
            self._open.remove(redis)
        if is_to_be_replaced:
            await self._serve(self._open_connection())

    async def _keep_connected(self, redis: TrioRedis) -> None:
        """Keep a connection up, also when the first attempt or the authentication fails."""
        while True:
            try:
                await redis.run()
            except ClusterFound:
                raise
            except BrokerUnavailable as error:
                self._broker_checks.report_failure(self._broker_check.name, str(error))
            except BrokerError as error:
                self._log_once("publisher:refused", "error", str(error))
                self._broker_checks.report_failure(self._broker_check.name, str(error))
                await trio.sleep(REFUSED_PAUSE)

    # ---- queues

    @property
    def _may_publish(self) -> bool:
        return all(checks.all_closed for checks in self._all_checks)

    async def _take_queue(self) -> str:
        """Wait until a queue may be published to, and reserve it."""
        while True:
            for checks in self._all_checks:
                await checks.wait_until_closed()
            queue = self._store.find_free_queue()
            if queue is not None and self._may_publish:
                self._store.take_queue(queue)
                return queue
            if queue is None:
                await self._store.wait_for_queues()
            else:
                await trio.lowlevel.checkpoint()

    async def _publish_first(self, redis: TrioRedis, queue: str, nursery: trio.Nursery) -> None:
        """Publish the first messages of a queue in one trip.

        Then the queue waits behind the others if it may have more; after a failure it pauses first.
        """
        pause = 0.0
        try:
            messages = await self._read(queue)
            if messages is None:
                pause = BACKOFF_CAP
            elif messages:
                pause = await self._try_to_publish(redis, queue, messages)
                if not pause:
                    self._store.add_waiting_queue(queue)
        finally:
            if pause:
                nursery.start_soon(self._release_later, queue, pause)
            else:
                self._store.release_queue(queue)

    async def _release_later(self, queue: str, pause: float) -> None:
        try:
            await trio.sleep(pause)
        finally:
            self._store.add_waiting_queue(queue)
            self._store.release_queue(queue)

    async def _read(self, queue: str) -> Sequence[StoredMessage] | None:
        try:
            return await self._store.read_first(queue)
        except Exception as error:  # an error of the disk, or of the user's own backlog
            self._log_once("publisher:read-failed", "error", f"{type(error).__name__}: {error}", queue=queue)
            return None

    async def _try_to_publish(self, redis: TrioRedis, queue: str, messages: Sequence[StoredMessage]) -> float:
        """Make one attempt; return the seconds until the next one if it failed, else 0."""
        self._attempts += 1
        try:
            if any(message.due is not None for message in messages):
                # compute the rest of a countdown only when there is a connection
                await redis.perform(jobs_calls.PING)
            jobs = [_make_current_job(message) for message in messages]
            with operating(
                "publish", "queue", queue, len(jobs), lambda: [read_headers(job.message) for job in jobs]
            ):
                replies = await redis.perform_all(self._planner.plan_calls(jobs))
        except BrokerUnavailable as error:
            self._failures += 1
            self._log_once("publisher:interrupted", "warning", str(error), queue=queue)
            self._broker_checks.report_failure(self._broker_check.name, str(error))
        except Exception as error:  # a refusal concerns this queue alone
            self._failures += 1
            self._log_once("publisher:refused", "error", str(error), queue=queue)
        else:
            self._planner.record_published(jobs, replies)
            self._store.mark_published(queue, messages)
            self._failures_in_a_row.pop(queue, None)
            if self._logged_errors and not self._failures_in_a_row:
                self._logged_errors.clear()
                self._log.event("publisher:resumed", broker=self._store.broker)
            return 0.0
        attempt = self._failures_in_a_row[queue] = self._failures_in_a_row.get(queue, 0) + 1
        return max(0.01, full_jitter(attempt, start=0.05, cap=BACKOFF_CAP, random=random.random))

    # ---- shutdown

    async def _drain(self) -> None:
        while self._store.has_work:
            if self._store.is_durable and not self._may_publish:
                return
            with trio.move_on_after(DRAIN_POLL_PERIOD):
                await self._store.wait_for_queues()

    def _log_messages_left(self) -> None:
        if self._store.has_work:
            self._log.event(
                "publisher:messages-left", "warning", broker=self._store.broker, messages=self._store.size
            )

    def _log_once(self, event: str, level: Level, why: str, **fields: str) -> None:
        """Log each problem once."""
        if why not in self._logged_errors and len(self._logged_errors) < MAX_LOGGED_ERRORS:
            self._logged_errors.add(why)
            self._log.event(event, level, broker=self._store.broker, why=why, **fields)

    # ---- health and metrics

    def conditions(self) -> Mapping[str, str]:
        """Return the problem, if the broker does not accept messages."""
        return self._broker_checks.conditions()

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the metrics of connections and attempts."""
        labels = {"broker": self._store.broker}
        yield make_gauge(
            "celery5_publisher_connections", "Connections to the broker.", (float(len(self._open)), labels)
        )
        yield make_counter(
            "celery5_publisher_attempts_total", "Attempts to publish.", (float(self._attempts), labels)
        )
        yield make_counter(
            "celery5_publisher_failures_total",
            "Attempts to publish that failed.",
            (float(self._failures), labels),
        )
        yield from self._broker_checks.metric_families()


def _make_current_job(message: StoredMessage) -> Job:
    """Return the job as it is to be published now, with the rest of its countdown."""
    if message.due is None:
        return make_job(message.job, message.job.at)
    return make_job(message.job, f"+{max(0, message.due - int(time.time() * 1000))}")
