"""Vital parts: which parts of a worker say how it does.

Floor: processes. Reads: nothing. Writes: nothing.
"""

from collections.abc import Mapping

from celery5.broker.on_trio import ParkedRedis, PushRedis, TrioRedis
from celery5.log import Log
from celery5.services.circuits import Circuits
from celery5.services.concurrency_budget import ConcurrencyBudget
from celery5.services.internal_queues import TasksQueue
from celery5.services.lease import Lease
from celery5.services.ledger import Ledger
from celery5.services.task_execution import TaskExecution
from celery5.services.vital_sources import Commanded, Connections, Guarded, LeaseHeld, LogKept, Work
from celery5.services.vitals import Source


def make_sources(
    redis: TrioRedis,
    reader: ParkedRedis,
    push: PushRedis,
    circuits: Circuits,
    lease: Lease,
    ledger: Ledger,
    queues: Mapping[str, TasksQueue],
    budget: ConcurrencyBudget,
    task_execution: TaskExecution,
    inbox_counts: Mapping[str, int],
    log: Log,
) -> tuple[Source, ...]:
    """Who is asked for /readyz and /metrics."""
    return (
        Connections(redis=redis, reader=reader, push=push),
        Guarded(circuits),
        LeaseHeld(lease),
        Work(ledger=ledger, queues=queues, budget=budget, execution=task_execution),
        Commanded(inbox_counts),
        LogKept(log),
    )
