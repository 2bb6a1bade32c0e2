"""How many jobs of each queue a worker has capacity for, by the kinds of jobs that it finds there.

The decisions are in `celery5.protocol.scaling.prefetch`. Jobs that await admission take up hardly any capacity: they
are admitted, or go to a waiting list in Redis, within one call.
"""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import trio

from celery5.broker.keys import QueueKeys
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import PrefetchParameters
from celery5.protocol.scaling.prefetch import (
    BATCH,
    DurationEstimate,
    KindLookahead,
    KindMix,
    count_ahead,
    count_to_read,
)
from celery5.services.limits.admission_state import AWAITING_ADMISSION, AdmissionState
from celery5.services.worker.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.worker.in_flight import InFlightJobs
from celery5.tasks.task import Task


class Lookahead:
    """Reading beyond full kinds: extra capacity for jobs of a full kind, to reach those of other kinds behind them."""

    def __init__(
        self,
        *,
        duration_estimates: Mapping[str, DurationEstimate],
        budget: MaximalConcurrencyBudget,
        in_flight: InFlightJobs,
        kinds: Mapping[str, AbstractSet[str]],
    ) -> None:
        self._duration_estimates = duration_estimates
        self._budget = budget
        self._in_flight = in_flight
        self._kinds = kinds
        self._lookaheads = {kind: KindLookahead() for kind in duration_estimates}

    def get_extra_capacity(self, kind: str, *, slots: int, held: int) -> int:
        """Return the capacity that a kind has beyond its slots, which are taken."""
        extra = self._lookaheads[kind].extra
        return max(slots + extra - held, 0) if extra else 0

    def record_read(self, counts: Mapping[str, int]) -> None:
        """Record the jobs of each kind that were read from one queue."""
        for kind in counts:
            if kind in self._lookaheads and self._lookaheads[kind].has_started:
                self._lookaheads[kind].record_read(counts, kind)

    def record_release(self, kind: str, count: int) -> bool:
        """Record jobs of a kind that waited for too long. Return whether that was to be expected."""
        lookahead = self._lookaheads[kind]
        if not lookahead.has_started:
            return False
        lookahead.record_release(count, trio.current_time())
        return True

    def update(self) -> None:
        """Update which kinds are full, and where to read beyond them. To be called each tenth of a second."""
        now = trio.current_time()
        full = {kind for kind in self._duration_estimates if self._is_full(kind)}
        extended = [
            kind
            for kind, lookahead in self._lookaheads.items()
            if lookahead.update(full=kind in full, others=self._has_others(kind, full), now=now)
        ]
        if extended:
            self._in_flight.notify()

    def _is_full(self, kind: str) -> bool:
        slots, estimate = self._budget.get_prefetch_slots(kind), self._duration_estimates[kind]
        return (
            self._in_flight.count(kind) >= slots and count_ahead(slots, estimate.mean, estimate.horizon) == 0
        )

    def _has_others(self, kind: str, full: AbstractSet[str]) -> bool:
        return any(kind in kinds and kinds - full for kinds in self._kinds.values())


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
        self._lookahead = Lookahead(
            duration_estimates=duration_estimates, budget=budget, in_flight=in_flight, kinds=self._kinds
        )

    def get_kinds(self, queue: str) -> AbstractSet[str]:
        """Return the kinds of jobs on a queue; all kinds while none has been met."""
        return self._kinds[queue] or self._duration_estimates.keys()

    def get_capacity(self, queue: str) -> int:
        """Return how many jobs of one queue may be read."""
        if self._in_flight.count("") >= BATCH:
            return 0  # jobs that cannot run here wait to be dead-lettered
        return self._mixes[queue].get_read_limit(
            {kind: self._count_for_kind(kind) for kind in self.get_kinds(queue)}
        )

    def record_read(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Record the jobs of one read, by queue and kind."""
        for queue, counts_by_kind in counts.items():
            self._kinds[queue].update(counts_by_kind)
            self._mixes[queue].record(counts_by_kind)
            self._lookahead.record_read(counts_by_kind)

    def update_lookahead(self) -> None:
        """Update where to read beyond full kinds. To be called each tenth of a second."""
        self._lookahead.update()

    def get_horizon(self, kind: str) -> float:
        """Return how far jobs of a kind are read ahead, in seconds."""
        return self._duration_estimates[kind].horizon

    def record_release(self, kind: str, count: int) -> bool:
        """Record jobs of a kind that waited for too long. Return whether that was expected; else fewer are read."""
        if self._lookahead.record_release(kind, count):
            return True
        self._duration_estimates[kind].assume_slow()
        self._budget.record_release(kind)
        return False

    def _count_for_kind(self, kind: str) -> int:
        if kind == AWAITING_ADMISSION:
            return BATCH - self._in_flight.count(AWAITING_ADMISSION)
        slots, held, estimate = (
            self._budget.get_prefetch_slots(kind),
            self._in_flight.count(kind),
            self._duration_estimates[kind],
        )
        return count_to_read(
            slots=slots, held=held, mean=estimate.mean, horizon=estimate.horizon
        ) or self._lookahead.get_extra_capacity(kind, slots=slots, held=held)


class PrefetchFactor:
    """The factor on how far ahead one worker reads: 1, unless a command has set another for a while."""

    def __init__(
        self, *, duration_estimates: Mapping[str, DurationEstimate], in_flight: InFlightJobs, log: Log
    ) -> None:
        self._duration_estimates = duration_estimates
        self._in_flight = in_flight
        self._log = log
        self._ends_at = math.inf
        self._changed = trio.Event()
        self.factor: float = 1.0

    async def run_expiry(self) -> None:
        """Reset the factor when its time is over, until cancelled. The Reporter runs this."""
        while True:
            changed = self._changed = trio.Event()
            with trio.move_on_at(self._ends_at):
                await changed.wait()
            if trio.current_time() >= self._ends_at:
                self._set(1.0, math.inf)

    async def handle_command(self, parameters: PrefetchParameters) -> object:
        """Perform the command `prefetch`: read `factor` times as far ahead as usual, and return the factor.

        It holds for `seconds`, else until this worker ends.
        """
        if parameters.factor is not None:
            seconds = math.inf if parameters.seconds is None else parameters.seconds
            self._set(parameters.factor, trio.current_time() + seconds)
        return {"factor": self.factor}

    def _set(self, factor: float, ends: float) -> None:
        if factor != self.factor:
            self._log.event("prefetch:set", "info", factor=factor, before=self.factor)
        self.factor, self._ends_at = factor, math.inf if factor == 1 else ends
        for estimate in self._duration_estimates.values():
            estimate.set_factor(factor)
        self._in_flight.notify()
        self._changed.set()
