"""Telling: has workers and Controllers know what was decided for them, and no more often than they need to.

Floor: services. Reads: nothing. Writes: the inboxes of workers and Controllers; log messages.

What a worker is told holds for some minutes, and is said again before that is over: should all Schedulers be gone,
workers do as usual. One that works for several brokers is told in each of its lives, by the inbox that it has there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import trio

from celery5.log import Log
from celery5.protocol.autoscale import Course
from celery5.protocol.orders import inbox_of
from celery5.protocol.prioritisation import Preference
from celery5.protocol.situation import Member, Situation

HOLDS = 300.0
"""Seconds for which a worker does what it was told."""
RENEW = 120.0
"""Seconds after which it is told again, and a Controller, too."""
AGAIN = 10.0
"""Seconds between two commands of one kind to one process, at least."""
TASKS = 200
"""Tasks, and queues, that are named in one command at most: the lightest, as the others are preferred anyway."""


class Posts(Protocol):
    """Posts signed commands."""

    async def post(self, inbox: str, command: str, parameters: Mapping[str, Any], /) -> bool: ...


class Telling:
    """Knows what was told to whom, and when."""

    def __init__(self, *, orders: Posts, log: Log) -> None:
        self._orders = orders
        self._log = log
        self._reach: dict[str, tuple[float, float]] = {}
        self._preferred: dict[str, tuple[Preference, float]] = {}
        self._workers: dict[str, tuple[int, float]] = {}
        self._alone = False

    def forget(self) -> None:
        """Somebody else may have told them other things."""
        self._reach.clear()
        self._preferred.clear()
        self._workers.clear()

    async def tell(
        self,
        situation: Situation,
        course: Course | None,
        preference: Preference,
        controllers: Sequence[str],
    ) -> None:
        """Tell whoever does not know it yet."""
        lives = [life for each in situation.members for life in each.told]
        names = {each.name for each in lives}
        for known in (self._reach, self._preferred):
            for gone in known.keys() - names:
                del known[gone]
        for life in lives:
            if course is not None:
                await self._tell_reach(life, course.prefetch_of(life.queues))
            await self._tell_preferred(life, preference)
        # A number that was never decided may be less than there are, where not all can be seen.
        other = course is not None and course.workers != len(situation.members) and not situation.unseen
        if course is not None and (course.at or other):
            await self._tell_workers(course.workers, sorted(controllers))

    async def _tell_reach(self, member: Member, factor: float) -> None:
        told, at = self._reach.get(member.name, (0.0, -RENEW))
        passed = trio.current_time() - at
        known = member.prefetch == factor and (factor == 1 or passed < RENEW)
        if known or (told == factor and passed < AGAIN):
            return
        parameters = {"factor": factor, "seconds": HOLDS}
        if await self._orders.post(inbox_of(member.name), "prefetch", parameters):
            self._reach[member.name] = (factor, trio.current_time())

    async def _tell_preferred(self, member: Member, preference: Preference) -> None:
        told, at = self._preferred.get(member.name, (Preference(), -RENEW))
        passed = trio.current_time() - at
        if passed < AGAIN or not (told.differs(preference) or (not told.is_neutral and passed >= RENEW)):
            return
        weights = {"tasks": _lightest(preference.tasks), "queues": _lightest(preference.queues)}
        if await self._orders.post(inbox_of(member.name), "prefer", {**weights, "seconds": HOLDS}):
            self._preferred[member.name] = (preference, trio.current_time())

    async def _tell_workers(self, workers: int, controllers: Sequence[str]) -> None:
        """Each Controller gets its share of all workers."""
        if not controllers and not self._alone:
            self._log.event("autoscale:no-controller", "info", workers=workers, hint=_ALONE)
        self._alone = not controllers
        for gone in self._workers.keys() - set(controllers):
            del self._workers[gone]
        for place, name in enumerate(controllers):
            share = workers // len(controllers) + (place < workers % len(controllers))
            await self._tell_controller(name, share, workers)

    async def _tell_controller(self, name: str, share: int, workers: int) -> None:
        """Again from time to time, too: it may have been frozen, or without keys, when it was told."""
        told, at = self._workers.get(name, (-1, 0.0))
        if told == share and trio.current_time() - at < RENEW:
            return
        if await self._orders.post(inbox_of(name), "scale", {"workers": share, "of": workers}):
            self._workers[name] = (share, trio.current_time())
            if told != share:
                self._log.event("autoscale:told", "info", controller=name, workers=share, of=workers)


def _lightest(weights: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(weights.items(), key=lambda each: each[1])[:TASKS])


_ALONE = "no Controller lives that could begin or end workers: begin or end them yourself"
