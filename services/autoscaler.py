"""Autoscaler: looks at all queues and workers, and tells workers how far to read ahead and what to prefer, and Foremen
how many workers there should be (C99, C103, C104).

Floor: services. Reads: what waits on the queues, the reports of workers, which processes live. Writes: where the
scaling is; the inboxes of workers and Controllers.

Any number of Schedulers have one, and one at a time has the turn. Where the scaling is lies in Redis, so the next one
goes on from there. Nothing is sent when neither scaling nor priorities are asked for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec
import trio

from celery5.broker import calls, imposing, pausing, presence, scaling
from celery5.broker.call import Call
from celery5.broker.keys import Keys, QueueKeys
from celery5.broker.scaling import Scaling, Turn
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable
from celery5.log import Log
from celery5.protocol.autoscale import Autoscale, Course, Load, advance, begin, cool_until, steps
from celery5.protocol.limits import Gate
from celery5.protocol.metrics import Family, gauge
from celery5.protocol.prioritisation import Preference, Strategy, prefer
from celery5.protocol.report import picture, terms_of
from celery5.protocol.situation import Situation
from celery5.services.passing import passes
from celery5.services.telling import Telling

LOOK = 2.0
"""Seconds between looks."""
A_SECOND = 3
"""Commands to Redis in a second, at most, in the mean of a look with many queues and its pause."""
QUEUES = 64
"""Queues that are looked at, at most."""
LEAVE_LIMIT = 1.0
"""Seconds that giving up the turn may take at the end; else it ends by itself."""

T = TypeVar("T")


class Redis(Protocol):
    """Makes trips to Redis."""

    async def perform(self, call: Call[T], /) -> T: ...

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]: ...


class Autoscaler:
    """The scaling of one application, while it is this Scheduler's turn."""

    def __init__(
        self,
        *,
        redis: Redis,
        keys: Keys,
        autoscale: Autoscale | None,
        prioritise: Strategy | None,
        kinds: Mapping[str, str],
        gates: Mapping[str, Gate],
        known_queues: Collection[str],
        telling: Telling,
        worker: str,
        log: Log,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._policy = autoscale
        self._strategy = prioritise
        self._kinds = kinds
        self._gates = gates
        self._known = known_queues
        self._telling = telling
        self._name = worker
        self._log = log
        self._queues: dict[str, QueueKeys] = {}
        self._has_turn = False
        self._pause = LOOK
        self._failed: dict[str, str] = {}
        self._found: Scaling | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look until cancelled."""
        task_status.started()
        if self._policy is None and self._strategy is None:
            await trio.sleep_forever()
        try:
            while True:
                await self._look_safely()
                await trio.sleep(self._pause)
        finally:
            if self._has_turn:
                with trio.move_on_after(LEAVE_LIMIT, shield=True):
                    await self._give_up()

    def conditions(self) -> Mapping[str, str]:
        """Whether it has the turn or not, the Scheduler is ready."""
        return {}

    def families(self) -> Iterable[Family]:
        """What is wanted, as numbers, from the one that has the turn."""
        found = self._found
        if found is None:
            return
        yield gauge("celery5_scaling_jobs", "Jobs that could use a slot.", found.jobs)
        yield gauge("celery5_scaling_workers", "Workers that live.", found.workers)
        if found.course is not None:
            yield gauge(
                "celery5_scaling_needed", "Workers that would have a slot for each job.", found.needed
            )
            yield gauge("celery5_scaling_wanted", "Workers that there should be.", found.course.workers)
            yield gauge(
                "celery5_scaling_prefetch", "Factor on how far workers read ahead.", found.course.prefetch
            )

    async def look(self) -> None:
        """One look: see, decide, keep it, tell. Nobody is told anything that was not kept."""
        seconds = max(scaling.TURN, 3 * self._pause)
        turn = await self._redis.perform(scaling.take_turn(self._keys, self._name, seconds=seconds))
        self._change_turn(turn.mine)
        if not turn.mine:
            return
        situation = await self._see()
        found = self._decide(turn, situation)
        preference = self._prefer(situation)
        found = msgspec.structs.replace(found, preferred=dict(preference.tasks))
        if not await self._redis.perform(scaling.keep(self._keys, self._name, found)):
            return
        self._found = found
        controllers = await self._redis.perform(presence.living(self._keys, "controller"))
        await self._telling.tell(situation, found.course, preference, controllers)

    def _change_turn(self, mine: bool) -> None:
        if mine != self._has_turn:
            self._has_turn, self._found = mine, None
            self._telling.forget()
            self._log.event("autoscale:turn" if mine else "autoscale:turn-lost", "info" if mine else "debug")

    async def _see(self) -> Situation:
        names = await self._redis.perform(calls.queues(self._keys))
        paused = await self._redis.perform(pausing.paused(self._keys))
        imposed = await self._redis.perform(imposing.imposed(self._keys))
        looked_at = sorted(names, key=lambda name: name not in self._known)[:QUEUES]
        if len(names) > QUEUES:
            self._told_once("queues", f"{len(names)} queues: only {QUEUES} of them are looked at")
        self._pause = max(LOOK, (len(looked_at) + 6) / A_SECOND)
        censuses = await self._redis.perform_all(
            [scaling.census(self._keys, self._queue(name)) for name in looked_at]
        )
        workers = sorted({name for each in censuses for name in each.workers})
        reports = await self._redis.perform(scaling.reports(self._keys, workers)) if workers else {}
        terms = terms_of(
            self._kinds, self._gates, limits=imposed.limits, suspended=imposed.suspended, paused=paused
        )
        return picture(censuses, reports, terms)

    def _queue(self, name: str) -> QueueKeys:
        return self._queues.setdefault(name, self._keys.of(name))

    def _decide(self, turn: Turn, situation: Situation) -> Scaling:
        jobs = sum(situation.demand().values())
        found = Scaling(workers=len(situation.members), jobs=jobs, by=self._name, at=turn.now)
        policy = self._policy
        if policy is None:
            return found
        known = None if turn.scaling is None else turn.scaling.course
        # Before the first step there are to be as many as there are.
        before = known if known is not None and known.at else begin(policy, situation)
        try:
            course = advance(before, policy, situation, turn.now)
        except Exception as error:  # the user's strategy
            self._told_once("autoscale", f"its strategy failed: {error!r}")
            course = before
        else:
            self._failed.pop("autoscale", None)
        load = Load(situation=situation, now=course.scale, minimum=policy.minimum, maximum=policy.maximum)
        found = msgspec.structs.replace(
            found,
            course=course,
            minimum=policy.minimum,
            maximum=policy.maximum,
            needed=load.needed(),
            cool_until=max(0.0, cool_until(course, policy)),
        )
        self._tell_step(before, course, found)
        return found

    def _tell_step(self, before: Course, after: Course, found: Scaling) -> None:
        for name, (was, now) in steps(before, after).items():
            self._log.event(
                "autoscale:step",
                "info",
                of=name,
                before=was,
                after=now,
                jobs=found.jobs,
                workers=found.workers,
                needed=found.needed,
                cools=round(max(0.0, found.cool_until - found.at), 3),
            )

    def _prefer(self, situation: Situation) -> Preference:
        if self._strategy is None:
            return Preference()
        try:
            preference = prefer(self._strategy, situation)
        except Exception as error:  # the user's strategy
            self._told_once("prioritise", f"its strategy failed: {error!r}")
            return Preference()
        self._failed.pop("prioritise", None)
        return preference

    async def _look_safely(self) -> None:
        try:
            await self.look()
        except (BrokerUnavailable, BrokerReplied) as error:
            if not passes(error):
                raise
            self._told_once("redis", str(error))
        else:
            self._failed.pop("redis", None)

    async def _give_up(self) -> None:
        try:
            await self._redis.perform(scaling.give_up_turn(self._keys, self._name))
        except BrokerError as error:
            self._log.event("autoscale:turn-kept", "debug", why=str(error))

    def _told_once(self, what: str, why: str) -> None:
        """Warn, once for each reason until it is over."""
        if self._failed.get(what) != why:
            self._failed[what] = why
            self._log.event("autoscale:failed", "warning", of=what, why=why)
