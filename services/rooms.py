"""Rooms: how many jobs of each queue a worker has room for, judged by the kinds of jobs that it meets there.

Floor: services. Reads: nothing. Writes: nothing.

What is decided is in `celery5.protocol.prefetch`. Who is on the way to a gate takes up next to no room: he passes, or
goes to his waiting room in Redis, and is here no longer than that takes.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from celery5.broker.keys import QueueKeys
from celery5.protocol.prefetch import BATCH, Mix, Pace, to_read
from celery5.services.concurrency_budget import ConcurrencyBudget
from celery5.services.detours import Detours
from celery5.services.ledger import Ledger
from celery5.services.turnstile import GATE, Turnstile
from celery5.task import Task


class Rooms:
    """The room of one worker."""

    def __init__(
        self,
        *,
        consumed: Sequence[QueueKeys],
        tasks: Mapping[str, Task[..., Any]],
        paces: Mapping[str, Pace],
        budget: ConcurrencyBudget,
        ledger: Ledger,
        turnstile: Turnstile,
        default_queue: str,
    ) -> None:
        self._paces = paces
        self._budget = budget
        self._ledger = ledger
        self._mixes = {keys.queue: Mix() for keys in consumed}
        self._kinds: dict[str, set[str]] = {keys.queue: set() for keys in consumed}
        for task in tasks.values():
            kind = GATE if task.name in turnstile.rules else task.kind
            self._kinds.get(task.queue, set()).add(kind)
        self._detours = Detours(paces=paces, budget=budget, ledger=ledger, kinds=self._kinds)

    def kinds(self, queue: str) -> AbstractSet[str]:
        """Which kinds of jobs there are on a queue, as far as is known."""
        return self._kinds[queue] or self._paces.keys()

    def of(self, queue: str) -> int:
        """How many jobs of one queue there is room for."""
        if self._ledger.held("") >= BATCH:
            return 0  # jobs that cannot run here wait to be buried
        return self._mixes[queue].fits({kind: self._of_kind(kind) for kind in self.kinds(queue)})

    def met(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """One read brought so many jobs of each queue, by their kinds."""
        for queue, of_kinds in counts.items():
            self._kinds[queue].update(of_kinds)
            self._mixes[queue].read(of_kinds)
            self._detours.met(of_kinds)

    def look(self) -> None:
        """Look for ways around what is full. To be done each tenth of a second."""
        self._detours.look()

    def horizon(self, kind: str) -> float:
        """How far jobs of a kind are read ahead, in seconds."""
        return self._paces[kind].horizon

    def gave_back(self, kind: str, count: int) -> bool:
        """So many jobs of a kind waited here for too long. Whether that was to be expected; else fewer are read."""
        if self._detours.over(kind, count):
            return True
        self._paces[kind].slow()
        self._budget.gave_back(kind)
        return False

    def _of_kind(self, kind: str) -> int:
        if kind == GATE:
            return BATCH - self._ledger.held(GATE)
        slots, held, pace = self._budget.room(kind), self._ledger.held(kind), self._paces[kind]
        return to_read(slots=slots, held=held, mean=pace.mean, horizon=pace.horizon) or self._detours.beyond(
            kind, slots=slots, held=held
        )
