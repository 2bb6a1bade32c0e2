"""Rooms: how many jobs of each queue a worker has room for, judged by the kinds of jobs that it meets there.

Floor: services. Reads: nothing. Writes: nothing.

What is decided is in `celery5.protocol.prefetch`. Who is on the way to a gate takes up next to no room: he passes, or
goes to his waiting room in Redis, and is here no longer than that takes.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from celery5.broker.keys import QueueKeys
from celery5.protocol.prefetch import BATCH, DurationEstimate, KindMix, count_to_read
from celery5.services.concurrency_budget import ConcurrencyBudget
from celery5.services.detours import Lookahead
from celery5.services.ledger import InFlightJobs
from celery5.services.turnstile import AWAITING_ADMISSION, AdmissionState
from celery5.task import Task


class QueueCapacity:
    """The room of one worker."""

    def __init__(
        self,
        *,
        consumed: Sequence[QueueKeys],
        tasks: Mapping[str, Task[..., Any]],
        duration_estimates: Mapping[str, DurationEstimate],
        budget: ConcurrencyBudget,
        in_flight: InFlightJobs,
        admission: AdmissionState,
        default_queue: str,
    ) -> None:
        self._paces = duration_estimates
        self._budget = budget
        self._ledger = in_flight
        self._mixes = {keys.queue: KindMix() for keys in consumed}
        self._kinds: dict[str, set[str]] = {keys.queue: set() for keys in consumed}
        for task in tasks.values():
            kind = AWAITING_ADMISSION if task.name in admission.rules else task.kind
            self._kinds.get(task.queue, set()).add(kind)
        self._detours = Lookahead(
            duration_estimates=duration_estimates, budget=budget, in_flight=in_flight, kinds=self._kinds
        )

    def get_kinds(self, queue: str) -> AbstractSet[str]:
        """Which kinds of jobs there are on a queue, as far as is known."""
        return self._kinds[queue] or self._paces.keys()

    def get_capacity(self, queue: str) -> int:
        """How many jobs of one queue there is room for."""
        if self._ledger.count("") >= BATCH:
            return 0  # jobs that cannot run here wait to be buried
        return self._mixes[queue].get_read_limit(
            {kind: self._of_kind(kind) for kind in self.get_kinds(queue)}
        )

    def record_read(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """One read brought so many jobs of each queue, by their kinds."""
        for queue, of_kinds in counts.items():
            self._kinds[queue].update(of_kinds)
            self._mixes[queue].record(of_kinds)
            self._detours.record_read(of_kinds)

    def update_lookahead(self) -> None:
        """Look for ways around what is full. To be done each tenth of a second."""
        self._detours.update()

    def get_horizon(self, kind: str) -> float:
        """How far jobs of a kind are read ahead, in seconds."""
        return self._paces[kind].horizon

    def record_release(self, kind: str, count: int) -> bool:
        """So many jobs of a kind waited here for too long. Whether that was to be expected; else fewer are read."""
        if self._detours.record_release(kind, count):
            return True
        self._paces[kind].assume_slow()
        self._budget.record_release(kind)
        return False

    def _of_kind(self, kind: str) -> int:
        if kind == AWAITING_ADMISSION:
            return BATCH - self._ledger.count(AWAITING_ADMISSION)
        slots, held, pace = self._budget.get_prefetch_slots(kind), self._ledger.count(kind), self._paces[kind]
        return count_to_read(
            slots=slots, held=held, mean=pace.mean, horizon=pace.horizon
        ) or self._detours.get_extra_capacity(kind, slots=slots, held=held)
