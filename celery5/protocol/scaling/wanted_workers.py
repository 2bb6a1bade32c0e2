"""Count the workers that the jobs of some queues need: the metric by which KEDA, or anything else, scales workers."""

import math
from collections.abc import Collection, Iterable

import msgspec

from celery5.protocol.scaling.snapshot import ClusterSnapshot

MAX_AGE = 60.0
"""Seconds after which a decision says nothing of the present: no Scheduler decides any more."""


class QueueDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one kind on one queue, those that run included, and what a worker of that queue can take of them."""

    queue: str
    kind: str
    # How many slots the jobs could use.
    jobs: int
    # Slots of a worker that reads the queue, on average; 0 while there is none.
    slots: float = 0.0


def measure_demands(snapshot: ClusterSnapshot) -> tuple[QueueDemand, ...]:
    """Return the demand of each queue and kind; those without any are left out."""
    jobs: dict[tuple[str, str], int] = {}
    for load in snapshot.task_loads:
        jobs[load.queue, load.kind] = jobs.get((load.queue, load.kind), 0) + load.demand
    demands: list[QueueDemand] = []
    for (queue, kind), count in sorted(jobs.items()):
        readers = [worker for worker in snapshot.workers if queue in worker.queues]
        slots = sum(max(worker.max_slots.get(kind, 0), worker.slots.get(kind, 0)) for worker in readers)
        if count:
            slots_of_one = slots / len(readers) if readers else 0.0
            demands.append(QueueDemand(queue=queue, kind=kind, jobs=count, slots=slots_of_one))
    return tuple(demands)


def count_wanted_workers(demands: Iterable[QueueDemand], queues: Collection[str]) -> int:
    """Return how many workers of these queues would have a slot for each of their jobs.

    Slots of one kind are none for another. Jobs for which nobody has a slot need one worker: so do the first ones.
    """
    needed: dict[str, float] = {}
    fewest = 0
    for demand in demands:
        if demand.queue in queues:
            fewest = 1
            if demand.slots:
                needed[demand.kind] = needed.get(demand.kind, 0.0) + demand.jobs / demand.slots
    # Rounding errors need no worker of their own.
    return max(fewest, *(math.ceil(round(workers, 6)) for workers in needed.values()), 0)
