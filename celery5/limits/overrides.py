"""Limiting: imposes limits on tasks, suspends them and lets them go on, at any time and for all workers: `app.limits`.

What is imposed beats what a task declares. It lies in Redis: it outlives workers, and holds for those that begin
later. Workers hear of it by a channel, in moments, and at the latest with the third beat of their hearts: until then
they begin jobs as before.
"""

import getpass
import os
import socket
import time
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from celery5.broker.call import Call
from celery5.broker.calls import limits
from celery5.broker.calls.limits import StoredOverrides
from celery5.errors import Misconfigured
from celery5.events.event import DeclareEvent, Event
from celery5.protocol.limits import LimitOverride, Suspension

if TYPE_CHECKING:
    from celery5.application import Application
    from celery5.tasks.task import Task

_declare = DeclareEvent(of_every_application=True)


@_declare(name="celery5.TaskSuspended")
class TaskSuspended(Event):
    """Begin no job of `task` on any worker, `why` if it is said, until it is resumed; its jobs wait."""

    task: str
    why: str = ""


@_declare(name="celery5.TaskResumed")
class TaskResumed(Event):
    """Let the jobs of `task` run again."""

    task: str


class TaskLimits(msgspec.Struct, frozen=True):
    """What is imposed on one task, if anything: a `limit` or a `rate`, and whether it is `suspended`. `suspended_since`
    and `until` are seconds since 1970; 0 where nothing is known."""

    task: str
    limit: int | None = None
    rate: str = ""
    limited_by: str = ""
    suspended: bool = False
    why: str = ""
    suspended_by: str = ""
    until: float = 0.0
    suspended_since: float = 0.0


class Limits:
    """Limits from outside. A task is given as itself, or by its name; an unknown name raises UnknownTask. What is
    imposed may be taken back by any name that `list` returns, though the application has no such task any more."""

    REACHED_AS: ClassVar[str] = "app.limits."

    def __init__(self, app: "Application") -> None:
        self._app = app

    def set(self, task: "str | Task[..., Any]", limit: int | str, *, by: str = "") -> bool:
        """Impose a limit (a number; 0 rejects its jobs) or a rate (`200/m`) on a task, in place of what was imposed
        before. Gives whether that changes anything. Raises Misconfigured, UnknownTask and BrokerError."""
        return self._app.perform(self._set_override(task, limit, by))

    async def aset(self, task: "str | Task[..., Any]", limit: int | str, *, by: str = "") -> bool:
        """`set`, from Trio or asyncio."""
        return await self._app.aperform(self._set_override(task, limit, by))

    def lift(self, task: "str | Task[..., Any]") -> bool:
        """Take back what was imposed: the task's own limit holds again. Gives whether anything was imposed."""
        return self._known(task, self._app.perform(self._lift(task)))

    async def alift(self, task: "str | Task[..., Any]") -> bool:
        """`lift`, from Trio or asyncio."""
        return self._known(task, await self._app.aperform(self._lift(task)))

    def suspend(self, task: "str | Task[..., Any]", *, why: str = "", by: str = "") -> bool:
        """Begin no job of a task on any worker, until it is resumed; its jobs wait in Redis. What runs is run to its
        end, and workers hear of it in moments: some jobs may begin until then. Gives whether that changes anything."""
        return self._app.perform(self._suspend(task, why, by))

    async def asuspend(self, task: "str | Task[..., Any]", *, why: str = "", by: str = "") -> bool:
        """`suspend`, from Trio or asyncio: in a task that an event starts, say."""
        return await self._app.aperform(self._suspend(task, why, by))

    def resume(self, task: "str | Task[..., Any]") -> bool:
        """Let the jobs of a suspended task run again, in the order in which they came. Gives whether it was
        suspended."""
        return self._known(task, self._app.perform(self._resume(task)))

    async def aresume(self, task: "str | Task[..., Any]") -> bool:
        """`resume`, from Trio or asyncio."""
        return self._known(task, await self._app.aperform(self._resume(task)))

    def list(self) -> dict[str, TaskLimits]:
        """What is imposed on tasks now, by their names."""
        return _list_limits(self._app.perform(limits.list_overrides(self._app.keys)))

    async def alist(self) -> dict[str, TaskLimits]:
        """`list`, from Trio or asyncio."""
        return _list_limits(await self._app.aperform(limits.list_overrides(self._app.keys)))

    def _set_override(self, task: "str | Task[..., Any]", limit: int | str, by: str) -> Call[bool]:
        name = self._name(task)
        if isinstance(limit, str):
            what = LimitOverride(rate=limit, by=by or _me(), since=_now())
        elif isinstance(limit, bool) or not isinstance(limit, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Misconfigured(f"task {name}: limit is {limit!r}: give a number, or a rate such as '200/m'")
        else:
            what = LimitOverride(limit=limit, by=by or _me(), since=_now())
        return limits.set_override(self._app.keys, name, what.validate(name))

    def _lift(self, task: "str | Task[..., Any]") -> Call[bool]:
        return limits.set_override(self._app.keys, _said(task), None)

    def _suspend(self, task: "str | Task[..., Any]", why: str, by: str) -> Call[bool]:
        what = Suspension(why=why, by=by or _me(), since=_now())
        return limits.suspend_task(self._app.keys, self._name(task), what)

    def _resume(self, task: "str | Task[..., Any]") -> Call[bool]:
        return limits.resume_task(self._app.keys, _said(task))

    def _known(self, task: "str | Task[..., Any]", done: bool) -> bool:
        """Whether something was taken back. Where nothing was, an unknown name is one that was misspelt."""
        if not done:
            self._name(task)
        return done

    def _name(self, task: "str | Task[..., Any]") -> str:
        if not isinstance(task, str):
            return task.name
        self._app.load()
        return self._app.tasks[task].name


def _said(task: "str | Task[..., Any]") -> str:
    """What is imposed may outlive its task: it is taken back by name."""
    return task if isinstance(task, str) else task.name


def _list_limits(found: StoredOverrides) -> dict[str, TaskLimits]:
    listed: dict[str, TaskLimits] = {}
    for task in sorted(found.limits.keys() | found.suspended.keys()):
        limit, suspended = found.limits.get(task) or LimitOverride(), found.suspended.get(task)
        entry = TaskLimits(task, limit.limit, limit.rate, limit.by)
        if suspended is not None and not 0 < suspended.until <= time.time():
            entry = msgspec.structs.replace(
                entry,
                suspended=True,
                why=suspended.why,
                suspended_by=suspended.by,
                until=suspended.until,
                suspended_since=suspended.since,
            )
        listed[task] = entry
    return listed


def _now() -> float:
    return round(time.time(), 3)


def _me() -> str:
    """Who imposes it, when nothing else is said."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
