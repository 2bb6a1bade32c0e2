"""Detours: the ways around kinds whose slots are all taken, to jobs of other kinds behind theirs on the same queues.

Floor: services. Reads: nothing. Writes: nothing.

A kind that is full must not hold up the others. What is decided is in `celery5.protocol.prefetch`.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import trio

from celery5.protocol.prefetch import DurationEstimate, KindLookahead, count_ahead
from celery5.services.concurrency_budget import ConcurrencyBudget
from celery5.services.ledger import InFlightJobs


class Lookahead:
    """One for each kind. `kinds` says which kinds of jobs there are on each queue, now."""

    def __init__(
        self,
        *,
        duration_estimates: Mapping[str, DurationEstimate],
        budget: ConcurrencyBudget,
        in_flight: InFlightJobs,
        kinds: Mapping[str, AbstractSet[str]],
    ) -> None:
        self._paces = duration_estimates
        self._budget = budget
        self._ledger = in_flight
        self._kinds = kinds
        self._detours = {kind: KindLookahead() for kind in duration_estimates}

    def get_extra_capacity(self, kind: str, *, slots: int, held: int) -> int:
        """The room that a kind has beyond its slots, which are taken."""
        room = self._detours[kind].extra
        return max(slots + room - held, 0) if room else 0

    def record_read(self, counts: Mapping[str, int]) -> None:
        """So many jobs of each kind were read from one queue."""
        for kind in counts:
            if kind in self._detours and self._detours[kind].has_started:
                self._detours[kind].record_read(counts, kind)

    def record_release(self, kind: str, given_back: int) -> bool:
        """So many jobs of a kind waited for too long. Whether that was to be expected."""
        detour = self._detours[kind]
        if not detour.has_started:
            return False
        detour.record_release(given_back, trio.current_time())
        return True

    def update(self) -> None:
        """See which kinds are full, and where there is a way around them. To be done each tenth of a second."""
        now = trio.current_time()
        full = {kind for kind in self._paces if self._is_full(kind)}
        opened = [
            kind
            for kind, detour in self._detours.items()
            if detour.update(full=kind in full, others=self._has_others(kind, full), now=now)
        ]
        if opened:
            self._ledger.notify()

    def _is_full(self, kind: str) -> bool:
        slots, pace = self._budget.get_prefetch_slots(kind), self._paces[kind]
        return self._ledger.count(kind) >= slots and count_ahead(slots, pace.mean, pace.horizon) == 0

    def _has_others(self, kind: str, full: AbstractSet[str]) -> bool:
        return any(kind in kinds and kinds - full for kinds in self._kinds.values())
