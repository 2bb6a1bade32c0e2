"""See what is imposed on tasks; impose limits and rates, suspend tasks and resume them."""

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from celery5.operations.operation import Changed, Effect, Operation
from celery5.operations.parameters import Nothing, Text, about
from celery5.protocol.text_values import COUNT

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.limits.overrides import TaskLimits

NO_LIMIT = "none"
"""The limit that lifts what was imposed."""


async def list_limits(app: "App", _: Nothing) -> "list[TaskLimits]":
    """Show what is imposed on tasks, and which are suspended."""
    return list((await app.limits.alist()).values())


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
    if asked.limit == NO_LIMIT:
        lift = limits.alift_kind_rate if asked.is_kind else limits.alift
        done = await lift(asked.task)
        return Changed(
            summary=f"{asked.task}: {'lifted' if done else 'nothing was imposed'}", count=int(done)
        )
    if asked.is_kind:
        await limits.aset_kind_rate(asked.task, asked.limit)
    else:
        await limits.aset(asked.task, asked.limit if "/" in asked.limit else COUNT.parse(asked.limit))
    return Changed(summary=f"{asked.task}: {asked.limit}", count=1)


class TaskSuspension(msgspec.Struct, frozen=True):
    """A task to suspend."""

    task: Annotated[Text, about("The task.")]
    why: Annotated[str, Meta(max_length=500), about("The reason, for others to read.")] = ""


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
    return Changed(summary=f"{asked.task} {'runs again' if done else 'was not suspended'}", count=int(done))


LIMIT_OPERATIONS = (
    Operation("task:limits", list_limits, result_module="celery5.limits.overrides"),
    Operation("task:limit", set_limit, Effect.ADJUST),
    Operation("task:suspend", suspend_task, Effect.ADJUST),
    Operation("task:resume", resume_task, Effect.ADJUST),
)
"""The operations on limits."""
