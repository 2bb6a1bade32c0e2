"""Report the status of the parts of a process, and measure how far behind its queues are."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import ClassVar, Protocol

import trio

from celery5.broker.calls import queues as queue_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.broker.routing.broker_router import run_all_async
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.observability.storage import read_broker_memory
from celery5.protocol.health.breaker import CONNECTION_PREFIX, STATE_NUMBERS, BreakerState
from celery5.protocol.observability.families import MetricFamily, make_counter, make_gauge
from celery5.protocol.observability.queue_depth import QueueDepth, merge_depths
from celery5.protocol.scaling.resource_budget import ResourceUse
from celery5.protocol.scheduling.timers import TimerCounts
from celery5.protocol.shards import take_queues
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.health.vitals import ProcessStatus
from celery5.services.process.broker_outages import OutageLog
from celery5.services.process.lease import Lease


class StatusConnection(Protocol):
    """One of the connections to Redis."""

    @property
    def connected(self) -> bool: ...

    @property
    def breaker(self) -> BreakerState: ...


class ConnectionStatus:
    """Reports the connections to Redis, by name."""

    def __init__(self, **connections: StatusConnection) -> None:
        self._connections = connections

    def conditions(self) -> Mapping[str, str]:
        """Return what is wrong with each connection: it is not connected, or its circuit breaker is not closed."""
        return {name: _get_problem(connection) for name, connection in self._connections.items()}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield whether each is connected, and the states of the circuit breakers."""
        yield make_gauge(
            "celery5_connected",
            "1 if the process is connected to Redis.",
            *[
                (float(connection.connected), {"connection": name})
                for name, connection in self._connections.items()
            ],
        )
        yield _make_breaker_gauge(
            (f"{CONNECTION_PREFIX}{name}", "delay", connection.breaker)
            for name, connection in self._connections.items()
        )


def _make_breaker_gauge(breakers: Iterable[tuple[str, str, BreakerState]]) -> MetricFamily:
    """Return the states of breakers, of which each is given by what it protects, its mode and its state."""
    return make_gauge(
        "celery5_breaker_state",
        "Circuit breakers of tasks, services, connections, the webhook and outlets: 0 closed, 1 half-open, 2 open.",
        *[(float(STATE_NUMBERS[state]), {"of": name, "mode": mode}) for name, mode, state in breakers],
        merge="max",
    )


def _get_problem(connection: StatusConnection) -> str:
    if connection.breaker is not BreakerState.CLOSED:
        return f"its circuit breaker is {connection.breaker.value}"
    return "" if connection.connected else "there is no connection"


class DocumentMetrics:
    """Reports the documents of a Router by sink or source: `delivered` and dead-lettered, `waiting`, `published`."""

    def __init__(
        self,
        *,
        delivered: Callable[[], Mapping[str, tuple[int, int]]],
        waiting: Callable[[], Mapping[str, int]],
        published: Callable[[], Mapping[str, int]],
    ) -> None:
        self._delivered = delivered
        self._waiting = waiting
        self._published = published

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: a failing sink or source does not stop the Router."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the numbers of documents."""
        delivered = self._delivered()
        yield make_counter(
            "celery5_sink_documents_total",
            "Documents delivered to Data Sinks.",
            *[(float(written), {"sink": name}) for name, (written, _) in delivered.items()],
        )
        yield make_counter(
            "celery5_sink_dead_lettered_total",
            "Documents that were dead-lettered because a Data Sink refused them.",
            *[(float(dead), {"sink": name}) for name, (_, dead) in delivered.items()],
        )
        yield make_gauge(
            "celery5_sink_documents_waiting",
            "Documents that wait to be delivered to a Data Sink, in all Routers together.",
            *[(float(count), {"sink": name}) for name, count in self._waiting().items()],
            merge="max",
        )
        yield make_counter(
            "celery5_source_documents_total",
            "Documents read from Data Sources.",
            *[(float(count), {"source": name}) for name, count in self._published().items()],
        )


class BreakerMetrics:
    """Reports all circuit breakers but those of connections."""

    def __init__(self, circuit_breakers: CircuitBreakers) -> None:
        self._circuit_breakers = circuit_breakers

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: the worker is ready for all other tasks."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the state and the trips of each."""
        readings = self._circuit_breakers.get_readings()
        yield _make_breaker_gauge(
            (name, reading.mode, BreakerState(reading.state)) for name, reading in readings.items()
        )
        yield make_counter(
            "celery5_breaker_trips_total",
            "How often they opened.",
            *[(reading.trips, {"of": name}) for name, reading in readings.items()],
        )


class LeaseStatus:
    """Reports the lease of the worker."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def conditions(self) -> Mapping[str, str]:
        """Return the problem, if the lease was lost or has expired."""
        if self._lease.is_lost:
            return {"lease": "others have taken this worker for dead"}
        return {"lease": "" if self._lease.is_held else "it has run out, and is not renewed"}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield whether the lease is held."""
        held = float(self._lease.is_held)
        yield make_gauge("celery5_lease_held", "1 if the worker counts as alive.", held)


