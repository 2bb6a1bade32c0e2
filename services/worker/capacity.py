"""How many jobs of each queue a worker has capacity for, by the kinds of jobs that it finds there.

The decisions are in `celery5.protocol.scaling.prefetch`. Jobs that await admission take up hardly any capacity: they
are admitted, or go to a waiting list in Redis, within one call. So do the jobs of a kind that is saturated: this worker
reads past them, for jobs of other kinds behind them.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from celery5.broker.keys import QueueKeys
from celery5.protocol.scaling.prefetch import (
    BATCH,
    DurationEstimate,
    KindMix,
    KindSaturation,
    count_to_read,
    is_full,
)
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import InFlightJobs
from celery5.services.limits.admission_state import AWAITING_ADMISSION, AdmissionState
from celery5.tasks.task import Task

MAX_AWAITING = 2 * BATCH
"""The most jobs that await admission: one batch is read while another is admitted, or moved to waiting lists."""


class QueueCapacity:
    """The capacity of one worker for jobs of its queues."""

    def __init__(
        self,
        *,
        consumed: Sequence[QueueKeys],
        tasks: Mapping[str, Task[..., Any]],
        duration_estimates: Mapping[str, DurationEstimate],
        budget: MaximalConcurrencyBudget,
        in_flight: InFlightJobs,
        admission: AdmissionState,
    ) -> None:
        self._duration_estimates = duration_estimates
        self._budget = budget
        self._in_flight = in_flight
        self._mixes = {keys.queue: KindMix() for keys in consumed}
        self._kinds: dict[str, set[str]] = {keys.queue: set() for keys in consumed}
        for task in tasks.values():
            kind = AWAITING_ADMISSION if task.name in admission.rules else budget.get_name(task)
            self._kinds.get(task.queue, set()).add(kind)
        every_kind = {budget.get_name(task) for task in tasks.values()}
        self._undeclared = {queue: every_kind for queue, kinds in self._kinds.items() if not kinds}
        self._admission = admission
        self._ended_counts = dict.fromkeys(duration_estimates, 0)
        self._saturation = {kind: KindSaturation() for kind in duration_estimates}

    def get_kinds(self, queue: str) -> AbstractSet[str]:
        """Return the kinds of jobs on a queue; all kinds while none has been met."""
        return self._kinds[queue] or self._duration_estimates.keys()

    def get_capacity(self, queue: str) -> int:
        """Return how many jobs of one queue may be read."""
        if self._in_flight.count("") >= BATCH:
            return 0  # jobs that cannot run here wait to be dead-lettered
        capacity = {kind: self._count_for_kind(kind) for kind in self.get_kinds(queue)}
        if saturated := capacity.keys() & self._admission.saturated_kinds:
            self._set_lookahead(queue, capacity, saturated)
        return self._mixes[queue].get_read_limit(capacity)

    def _set_lookahead(self, queue: str, capacity: dict[str, int], saturated: AbstractSet[str]) -> None:
        """Set the capacity for jobs of saturated kinds, which all await admission.

        Where a kind is full, they are read to reach those of other kinds behind them.
        """
        lookahead = self._count_for_kind(AWAITING_ADMISSION)
        full = {kind for kind, free in capacity.items() if not free}
        has_others = self._has_others(queue, full)
        for kind in saturated:
            capacity[kind] = lookahead if kind in full and has_others else min(capacity[kind], lookahead)

    def _has_others(self, queue: str, full: AbstractSet[str]) -> bool:
        """Return whether jobs of other kinds than these `full` ones may be on a queue.

        No task is declared for some queues: there any task's may be.
        """
        others = (self._kinds[queue] | self._undeclared.get(queue, set())) - full
        return bool(others - {AWAITING_ADMISSION}) or (
            bool(others) and any(kind not in full for kind in self._admission.get_limited_kinds())
        )

    def record_read(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Record the jobs of one read, by queue and kind."""
        for queue, counts_by_kind in counts.items():
            self._kinds[queue].update(counts_by_kind)
            self._mixes[queue].record(counts_by_kind)

    def update_saturation(self) -> None:
        """Update which kinds are saturated. To be called each tenth of a second."""
        full = {kind for kind in self._duration_estimates if self._is_full(kind)}
        changed = [
            saturation.update(
                full=kind in full,
                others=any(
                    kind in kinds and self._has_others(queue, full) for queue, kinds in self._kinds.items()
                ),
                waiting=self._admission.waiting_tasks.has_kind(kind),
            )
            for kind, saturation in self._saturation.items()
        ]
        if any(changed):
            self._admission.set_saturated_kinds(
                {kind for kind, saturation in self._saturation.items() if saturation.is_saturated}
            )
            self._in_flight.notify()
        if self._admission.saturated_kinds and self._admission.waiting_tasks:
            self._admission.notify()  # a budget may have more slots now

    def _is_full(self, kind: str) -> bool:
        estimate = self._duration_estimates[kind]
        ended_count, self._ended_counts[kind] = self._ended_counts[kind], estimate.count
        return is_full(
            slots=self._budget.get_prefetch_slots(kind),
            held=self._in_flight.count(kind),
            mean=estimate.mean,
            ended=estimate.count - ended_count,
            horizon=estimate.horizon,
        )

    def get_horizon(self, kind: str) -> float:
        """Return how far jobs of a kind are read ahead, in seconds."""
        return self._duration_estimates[kind].horizon

    def record_release(self, kind: str) -> None:
        """Record that jobs of a kind have waited for too long: fewer are read from now on."""
        self._duration_estimates[kind].assume_slow()
        self._budget.record_release(kind)

    def _count_for_kind(self, kind: str) -> int:
        if kind == AWAITING_ADMISSION:
            return max(MAX_AWAITING - self._in_flight.count(AWAITING_ADMISSION), 0)
        slots, held, estimate = (
            self._budget.get_prefetch_slots(kind),
            self._in_flight.count(kind),
            self._duration_estimates[kind],
        )
        return count_to_read(slots=slots, held=held, mean=estimate.mean, horizon=estimate.horizon)
