"""Schedule: the schedules of an application: declared in code, and managed while all runs: `app.schedule`.

Floor: domain. Reads: nothing. Writes: nothing; what it calls does (scheduled.py), and is loaded when it is used.

A schedule that was added while all runs is kept in Redis and nobody's code need know it. One that code declares comes
back when it is removed here, as soon as a Scheduler begins.
"""

import builtins
from typing import TYPE_CHECKING, Any

from celery5.broker import presence
from celery5.colourless import BlockingDriverAdapter, run_blocking
from celery5.connections import AwaitingRedis
from celery5.errors import Misconfigured

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.periodic import DeclaredSchedule, Periodic
    from celery5.protocol.schedules import Misfire, MisfirePolicy, OverlapPolicy
    from celery5.result import AsyncResult
    from celery5.scheduled import ScheduleState
    from celery5.task import Signature
    from celery5.triggers import When


class Schedules:
    """The schedules of an application: `app.schedule`. Called, it declares one in code:
    `app.schedule(report.s("daily"), "0 3 * * *")`; its methods manage those that are in Redis. Raises Misconfigured for
    what makes no sense and for a name that is not there, BrokerError."""

    def __init__(self, app: "App") -> None:
        self._app = app
        self._declared: dict[str, DeclaredSchedule] = {}

    def __call__(
        self,
        call: "Signature[Any]",
        when: "When",
        *,
        name: str = "",
        misfire: "Misfire | MisfirePolicy" = "once",
        overlap: "OverlapPolicy" = "allow",
        jitter: float = 0.0,
    ) -> None:
        """Declare that `call` is sent whenever `when` says. See `Periodic`."""
        from celery5.periodic import Periodic
        from celery5.scheduled import make_declaration

        one = make_declaration(call, Periodic(when, name, misfire=misfire, overlap=overlap, jitter=jitter))
        if one.name in self._declared:
            raise Misconfigured(f"two schedules are named {one.name!r}: give one of them another name=...")
        self._declared[one.name] = one

    def list_declared(self) -> dict[str, "DeclaredSchedule"]:
        """All that code and configuration declare, by name. Raises Misconfigured for a name that is there twice."""
        from celery5.scheduled import collect_declarations

        return collect_declarations(self._app, [*self._declared.values()])

    @property
    def is_used(self) -> bool:
        """Whether code or configuration declare any."""
        tasks = self._app.tasks.values()
        return bool(self._declared or self._app.settings.schedules or any(each.schedule for each in tasks))

    def list(self) -> "builtins.list[ScheduleState]":
        """All schedules, by name. For plain Python."""
        from celery5 import scheduled

        return run_blocking(scheduled.list_states(self._app, self._plain("alist")))

    async def alist(self) -> "builtins.list[ScheduleState]":
        """`list`, from Trio or asyncio."""
        from celery5 import scheduled

        return await scheduled.list_states(self._app, await self._app.connections.get_async_driver())

    def show(self, name: str) -> "ScheduleState":
        """One schedule. For plain Python."""
        from celery5 import scheduled

        return run_blocking(scheduled.get_schedule_state(self._app, self._plain("ashow"), name))

    async def ashow(self, name: str) -> "ScheduleState":
        """`show`, from Trio or asyncio."""
        from celery5 import scheduled

        return await scheduled.get_schedule_state(
            self._app, await self._app.connections.get_async_driver(), name
        )

    def add(self, call: "Signature[Any]", when: "When", *, name: str = "", **how: Any) -> "ScheduleState":
        """Add a schedule to those in Redis, from now on. The words are those of a declaration. For plain Python."""
        from celery5 import scheduled

        of = scheduled.make_checked_definition(self._app, call, when, name, how)
        return run_blocking(
            scheduled.add_schedule(self._app, self._plain("aadd"), name or call.task.name, of)
        )

    async def aadd(
        self, call: "Signature[Any]", when: "When", *, name: str = "", **how: Any
    ) -> "ScheduleState":
        """`add`, from Trio or asyncio."""
        from celery5 import scheduled

        of = scheduled.make_checked_definition(self._app, call, when, name, how)
        return await scheduled.add_schedule(
            self._app, await self._app.connections.get_async_driver(), name or call.task.name, of
        )

    def pause(self, name: str) -> "ScheduleState":
        """Let a schedule rest; what falls into that time counts neither as fired nor as missed. For plain Python."""
        from celery5 import scheduled

        return run_blocking(
            scheduled.change_schedule(self._app, self._plain("apause"), name, scheduled.paused_schedule)
        )

    async def apause(self, name: str) -> "ScheduleState":
        """`pause`, from Trio or asyncio."""
        from celery5 import scheduled

        return await scheduled.change_schedule(
            self._app, await self._app.connections.get_async_driver(), name, scheduled.paused_schedule
        )

    def resume(self, name: str) -> "ScheduleState":
        """Have a schedule go on, with its next fire time that is still to come. For plain Python."""
        from celery5 import scheduled

        return run_blocking(
            scheduled.change_schedule(self._app, self._plain("aresume"), name, scheduled.resumed_schedule)
        )

    async def aresume(self, name: str) -> "ScheduleState":
        """`resume`, from Trio or asyncio."""
        from celery5 import scheduled

        return await scheduled.change_schedule(
            self._app, await self._app.connections.get_async_driver(), name, scheduled.resumed_schedule
        )

    def remove(self, name: str) -> "ScheduleState":
        """Remove a schedule; gives it as it was. Jobs that it has sent stay. For plain Python."""
        from celery5 import scheduled

        return run_blocking(
            scheduled.change_schedule(self._app, self._plain("aremove"), name, scheduled.removed_schedule)
        )

    async def aremove(self, name: str) -> "ScheduleState":
        """`remove`, from Trio or asyncio."""
        from celery5 import scheduled

        return await scheduled.change_schedule(
            self._app, await self._app.connections.get_async_driver(), name, scheduled.removed_schedule
        )

    def trigger(self, name: str) -> "AsyncResult[Any]":
        """Send a schedule's job now, whatever its overlap policy, and leave its times as they are; gives the handle.
        For plain Python."""
        from celery5 import scheduled

        return run_blocking(scheduled.trigger_schedule(self._app, self._plain("atrigger"), name))

    async def atrigger(self, name: str) -> "AsyncResult[Any]":
        """`trigger`, from Trio or asyncio."""
        from celery5 import scheduled

        return await scheduled.trigger_schedule(
            self._app, await self._app.connections.get_async_driver(), name
        )

    def schedulers(self) -> tuple[str, ...]:
        """The Schedulers that live, by name. For plain Python."""
        asked = presence.list_live_processes(self._app.keys, "scheduler")
        return self._app.perform(asked, instead="app.schedule.aschedulers")

    async def aschedulers(self) -> tuple[str, ...]:
        """`schedulers`, from Trio or asyncio."""
        return await self._app.aperform(presence.list_live_processes(self._app.keys, "scheduler"))

    def _plain(self, instead: str) -> AwaitingRedis:
        return BlockingDriverAdapter(
            self._app.connections.get_blocking_driver(async_name=f"app.schedule.{instead}")
        )


def parse_schedule(schedule: object, task: str) -> "tuple[Periodic, ...]":
    """What a task's declaration says of when it runs by itself. Raises Misconfigured."""
    if schedule is None:
        return ()
    from celery5.periodic import parse_periodic

    return parse_periodic(schedule, f"task {task}")
