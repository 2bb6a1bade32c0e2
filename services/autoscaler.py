"""Autoscaler: looks at all queues and workers, and tells workers how far to read ahead and what to prefer, and Foremen
how many workers there should be (C99, C103, C104).

Floor: services. Reads: what the Outlook sees, which processes live. Writes: where the scaling is; the inboxes of
workers and Controllers.

Any number of Schedulers have one, and one at a time has the turn. Where the scaling is lies in Redis, on the default
broker, so the next one goes on from there. Nothing is sent when neither scaling nor priorities are asked for.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

import msgspec
import trio

from celery5.broker import presence, scaling
from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.broker.scaling import Scaling, Turn
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable
from celery5.log import Log
from celery5.protocol.autoscale import Autoscale, Course, Load, advance, cool_until, resume, steps
from celery5.protocol.metrics import Family, gauge
from celery5.protocol.prioritisation import Preference, Strategy, prefer
from celery5.protocol.situation import Situation
from celery5.services.outlook import Outlook
from celery5.services.passing import passes
from celery5.services.telling import Telling

LOOK = 2.0
"""Seconds between looks."""
A_SECOND = 3
"""Commands to Redis in a second, at most, in the mean of a look with many queues and its pause."""
LEAVE_LIMIT = 1.0
"""Seconds that giving up the turn may take at the end; else it ends by itself."""

T = TypeVar("T")


class Redis(Protocol):
    """Makes one trip to Redis."""

    async def perform(self, call: Call[T], /) -> T: ...


class Autoscaler:
    """The scaling of one application, while it is this Scheduler's turn."""

    def __init__(
        self,
        *,
        redis: Redis,
        keys: Keys,
        autoscale: Autoscale | None,
        prioritise: Strategy | None,
        outlook: Outlook,
        telling: Telling,
        worker: str,
        log: Log,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._policy = autoscale
        self._strategy = prioritise
        self._outlook = outlook
        self._telling = telling
        self._name = worker
        self._log = log
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
        yield gauge("celery5_scaling_unseen", "Brokers that could not be looked at.", len(found.unseen))
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
        situation = await self._outlook.look()
        self._pause = max(LOOK, (self._outlook.breadth + 6) / A_SECOND)
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
            self._outlook.forget()
            self._log.event("autoscale:turn" if mine else "autoscale:turn-lost", "info" if mine else "debug")

    def _decide(self, turn: Turn, situation: Situation) -> Scaling:
        found = Scaling(
            workers=len(situation.members),
            jobs=sum(situation.demand().values()),
            unseen=situation.unseen,
            by=self._name,
            at=turn.now,
        )
        policy = self._policy
        if policy is None:
            return found
        known = None if turn.scaling is None else turn.scaling.course
        before = resume(known, policy, situation)
        if before is None:
            return found
        try:
            course = advance(before, policy, situation, turn.now)
        except (Exception, SystemExit) as error:  # the user's strategy
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
        except (Exception, SystemExit) as error:  # the user's strategy
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