class CountsHeldJobs(Protocol):
    """Counts the jobs that are held, all or of one kind."""

    def __len__(self) -> int: ...

    def count(self, kind: str, /) -> int: ...


class CountsSlots(Protocol):
    """Returns how many jobs of a kind, or of a task with its own budget, may run at once."""

    @property
    def task_kinds(self) -> Mapping[str, str]:
        """The kinds of those tasks."""
        ...

    def get_slots(self, name: str, /) -> int: ...

    def get_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return for each kind and task its `current` slots, its `executing` jobs, and its `maximum`."""
        ...

    def get_cpu_shares(self) -> Mapping[str, float]:
        """Return what share of its time each task in threads computes, where the slots follow that."""
        ...


class CountsResources(Protocol):
    """Knows what a worker has for jobs that take resources."""

    def get_use(self) -> Mapping[str, ResourceUse]: ...


class CountsRunningJobs(Protocol):
    """Counts the jobs that run."""

    @property
    def running_count(self) -> int: ...


class JobMetrics:
    """Reports the jobs in the worker (held, waiting, running) and its slots.

    Args:
        in_flight: The jobs of the worker.
        queues: The jobs that wait for a slot, by kind, and by task with its own budget.
        budget: The slots.
        task_execution: The running jobs.
        resource_slots: The resources that jobs take.
        kinds: The kinds of the worker's tasks.
    """

    def __init__(
        self,
        *,
        in_flight: CountsHeldJobs,
        queues: Mapping[str, Sized],
        budget: CountsSlots,
        task_execution: CountsRunningJobs,
        resource_slots: CountsResources,
        kinds: Collection[str],
    ) -> None:
        self._in_flight = in_flight
        self._kinds = kinds
        self._queues = queues
        self._budget = budget
        self._execution = task_execution
        self._resource_slots = resource_slots

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: a full worker is ready."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the numbers, by kind of task."""
        tasks = self._budget.task_kinds
        labels = {
            name: {"kind": tasks[name], "task": name} if name in tasks else {"kind": name}
            for name in self._queues
        }
        yield make_gauge(
            "celery5_jobs_held",
            "Jobs that this worker has read and not settled.",
            *[(self._in_flight.count(name), labels[name]) for name in labels],
        )
        yield make_gauge(
            "celery5_jobs_waiting",
            "Jobs that wait in this worker for a slot.",
            *[(len(queue), labels[name]) for name, queue in self._queues.items()],
        )
        yield make_gauge("celery5_jobs_running", "Jobs that are running.", self._execution.running_count)
        yield make_gauge(
            "celery5_slots",
            "Jobs that may run at once: the concurrency budget.",
            *[(self._budget.get_slots(name), labels[name]) for name in labels if name not in tasks],
        )
        yield from self._report_use()
        if tasks:
            yield make_gauge(
                "celery5_task_slots",
                "Jobs of a task with its own budget that may run at once, in the slots of its kind.",
                *[(self._budget.get_slots(name), labels[name]) for name in tasks],
            )
        if resources := self._resource_slots.get_use():
            yield make_gauge(
                "celery5_worker_capacity",
                "What the worker has for jobs that take resources.",
                *[(use.has, {"resource": name}) for name, use in resources.items()],
            )
            yield make_gauge(
                "celery5_worker_capacity_taken",
                "What jobs, and resources with a size, have taken of it.",
                *[(use.taken, {"resource": name}) for name, use in resources.items()],
            )
        if shares := self._budget.get_cpu_shares():
            yield make_gauge(
                "celery5_task_cpu_share",
                "The part of its time in which a job of a task in threads computes, from 0 to 1.",
                *[(share, {"task": task}) for task, share in shares.items()],
            )

    def _report_use(self) -> Iterable[MetricFamily]:
        """Yield how many slots are taken and how many there can be, of each kind that the worker has tasks of."""
        counts = {kind: count for kind, count in self._budget.get_counts().items() if kind in self._kinds}
        yield make_gauge(
            "celery5_slots_used",
            "Running jobs of the kind: slots that are taken.",
            *[(count["executing"], {"kind": kind}) for kind, count in counts.items()],
        )
        yield make_gauge(
            "celery5_slots_max",
            "The most slots that the kind may have.",
            *[(count["maximum"], {"kind": kind}) for kind, count in counts.items()],
        )


class TimerMetrics:
    """Reports the timers of the process.

    Args:
        counts: What has become of each, by name.
    """

    def __init__(self, counts: Mapping[str, TimerCounts]) -> None:
        self._counts = counts

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: a worker whose timer fails is ready."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the runs of each; nothing where there are no timers."""
        if not self._counts:
            return
        counts = self._counts.items()
        yield make_counter(
            "celery5_timer_runs_total",
            "Runs of timers that have begun.",
            *[(float(timer.runs), {"timer": name}) for name, timer in counts],
        )
        yield make_counter(
            "celery5_timer_failures_total",
            "Runs of timers that raised an error.",
            *[(float(timer.failures), {"timer": name}) for name, timer in counts],
        )
        yield make_counter(
            "celery5_timer_skipped_total",
            "Runs of timers that were left out: an earlier run had not ended, or the process was blocked.",
            *[(float(timer.skipped), {"timer": name}) for name, timer in counts],
        )
        yield make_gauge(
            "celery5_timer_running",
            "Runs of timers that have not ended.",
            *[(float(timer.running), {"timer": name}) for name, timer in counts],
        )


