"""Impose limits on tasks, suspend tasks and resume them at any time, for all workers: `app.limits`.

An imposed limit replaces the one that a task declares. It is stored in Redis, so it survives workers and holds for
those that start later. Workers receive it by a channel within moments, and at the latest with their third heartbeat;
until then they start jobs as before.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

from celery5.audit.actor import get_actor_name
from celery5.audit.recording import perform_audited
from celery5.broker.call import Call
from celery5.broker.calls import limits
from celery5.broker.calls.limits import StoredOverrides
from celery5.broker.colour import blocking
from celery5.errors import Misconfigured
from celery5.events.event import DeclareEvent, Event
from celery5.health.health_check import HealthCheck
from celery5.limits.rules import DeclareLimitRule
from celery5.protocol.limit_rules import TimeWindow, get_rules_of_task
from celery5.protocol.limits import KIND_PREFIX, LimitOverride, Suspension, make_kind_rate
from celery5.protocol.shards import check_override, get_placement

if TYPE_CHECKING:
    from celery5.application import Application, DeclaredTask

_declare = DeclareEvent(of_every_application=True)


@_declare(name="celery5.TaskSuspended")
class TaskSuspended(Event):
    """Asks all workers to start no job of `task` until it is resumed; its jobs wait. `why` is optional."""

    task: str
    why: str = ""


@_declare(name="celery5.TaskResumed")
class TaskResumed(Event):
    """Asks all workers to start jobs of `task` again."""

    task: str


class TaskLimits(msgspec.Struct, frozen=True):
    """The limits of one task: the `limit` or the `rate` that holds, and whether it is `suspended`."""

    task: str
    limit: int | None = None
    rate: str = ""
    limited_by: str = ""
    suspended: bool = False
    why: str = ""
    suspended_by: str = ""
    # Seconds since 1970; 0 for no end.
    until: float = 0.0
    # Seconds since 1970; 0 if unknown.
    suspended_since: float = 0.0
    # The rules by which the Scheduler limits it now: `limit` and `rate` are theirs, before those that were set.
    rules: tuple[str, ...] = ()
    # What was set by `limits.set`, whether or not it holds now.
    set_limit: int | None = None
    set_rate: str = ""
    set_by: str = ""
    # What follows is there in the list of all limits (`task limits`), declared ones included, and not in `Limits.list`.
    # Whose they are: `declared`, `by hand`, `by a rule`, `setting rate_limits`; two of them with a comma between; ''
    # for a task that is suspended only.
    origin: str = ""
    # What the task declares, and its kind has by the settings, in words: `limit 2 per key`; '' for nothing.
    declared: str = ""
    # What the limit is counted for: `key`, `worker`; '' for all workers together.
    per: str = ""
    # Jobs that have a slot now. None where it is not counted: at a limit for each key, and for a kind of task.
    running: int | None = None
    # Jobs that began in the period of the rate; None where it is not counted: at a rate for each worker or kind.
    began: int | None = None
    # Jobs that wait at the limit.
    waiting: int = 0

    @property
    def use(self) -> str:
        """How much is in use, in words: `2 of 2`, `5 of 200/m`; '' where it is not counted."""
        parts: list[str] = []
        if self.limit is not None and self.running is not None:
            parts.append(f"{self.running} of {self.limit}")
        elif self.running:
            parts.append(f"{self.running} running")
        if self.rate and self.began is not None:
            parts.append(f"{self.began} of {self.rate}")
        return ", ".join(parts)


class Limits:
    """Imposes limits on tasks from outside of their code.

    A task is passed as itself, or by its name; an unknown name raises UnknownTask. What is imposed can be removed by
    any name that `list` returns, even if the application no longer has such a task.
    """

    REACHED_AS: ClassVar[str] = "app.limits."

    def __init__(self, app: "Application", limit_rule: DeclareLimitRule) -> None:
        self._app = app
        self._limit_rule = limit_rule

    def rule(
        self,
        name: str,
        *,
        task: "str | DeclaredTask",
        limit: int | None = None,
        rate: str = "",
        during: TimeWindow | str | None = None,
        when: HealthCheck | None = None,
        states: Sequence[str] = (),
    ) -> None:
        """Declare a rule: the Scheduler imposes a limit or a rate on a task while the conditions hold.

        It takes precedence over what operators `set` and over what the task declares. Without a condition it holds as
        long as a Scheduler runs. `@app.limit_rule` declares rules that are functions.

        Args:
            name: The name of the rule, which `list` and the log show.
            task: The task, or its name.
            limit: How many jobs may run at once; 0 rejects all jobs.
            rate: How many jobs may begin in a period, such as `200/m`.
            during: The hours of the day, such as `22:00-06:00`, in the zone of the setting `timezone`; or a TimeWindow.
            when: A global health check. The rule holds while the check is in one of `states`.
            states: By default all states but the good one.

        Raises:
            Misconfigured: The arguments do not fit together, or the name is taken.
        """
        override = LimitOverride(limit=limit, rate=rate)
        self._limit_rule.add(name, task, override, during, when, states)

    async def aset(self, task: "str | DeclaredTask", limit: int | str, *, by: str = "") -> bool:
        """Impose a limit or a rate on a task, in place of what was imposed before.

        `limit` is a number of running jobs (0 rejects all jobs) or a rate such as `200/m`. Returns whether that changes
        anything. Raises Misconfigured, UnknownTask and BrokerError.
        """
        call = self._set_override(task, limit, by)
        return await self._change("task:limit", call, task, {"limit": limit})

    @blocking(aset)
    def set(self) -> None: ...

    async def alift(self, task: "str | DeclaredTask") -> bool:
        """Remove what is imposed, so that the task's own limit holds again. Returns whether anything was imposed."""
        return self._check_known(task, await self._change("task:limit", self._lift(task), task, _LIFTED))

    @blocking(alift)
    def lift(self) -> None: ...

    async def aset_kind_rate(self, kind: str, rate: str, *, by: str = "") -> bool:
        """Let jobs of a kind of task (`trio`, `asyncio`, `thread`, `boxed`) begin at a rate, on all workers together.

        It counts all queues together and replaces the setting `rate_limits`. The limits of tasks still hold.
        Returns whether that changes anything. Raises Misconfigured and BrokerError.
        """
        call = self._set_kind_rate(kind, rate, by)
        return await self._change("task:limit", call, KIND_PREFIX + kind, {"limit": rate})

    @blocking(aset_kind_rate)
    def set_kind_rate(self) -> None: ...

    async def alift_kind_rate(self, kind: str) -> bool:
        """Remove the rate that was set for a kind: the setting holds again. Returns whether there was one."""
        name = KIND_PREFIX + kind
        return await self._change("task:limit", self._lift(name), name, _LIFTED)

    @blocking(alift_kind_rate)
    def lift_kind_rate(self) -> None: ...

    async def asuspend(self, task: "str | DeclaredTask", *, why: str = "", by: str = "") -> bool:
        """Start no job of a task on any worker until it is resumed; its jobs wait in Redis.

        Running jobs run to their end. Workers hear of it within moments, so some jobs may still start. Returns whether
        that changes anything.
        """
        return await self._change("task:suspend", self._suspend(task, why, by), task, {"why": why})

    @blocking(asuspend)
    def suspend(self) -> None: ...

    async def aresume(self, task: "str | DeclaredTask") -> bool:
        """Start jobs of a suspended task again, in the order in which they came. Returns whether it was suspended."""
        return self._check_known(task, await self._change("task:resume", self._resume(task), task))

    @blocking(aresume)
    def resume(self) -> None: ...

    async def alist(self) -> dict[str, TaskLimits]:
        """Return what is imposed on tasks now, by their names."""
        return list_task_limits(await self._app.aperform(limits.list_overrides(self._app.keys)))

    @blocking(alist)
    def list(self) -> None: ...

    async def _change(
        self,
        action: str,
        call: Call[bool],
        task: "str | DeclaredTask",
        how: Mapping[str, object] | None = None,
    ) -> bool:
        """Perform a change, and record it in the audit trail."""
        name = _get_name(task)
        redis = await self._app.connections.get_async_driver()
        return await perform_audited(self._app, redis, call, action, name, how)

    def _set_override(self, task: "str | DeclaredTask", limit: int | str, by: str) -> Call[bool]:
        name = self._name(task)
        declared = self._app.tasks.get(name)
        if isinstance(limit, str):
            override = LimitOverride(rate=limit, by=by or get_actor_name(), since=_now())
        elif isinstance(limit, bool) or not isinstance(limit, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Misconfigured(f"task {name}: limit is {limit!r}: give a number, or a rate such as '200/m'")
        else:
            override = LimitOverride(limit=limit, by=by or get_actor_name(), since=_now())
        override = override.validate(name)
        if declared is not None and self._app.brokers.is_sharded(declared.queue):
            check_override(name, get_placement(declared.declared_limits), override)
        return limits.set_override(self._app.keys, name, override)

    def _set_kind_rate(self, kind: str, rate: str, by: str) -> Call[bool]:
        override = LimitOverride(
            rate=make_kind_rate(kind, rate).text, by=by or get_actor_name(), since=_now()
        )
        return limits.set_override(self._app.keys, KIND_PREFIX + kind, override)

    def _lift(self, task: "str | DeclaredTask") -> Call[bool]:
        return limits.set_override(self._app.keys, _get_name(task), None)

    def _suspend(self, task: "str | DeclaredTask", why: str, by: str) -> Call[bool]:
        suspension = Suspension(why=why, by=by or get_actor_name(), since=_now())
        return limits.suspend_task(self._app.keys, self._name(task), suspension)

    def _resume(self, task: "str | DeclaredTask") -> Call[bool]:
        return limits.resume_task(self._app.keys, _get_name(task))

    def _check_known(self, task: "str | DeclaredTask", done: bool) -> bool:
        """Return `done`. If nothing was removed, raises UnknownTask for a name that may be misspelt."""
        if not done:
            self._name(task)
        return done

    def _name(self, task: "str | DeclaredTask") -> str:
        if not isinstance(task, str):
            return task.name
        self._app.load()
        return self._app.tasks[task].name


_LIFTED = {"limit": "none"}
"""How the audit trail shows that a limit was lifted, as the command line does."""


def _get_name(task: "str | DeclaredTask") -> str:
    """Return the name of a task without a check, since what is imposed may outlive its task."""
    return task if isinstance(task, str) else task.name


def list_task_limits(stored: StoredOverrides) -> dict[str, TaskLimits]:
    """Return what is imposed on tasks, by their names."""
    limits_by_task: dict[str, TaskLimits] = {}
    effective = stored.effective_limits
    for task in sorted(effective.keys() | stored.suspended.keys()):
        limit, suspended = effective.get(task) or LimitOverride(), stored.suspended.get(task)
        set_limit = stored.limits.get(task) or LimitOverride()
        entry = TaskLimits(
            task,
            limit.limit,
            limit.rate,
            limit.by,
            rules=get_rules_of_task(task, stored.imposed),
            set_limit=set_limit.limit,
            set_rate=set_limit.rate,
            set_by=set_limit.by,
        )
        if suspended is not None and not 0 < suspended.until <= time.time():
            entry = msgspec.structs.replace(
                entry,
                suspended=True,
                why=suspended.why,
                suspended_by=suspended.by,
                until=suspended.until,
                suspended_since=suspended.since,
            )
        limits_by_task[task] = entry
    return limits_by_task


def _now() -> float:
    return round(time.time(), 3)
