"""Telling: has workers and Controllers know what was decided for them, and no more often than they need to.

Floor: services. Reads: nothing. Writes: the inboxes of workers and Controllers; log messages.

What a worker is told holds for some minutes, and is said again before that is over: should all Schedulers be gone,
workers do as usual. One that works for several brokers is told in each of its lives, by the inbox that it has there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import trio

from celery5.log import Log
from celery5.protocol.autoscale import AutoscaleState
from celery5.protocol.orders import get_inbox_name
from celery5.protocol.prioritisation import Preference
from celery5.protocol.situation import ClusterSnapshot, ClusterWorker

COMMAND_TTL = 300.0
"""Seconds for which a worker does what it was told."""
RENEW_INTERVAL = 120.0
"""Seconds after which it is told again, and a Controller, too."""
MIN_COMMAND_INTERVAL = 10.0
"""Seconds between two commands of one kind to one process, at least."""
MAX_NAMED_TASKS = 200
"""Tasks, and queues, that are named in one command at most: the lightest, as the others are preferred anyway."""


class ScalingCommandSender(Protocol):
    """Posts signed commands."""

    async def send(self, inbox: str, command: str, parameters: Mapping[str, Any], /) -> bool: ...


class ScalingCommands:
    """Knows what was told to whom, and when."""

    def __init__(self, *, command_sender: ScalingCommandSender, log: Log) -> None:
        self._orders = command_sender
        self._log = log
        self._reach: dict[str, tuple[float, float]] = {}
        self._preferred: dict[str, tuple[Preference, float]] = {}
        self._workers: dict[str, tuple[int, float]] = {}
        self._alone = False

    def reset(self) -> None:
        """Somebody else may have told them other things."""
        self._reach.clear()
        self._preferred.clear()
        self._workers.clear()

    async def send_changes(
        self,
        snapshot: ClusterSnapshot,
        state: AutoscaleState | None,
        preference: Preference,
        controllers: Sequence[str],
    ) -> None:
        """Tell whoever does not know it yet."""
        lives = [life for each in snapshot.workers for life in each.command_targets]
        names = {each.name for each in lives}
        for known in (self._reach, self._preferred):
            for gone in known.keys() - names:
                del known[gone]
        for life in lives:
            if state is not None:
                await self._tell_reach(life, state.get_prefetch(life.queues))
            await self._tell_preferred(life, preference)
        # A number that was never decided may be less than there are, where not all can be seen.
        other = state is not None and state.workers != len(snapshot.workers) and not snapshot.unreachable
        if state is not None and (state.at or other):
            await self._tell_workers(state.workers, sorted(controllers))

    async def _tell_reach(self, member: ClusterWorker, factor: float) -> None:
        told, at = self._reach.get(member.name, (0.0, -RENEW_INTERVAL))
        passed = trio.current_time() - at
        known = member.prefetch == factor and (factor == 1 or passed < RENEW_INTERVAL)
        if known or (told == factor and passed < MIN_COMMAND_INTERVAL):
            return
        parameters = {"factor": factor, "seconds": COMMAND_TTL}
        if await self._orders.send(get_inbox_name(member.name), "prefetch", parameters):
            self._reach[member.name] = (factor, trio.current_time())

    async def _tell_preferred(self, member: ClusterWorker, preference: Preference) -> None:
        told, at = self._preferred.get(member.name, (Preference(), -RENEW_INTERVAL))
        passed = trio.current_time() - at
        if passed < MIN_COMMAND_INTERVAL or not (
            told.differs_from(preference) or (not told.is_neutral and passed >= RENEW_INTERVAL)
        ):
            return
        weights = {"tasks": _lightest(preference.tasks), "queues": _lightest(preference.queues)}
        if await self._orders.send(
            get_inbox_name(member.name), "prefer", {**weights, "seconds": COMMAND_TTL}
        ):
            self._preferred[member.name] = (preference, trio.current_time())

    async def _tell_workers(self, workers: int, controllers: Sequence[str]) -> None:
        """Each Controller gets its share of all workers."""
        if not controllers and not self._alone:
            self._log.event("autoscale:not-applied", "info", workers=workers, hint=_ALONE)
        self._alone = not controllers
        for gone in self._workers.keys() - set(controllers):
            del self._workers[gone]
        for place, name in enumerate(controllers):
            share = workers // len(controllers) + (place < workers % len(controllers))
            await self._tell_controller(name, share, workers)

    async def _tell_controller(self, name: str, share: int, workers: int) -> None:
        """Again from time to time, too: it may have been frozen, or without keys, when it was told."""
        told, at = self._workers.get(name, (-1, 0.0))
        if told == share and trio.current_time() - at < RENEW_INTERVAL:
            return
        if await self._orders.send(get_inbox_name(name), "scale", {"workers": share, "of": workers}):
            self._workers[name] = (share, trio.current_time())
            if told != share:
                self._log.event("autoscale:commanded", "info", controller=name, workers=share, of=workers)


def _lightest(weights: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(weights.items(), key=lambda each: each[1])[:MAX_NAMED_TASKS])


_ALONE = "no Controller lives that could begin or end workers: begin or end them yourself"
