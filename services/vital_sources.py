"""Vital sources: what the parts of a worker know of how they do.

Floor: services. Reads: the parts it is given. Writes: nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Protocol

from celery5.log import Log
from celery5.protocol.breaker import BreakerState
from celery5.protocol.metrics import Family, counter, gauge
from celery5.services.circuits import Circuits
from celery5.services.lease import Lease

_STATES: Mapping[BreakerState, int] = {
    BreakerState.CLOSED: 0,
    BreakerState.HALF_OPEN: 1,
    BreakerState.OPEN: 2,
}


class Connection(Protocol):
    """One of the worker's connections to Redis."""

    @property
    def connected(self) -> bool: ...

    @property
    def breaker(self) -> BreakerState: ...


class Connections:
    """The connections to Redis, by name."""

    def __init__(self, **connections: Connection) -> None:
        self._connections = connections

    def conditions(self) -> Mapping[str, str]:
        """Each is there, and its circuit breaker closed."""
        return {name: _fault(each) for name, each in self._connections.items()}

    def families(self) -> Iterable[Family]:
        """The same as numbers."""
        yield gauge(
            "celery5_connected",
            "1 if the connection to Redis is there.",
            *[(float(each.connected), {"connection": name}) for name, each in self._connections.items()],
        )
        yield gauge(
            "celery5_breaker",
            "Circuit breakers: 0 closed, 1 half-open, 2 open.",
            *[(_STATES[each.breaker], {"breaker": name}) for name, each in self._connections.items()],
        )


def _fault(connection: Connection) -> str:
    if connection.breaker is not BreakerState.CLOSED:
        return f"its circuit breaker is {connection.breaker.value}"
    return "" if connection.connected else "there is no connection"


class Documents:
    """What a Router has `given` to Data Sinks, written and buried, what is `waiting` for them, and what is
    `taken` from Data Sources, each by name."""

    def __init__(
        self,
        *,
        given: Callable[[], Mapping[str, tuple[int, int]]],
        waiting: Callable[[], Mapping[str, int]],
        taken: Callable[[], Mapping[str, int]],
    ) -> None:
        self._given = given
        self._waiting = waiting
        self._taken = taken

    def conditions(self) -> Mapping[str, str]:
        """A sink or a source that fails keeps the Router from nothing else."""
        return {}

    def families(self) -> Iterable[Family]:
        """How many."""
        given = self._given()
        yield counter(
            "celery5_sink_documents_total",
            "Documents given to Data Sinks.",
            *[(float(written), {"sink": name}) for name, (written, _) in given.items()],
        )
        yield counter(
            "celery5_sink_buried_total",
            "Documents that Data Sinks would not take.",
            *[(float(buried), {"sink": name}) for name, (_, buried) in given.items()],
        )
        yield gauge(
            "celery5_sink_documents_waiting",
            "Documents that Data Sinks have not got yet, whichever Router has them.",
            *[(float(count), {"sink": name}) for name, count in self._waiting().items()],
        )
        yield counter(
            "celery5_source_documents_total",
            "Documents that Data Sources have brought.",
            *[(float(count), {"source": name}) for name, count in self._taken().items()],
        )


class Guarded:
    """The circuit breakers of tasks and services: those that have seen a failure, or have health checks."""

    def __init__(self, circuits: Circuits) -> None:
        self._circuits = circuits

    def conditions(self) -> Mapping[str, str]:
        """Whatever is held up, the worker is ready for the rest."""
        return {}

    def families(self) -> Iterable[Family]:
        """State and trips of each."""
        told = self._circuits.told()
        yield gauge(
            "celery5_circuit",
            "Circuit breakers of tasks and services: 0 closed, 1 half-open, 2 open.",
            *[
                (_STATES[BreakerState(each.state)], {"of": name, "mode": each.mode})
                for name, each in told.items()
            ],
        )
        yield counter(
            "celery5_circuit_trips_total",
            "How often they opened.",
            *[(each.trips, {"of": name}) for name, each in told.items()],
        )


class LeaseHeld:
    """The worker's lease."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def conditions(self) -> Mapping[str, str]:
        """It lasts."""
        if self._lease.lost:
            return {"lease": "others have taken this worker for dead"}
        return {"lease": "" if self._lease.lasts() else "it has run out, and is not renewed"}

    def families(self) -> Iterable[Family]:
        """The same as a number."""
        held = not self._lease.lost and self._lease.lasts()
        yield gauge("celery5_lease_held", "1 if the worker counts as alive.", float(held))


class HoldsKinds(Protocol):
    """Counts what is held, and what of it is of a kind."""

    def __len__(self) -> int: ...

    def held(self, kind: str, /) -> int: ...


class HasSlots(Protocol):
    """Says how many jobs of a kind may run at once."""

    def slots(self, kind: str, /) -> int: ...


class Runs(Protocol):
    """Runs jobs."""

    @property
    def running(self) -> int: ...


class Work:
    """The jobs in the worker: what it holds, what waits in it, what runs, and its slots."""

    def __init__(
        self, *, ledger: HoldsKinds, queues: Mapping[str, Sized], budget: HasSlots, execution: Runs
    ) -> None:
        self._ledger = ledger
        self._queues = queues
        self._budget = budget
        self._execution = execution

    def conditions(self) -> Mapping[str, str]:
        """However much there is to do, it is ready for work."""
        return {}

    def families(self) -> Iterable[Family]:
        """By kind of task."""
        kinds = tuple(self._queues)
        yield gauge(
            "celery5_jobs_held",
            "Jobs that this worker has read and not settled.",
            *[(self._ledger.held(kind), {"kind": kind}) for kind in kinds],
        )
        yield gauge(
            "celery5_jobs_waiting",
            "Jobs that wait in this worker for a slot.",
            *[(len(queue), {"kind": kind}) for kind, queue in self._queues.items()],
        )
        yield gauge("celery5_jobs_running", "Jobs that run.", self._execution.running)
        yield gauge(
            "celery5_slots",
            "Jobs that may run at once: the concurrency budget.",
            *[(self._budget.slots(kind), {"kind": kind}) for kind in kinds],
        )


class Commanded:
    """The inbox."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def conditions(self) -> Mapping[str, str]:
        """A worker that nobody can command still works."""
        return {}

    def families(self) -> Iterable[Family]:
        """Commands by what became of them."""
        yield counter(
            "celery5_commands_total",
            "Commands to this worker: done, or why not.",
            *[(float(count), {"outcome": outcome}) for outcome, count in list(self._counts.items())],
        )


class LogKept:
    """What has become of the log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def conditions(self) -> Mapping[str, str]:
        """A worker whose log is lost still works."""
        return {}

    def families(self) -> Iterable[Family]:
        """Counts of messages; none where the process does not write its log itself."""
        if self._log.journal is not None:
            counts = self._log.journal.counts
            yield counter("celery5_log_written_total", "Log messages that were written.", counts.written)
            yield counter("celery5_log_again_total", "Log messages that were brought again.", counts.again)
            yield counter("celery5_log_lost_total", "Log messages that were shed or lost.", counts.lost)


class Routed:
    """The events of a Router."""

    def __init__(self, routed: Mapping[str, int]) -> None:
        self._routed = routed

    def conditions(self) -> Mapping[str, str]:
        """However many there are, it is ready for more."""
        return {}

    def families(self) -> Iterable[Family]:
        """What became of them."""
        yield counter(
            "celery5_events_total",
            "Events by what became of them, and the jobs that were made of them.",
            *[(float(count), {"outcome": outcome}) for outcome, count in self._routed.items()],
        )
