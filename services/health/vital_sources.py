"""Vital sources: what the parts of a worker know of how they do."""

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Protocol

from celery5.logs.log import Log
from celery5.protocol.health.breaker import BreakerState
from celery5.protocol.health.metrics import MetricFamily, make_counter, make_gauge
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.worker.lease import Lease

_STATES: Mapping[BreakerState, int] = {
    BreakerState.CLOSED: 0,
    BreakerState.HALF_OPEN: 1,
    BreakerState.OPEN: 2,
}


class StatusConnection(Protocol):
    """One of the worker's connections to Redis."""

    @property
    def connected(self) -> bool: ...

    @property
    def breaker(self) -> BreakerState: ...


class ConnectionStatus:
    """The connections to Redis, by name."""

    def __init__(self, **connections: StatusConnection) -> None:
        self._connections = connections

    def conditions(self) -> Mapping[str, str]:
        """Each is there, and its circuit breaker closed."""
        return {name: _fault(each) for name, each in self._connections.items()}

    def metric_families(self) -> Iterable[MetricFamily]:
        """The same as numbers."""
        yield make_gauge(
            "celery5_connected",
            "1 if the process is connected to Redis.",
            *[(float(each.connected), {"connection": name}) for name, each in self._connections.items()],
        )
        yield make_gauge(
            "celery5_connection_breaker_state",
            "Circuit breakers of connections to the broker: 0 closed, 1 half-open, 2 open.",
            *[(_STATES[each.breaker], {"breaker": name}) for name, each in self._connections.items()],
        )


def _fault(connection: StatusConnection) -> str:
    if connection.breaker is not BreakerState.CLOSED:
        return f"its circuit breaker is {connection.breaker.value}"
    return "" if connection.connected else "there is no connection"


class DocumentMetrics:
    """What a Router has `given` to Data Sinks, written and buried, what is `waiting` for them, and what is
    `taken` from Data Sources, each by name."""

    def __init__(
        self,
        *,
        delivered: Callable[[], Mapping[str, tuple[int, int]]],
        waiting: Callable[[], Mapping[str, int]],
        published: Callable[[], Mapping[str, int]],
    ) -> None:
        self._given = delivered
        self._waiting = waiting
        self._taken = published

    def conditions(self) -> Mapping[str, str]:
        """A sink or a source that fails keeps the Router from nothing else."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """How many."""
        given = self._given()
        yield make_counter(
            "celery5_sink_documents_total",
            "Documents delivered to Data Sinks.",
            *[(float(written), {"sink": name}) for name, (written, _) in given.items()],
        )
        yield make_counter(
            "celery5_sink_dead_lettered_total",
            "Documents that were dead-lettered because a Data Sink refused them.",
            *[(float(buried), {"sink": name}) for name, (_, buried) in given.items()],
        )
        yield make_gauge(
            "celery5_sink_documents_waiting",
            "Documents that wait to be delivered to a Data Sink, in all Routers together.",
            *[(float(count), {"sink": name}) for name, count in self._waiting().items()],
        )
        yield make_counter(
            "celery5_source_documents_total",
            "Documents read from Data Sources.",
            *[(float(count), {"source": name}) for name, count in self._taken().items()],
        )


class BreakerMetrics:
    """The circuit breakers of tasks and services: those that have seen a failure, or have health checks."""

    def __init__(self, circuit_breakers: CircuitBreakers) -> None:
        self._circuits = circuit_breakers

    def conditions(self) -> Mapping[str, str]:
        """Whatever is held up, the worker is ready for the rest."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """State and trips of each."""
        told = self._circuits.get_readings()
        yield make_gauge(
            "celery5_breaker_state",
            "Circuit breakers of tasks and services: 0 closed, 1 half-open, 2 open.",
            *[
                (_STATES[BreakerState(each.state)], {"of": name, "mode": each.mode})
                for name, each in told.items()
            ],
        )
        yield make_counter(
            "celery5_breaker_trips_total",
            "How often they opened.",
            *[(each.trips, {"of": name}) for name, each in told.items()],
        )


class LeaseStatus:
    """The worker's lease."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def conditions(self) -> Mapping[str, str]:
        """It lasts."""
        if self._lease.is_lost:
            return {"lease": "others have taken this worker for dead"}
        return {"lease": "" if self._lease.is_valid() else "it has run out, and is not renewed"}

    def metric_families(self) -> Iterable[MetricFamily]:
        """The same as a number."""
        held = not self._lease.is_lost and self._lease.is_valid()
        yield make_gauge("celery5_lease_held", "1 if the worker counts as alive.", float(held))


class CountsHeldJobs(Protocol):
    """Counts what is held, and what of it is of a kind."""

    def __len__(self) -> int: ...

    def count(self, kind: str, /) -> int: ...


class CountsSlots(Protocol):
    """Says how many jobs of a kind may run at once."""

    def get_slots(self, kind: str, /) -> int: ...


class CountsRunningJobs(Protocol):
    """Runs jobs."""

    @property
    def running_count(self) -> int: ...


class JobMetrics:
    """The jobs in the worker: what it holds, what waits in it, what runs, and its slots."""

    def __init__(
        self,
        *,
        in_flight: CountsHeldJobs,
        queues: Mapping[str, Sized],
        budget: CountsSlots,
        task_execution: CountsRunningJobs,
    ) -> None:
        self._ledger = in_flight
        self._queues = queues
        self._budget = budget
        self._execution = task_execution

    def conditions(self) -> Mapping[str, str]:
        """However much there is to do, it is ready for work."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """By kind of task."""
        kinds = tuple(self._queues)
        yield make_gauge(
            "celery5_jobs_held",
            "Jobs that this worker has read and not settled.",
            *[(self._ledger.count(kind), {"kind": kind}) for kind in kinds],
        )
        yield make_gauge(
            "celery5_jobs_waiting",
            "Jobs that wait in this worker for a slot.",
            *[(len(queue), {"kind": kind}) for kind, queue in self._queues.items()],
        )
        yield make_gauge("celery5_jobs_running", "Jobs that are running.", self._execution.running_count)
        yield make_gauge(
            "celery5_slots",
            "Jobs that may run at once: the concurrency budget.",
            *[(self._budget.get_slots(kind), {"kind": kind}) for kind in kinds],
        )


class CommandMetrics:
    """The inbox."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def conditions(self) -> Mapping[str, str]:
        """A worker that nobody can command still works."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Commands by what became of them."""
        yield make_counter(
            "celery5_commands_total",
            "Commands to this process, by outcome.",
            *[(float(count), {"outcome": outcome}) for outcome, count in list(self._counts.items())],
        )


class LogMetrics:
    """What has become of the log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def conditions(self) -> Mapping[str, str]:
        """A worker whose log is lost still works."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Counts of messages; none where the process does not write its log itself."""
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
    """The events of a Router."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._routed = counts

    def conditions(self) -> Mapping[str, str]:
        """However many there are, it is ready for more."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """What became of them."""
        yield make_counter(
            "celery5_events_total",
            "Events by outcome, and the jobs that were made of them.",
            *[(float(count), {"outcome": outcome}) for outcome, count in self._routed.items()],
        )