class CommandMetrics:
    """Reports the control commands of the process."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: a worker without an inbox works."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the number of commands by outcome."""
        yield make_counter(
            "celery5_commands_total",
            "Commands to this process, by outcome.",
            *[(float(count), {"outcome": outcome}) for outcome, count in list(self._counts.items())],
        )


class LogMetrics:
    """Reports the log messages of the process."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: a worker without a log works."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the numbers of messages; none where the process does not write its log itself."""
        if self._log.writer is not None:
            counts = self._log.writer.counts
            yield make_counter("celery5_log_written_total", "Log messages that were written.", counts.written)
            yield make_counter(
                "celery5_log_retried_total",
                "Log messages that could not be written and are tried again.",
                counts.retried,
            )
            yield make_counter("celery5_log_lost_total", "Log messages that were shed or lost.", counts.lost)


class EventMetrics:
    """Reports the events of a Router."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: the Router is ready for more events."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the number of events by outcome."""
        yield make_counter(
            "celery5_events_total",
            "Events by outcome, and the jobs that were made of them.",
            *[(float(count), {"outcome": outcome}) for outcome, count in self._counts.items()],
        )


DEPTH_INTERVAL = 5.0
"""The least seconds between two measurements of all queues."""
INTERVAL_PER_QUEUE = 2.0
"""Seconds between two measurements for each queue, so that many queues cost at most half a command in a second."""
MAX_MEASURED_QUEUES = 64
"""The most queues of one broker that are measured."""


class QueueDepths:
    """Measures for /metrics how far behind queues are: those of a worker, or all that the application has used.

    A measurement is one script for each queue, whose cost does not grow with the queue. A process without a status port
    measures nothing.

    Args:
        depth_brokers: The drivers of the brokers, by name.
        find_broker: Returns the name of a queue's broker.
        measured_queues: The queues; None for all that the application has used.
    """

    only_observes: ClassVar = True

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
        self._brokers = depth_brokers
        self._find_broker = find_broker
        self._keys = keys
        self._measured_queues = measured_queues
        self._is_measuring = is_measuring
        self._process_status = process_status
        self._log = log
        self._queues: dict[str, QueueKeys] = {}
        self._published: dict[str, set[str]] = {}
        self._warned_brokers: set[str] = set()
        self._outages = {
            broker: OutageLog(log, "depths:read-failed", broker=broker) for broker in depth_brokers
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Measure until cancelled."""
        task_status.started()
        if not self._is_measuring:
            await trio.sleep_forever()
        try:
            while True:
                results = await run_all_async([partial(self._measure, broker) for broker in self._brokers])
                for broker, result in zip(self._brokers, results, strict=True):
                    if isinstance(result, BrokerError):
                        # An old number would hide that the depth is unknown now.
                        self._publish(broker, {})
                        self._process_status.set_memory(broker, None)
                        self._outages[broker].record_error(result)
                    else:
                        self._outages[broker].record_recovery()
                queue_count = max((result for result in results if isinstance(result, int)), default=0)
                await trio.sleep(max(DEPTH_INTERVAL, INTERVAL_PER_QUEUE * queue_count))
        finally:
            for broker in self._brokers:
                self._publish(broker, {})
                self._process_status.set_memory(broker, None)

    async def _measure(self, broker: str) -> int:
        """Measure the queues of one broker; return how many there are."""
        redis, names = self._brokers[broker], self._measured_queues
        if names is None:
            used = await redis.perform(queue_calls.list_queues(self._keys))
            names = [name for name in used if self._find_broker(name) == broker]
        measured = take_queues(sorted(names), MAX_MEASURED_QUEUES)
        self._warn_of(sorted(set(names).difference(measured)), broker)
        names = measured
        queues = [self._queues.setdefault(name, self._keys.for_queue(name)) for name in names]
        calls = [queue_calls.get_queue_depth(queue) for queue in queues]
        depths = await redis.perform_all(calls) if calls else []
        self._process_status.set_memory(broker, await read_broker_memory(broker, redis))
        self._publish(broker, merge_depths(dict(zip(names, depths, strict=True))))
        return len(names)

    def _warn_of(self, left_out: Sequence[str], broker: str) -> None:
        """Log once for each broker that some of its queues are not measured, and the first of them."""
        if left_out and broker not in self._warned_brokers:
            self._warned_brokers.add(broker)
            self._log.event(
                "depths:truncated", "warning", broker=broker, queues=len(left_out), first=left_out[0],
                most=MAX_MEASURED_QUEUES,
            )  # fmt: skip

    def _publish(self, broker: str, depths: Mapping[str, QueueDepth]) -> None:
        """Replace the depths of one broker's queues."""
        self._process_status.replace_depths(self._published.get(broker, ()), depths)
        self._published[broker] = set(depths)
