"""Vital parts: which parts of a worker say how it does.

Floor: processes. Reads: nothing. Writes: nothing.
"""

from collections.abc import Mapping

from celery5.broker.on_trio import ParkedRedis, PushRedis, TrioRedis
from celery5.log import Log
from celery5.services.circuits import CircuitBreakers
from celery5.services.concurrency_budget import ConcurrencyBudget
from celery5.services.internal_queues import TasksQueue
from celery5.services.lease import Lease
from celery5.services.ledger import InFlightJobs
from celery5.services.task_execution import TaskExecution
from celery5.services.vital_sources import (
    BreakerMetrics,
    CommandMetrics,
    ConnectionStatus,
    JobMetrics,
    LeaseStatus,
    LogMetrics,
)
from celery5.services.vitals import StatusSource


def make_sources(
    redis: TrioRedis,
    reader: ParkedRedis,
    push: PushRedis,
    circuit_breakers: CircuitBreakers,
    lease: Lease,
    in_flight: InFlightJobs,
    queues: Mapping[str, TasksQueue],
    budget: ConcurrencyBudget,
    task_execution: TaskExecution,
    command_counts: Mapping[str, int],
    log: Log,
) -> tuple[StatusSource, ...]:
    """Who is asked for /readyz and /metrics."""
    return (
        ConnectionStatus(redis=redis, reader=reader, push=push),
        BreakerMetrics(circuit_breakers),
        LeaseStatus(lease),
        JobMetrics(in_flight=in_flight, queues=queues, budget=budget, task_execution=task_execution),
        CommandMetrics(command_counts),
        LogMetrics(log),
    )
