"""Rooms: how many jobs of each queue a worker has room for, judged by the kinds of jobs that it meets there.

What is decided is in `celery5.protocol.prefetch`. Who is on the way to a gate takes up next to no room: he passes, or
goes to his waiting room in Redis, and is here no longer than that takes.
"""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import trio

from celery5.broker.keys import QueueKeys
from celery5.errors import CommandRefused
from celery5.logs.log import Log
from celery5.protocol.scaling.autoscale import MAX_PREFETCH_FACTOR
from celery5.protocol.scaling.prefetch import (
    BATCH,
    DurationEstimate,
    KindLookahead,
    KindMix,
    count_ahead,
    count_to_read,
)
from celery5.services.limits.admission_state import AWAITING_ADMISSION, AdmissionState
from celery5.services.worker.concurrency_budget import ConcurrencyBudget
from celery5.services.worker.in_flight import InFlightJobs
from celery5.tasks.task import Task


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


MAX_DURATION = 3600.0
"""Seconds for which it can be told to."""


class PrefetchFactor:
    """The factor on how far ahead one worker reads, 1 unless it was told otherwise not long ago."""

    def __init__(
        self, *, duration_estimates: Mapping[str, DurationEstimate], in_flight: InFlightJobs, log: Log
    ) -> None:
        self._paces = duration_estimates
        self._ledger = in_flight
        self._log = log
        self._ends = math.inf
        self._news = trio.Event()
        self.factor: float = 1.0

    async def run_expiry(self) -> None:
        """See to it that it ends in time, until cancelled. The Reporter has this done."""
        while True:
            news = self._news = trio.Event()
            with trio.move_on_at(self._ends):
                await news.wait()
            if trio.current_time() >= self._ends:
                self._set(1.0, math.inf)

    async def handle_command(self, parameters: Mapping[str, Any]) -> object:
        """The command `prefetch`: read `factor` times as far ahead as usual, 1 to 16, for so many `seconds`, or for as
        long as this worker lives. Gives the factor. Raises CommandRefused."""
        strange = sorted(parameters.keys() - {"factor", "seconds"})
        if strange:
            raise CommandRefused(f"prefetch does not take {strange[0]!r}: it takes factor and seconds")
        if "factor" in parameters:
            factor = _number("factor", parameters["factor"], 1.0, MAX_PREFETCH_FACTOR)
            seconds = parameters.get("seconds")
            limit = math.inf if seconds is None else _number("seconds", seconds, 0.01, MAX_DURATION)
            self._set(factor, trio.current_time() + limit)
        return {"factor": self.factor}

    def _set(self, factor: float, ends: float) -> None:
        if factor != self.factor:
            self._log.event("prefetch:set", "info", factor=factor, before=self.factor)
        self.factor, self._ends = factor, math.inf if factor == 1 else ends
        for pace in self._paces.values():
            pace.set_factor(factor)
        self._ledger.notify()
        self._news.set()


def _number(name: str, value: object, least: float, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise CommandRefused(f"{name} is {value!r}: give a number from {least:g} to {most:g}")
    return float(value)
