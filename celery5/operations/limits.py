"""See what is imposed on tasks; impose limits and rates, suspend tasks and resume them."""

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from celery5.errors import Misconfigured
from celery5.operations.columns import ResultColumn
from celery5.operations.operation import Changed, Effect, Operation
from celery5.operations.parameters import Nothing, Text, about
from celery5.protocol.text_values import COUNT

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.limits.overrides import TaskLimits

NO_LIMIT = "none"
"""The limit that lifts what was imposed."""


async def list_limits(app: "App", _: Nothing) -> "list[TaskLimits]":
    """Show the limits of tasks, declared and imposed: whose they are, how much is in use, and what is suspended."""
    from celery5.limits.limit_use import list_limits_in_use

    with suppress(Misconfigured):  # what is imposed is shown even if the code cannot be loaded
        app.load()
    return await list_limits_in_use(app, await app.connections.get_async_driver())


class NewLimit(msgspec.Struct, frozen=True):
    """A limit to impose."""

    task: Annotated[Text, about("The task.")]
    limit: Annotated[
        str,
        Meta(min_length=1, max_length=50),
        about(
            "Jobs that may run at the same time, a rate such as 200/m, or `none` to lift what was imposed."
        ),
    ]
    is_kind: Annotated[
        bool, about("The task is a kind of task, such as thread; the limit is a rate.", flag="--kind")
    ] = False


async def set_limit(app: "App", asked: NewLimit) -> Changed:
    """Impose a limit or a rate on a task, for all workers, or lift it."""
    limits = app.limits
    lifts, is_rate = asked.limit == NO_LIMIT, "/" in asked.limit
    if asked.is_kind:
        call = limits.alift_kind_rate(asked.task) if lifts else limits.aset_kind_rate(asked.task, asked.limit)
    else:
        call = limits.alift(asked.task) if lifts else limits.aset(asked.task, _parse_limit(asked.limit))
    done = await call
    what = f"kind {asked.task}" if asked.is_kind else asked.task
    if not lifts:
        return Changed(
            summary=f"{what}: {'rate' if asked.is_kind or is_rate else 'limit'} {asked.limit}", count=1
        )
    lifted = "no rate but that of the setting" if asked.is_kind else "its own limit again"
    return Changed(summary=f"{what}: {lifted if done else 'nothing was imposed'}", count=int(done))


def _parse_limit(text: str) -> int | str:
    """Return a number of jobs, or a rate. Raises Misconfigured."""
    if "/" in text:
        return text
    try:
        return COUNT.parse(text)
    except Misconfigured:
        raise Misconfigured(
            f"limit {text!r}: give a number from 0, a rate such as 200/m, or {NO_LIMIT}"
        ) from None


class TaskSuspension(msgspec.Struct, frozen=True):
    """A task to suspend."""

    task: Annotated[Text, about("The task.")]
    why: Annotated[
        str, Meta(max_length=500), about("The reason, for others to read: `task limits` and `info` show it.")
    ] = ""


async def suspend_task(app: "App", asked: TaskSuspension) -> Changed:
    """Begin no job of a task on any worker until it is resumed; what runs is run to its end."""
    await app.limits.asuspend(asked.task, why=asked.why)
    return Changed(summary=f"{asked.task} is suspended", count=1)


class OneTask(msgspec.Struct, frozen=True):
    """A task."""

    task: Annotated[Text, about("The task.")]


async def resume_task(app: "App", asked: OneTask) -> Changed:
    """Let the jobs of a suspended task run again, in their order."""
    done = await app.limits.aresume(asked.task)
    return Changed(summary=f"{asked.task}: {'resumed' if done else 'was not suspended'}", count=int(done))


def _name_imposers(limits: "TaskLimits") -> str:
    """Return who has imposed something on a task, each once."""
    return ", ".join(name for name in dict.fromkeys((limits.limited_by, limits.suspended_by)) if name)


def _describe_limit(limits: "TaskLimits") -> str:
    """Return the limit in words; of a declared range its bounds."""
    if limits.limit is None:
        is_range = limits.origin == "declared" and not limits.rate
        return limits.declared.removeprefix("limit ") if is_range else ""
    return f"{limits.limit} per {limits.per}" if limits.per else str(limits.limit)


_COLUMNS = (
    ResultColumn("task", "task"),
    ResultColumn("limit", _describe_limit),
    ResultColumn("rate", "rate"),
    ResultColumn("origin", "origin"),
    ResultColumn("in use", "use"),
    ResultColumn("waiting", "waiting"),
    ResultColumn("suspended", lambda limits: limits.why or ("yes" if limits.suspended else "")),
    ResultColumn("until", "until", "time"),
    ResultColumn("by", _name_imposers),
)
LIMIT_OPERATIONS = (
    Operation("task:limits", list_limits, columns=_COLUMNS, result_module="celery5.limits.overrides"),
    Operation("task:limit", set_limit, Effect.ADJUST),
    Operation("task:suspend", suspend_task, Effect.ADJUST),
    Operation("task:resume", resume_task, Effect.ADJUST),
)
"""The operations on limits."""
