"""See jobs, send and revoke them."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from celery5.operations.operation import Changed, Effect, NotFound, Operation
from celery5.operations.parameters import Limit, Names, Pattern, Seconds, Text, about
from celery5.protocol.job.story import JobDetails
from celery5.protocol.workflows.member_ids import parse_member_id

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.observability.job_search import JobPage
    from celery5.results.async_result import AsyncResult

"""What is looked for; '' for anything."""


class OneJob(msgspec.Struct, frozen=True):
    """A job."""

    id: Annotated[Text, about("The job.")]
    queue: Annotated[str, about("The queue it was sent to; default: all are looked at.")] = ""


async def show_job(app: "App", asked: OneJob) -> JobDetails:
    """Show all that is known of a job, and each of its attempts."""
    from celery5.observability.shown_values import mask_job

    details = await app.jobs.astory(asked.id, queue=asked.queue or None)
    if details is None and (member := parse_member_id(asked.id)):
        raise NotFound(f"job {asked.id} belongs to run {member.run}, which keeps what became of it")
    if details is None:
        raise NotFound(f"nothing is known of job {asked.id!r}: it was never sent, or its result has expired")
    return mask_job(app, details)


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs, and which page of them."""

    id: Annotated[Pattern, about("The job with this id.", metavar="ID")] = ""
    task: Annotated[Pattern, about("Jobs of this task: `shop.*` for several.", metavar="TASK")] = ""
    queue: Annotated[Pattern, about("Jobs of this queue.", metavar="QUEUE")] = ""
    state: Annotated[Pattern, about("Jobs in this state, or attempts that ended in it.", metavar="STATE")] = (
        ""
    )
    error: Annotated[
        Pattern, about("Failed with this error: its class, or a part of its text.", metavar="ERROR")
    ] = ""
    worker: Annotated[Pattern, about("This worker had it: `web-1*` for several.", metavar="WORKER")] = ""
    argument: Annotated[Pattern, about("An argument has this value: order.id=7.", metavar="PATH=VALUE")] = ""
    since: Annotated[Seconds | None, about("Ended, or sent, in this last time.", metavar="SPAN")] = None
    until: Annotated[Seconds | None, about("Ended, or sent, so long ago or longer.", metavar="SPAN")] = None
    at: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        about(
            "From when these are counted, in seconds since 1970; default: now. A cursor needs that of its search."
        ),
    ] = None
    limit: Annotated[Limit, about("Jobs on a page, at most.")] = 100
    cursor: Annotated[
        Annotated[str, Meta(max_length=100_000)] | None,
        about("Where the page before has ended.", metavar="CURSOR"),
    ] = None


async def search_jobs(app: "App", asked: JobFilter) -> "JobPage":
    """Find jobs that wait, run, are dead or have ended; of successes only the slowest and samples are kept."""
    at = time.time() if asked.at is None else asked.at
    return await app.jobs.asearch(
        id=asked.id,
        task=asked.task,
        queue=asked.queue,
        state=asked.state,
        error=asked.error,
        worker=asked.worker,
        argument=asked.argument,
        since=None if asked.since is None else max(0.0, at - asked.since),
        until=None if asked.until is None else max(0.0, at - asked.until),
        limit=asked.limit,
        cursor=asked.cursor,
    )


class NewJob(msgspec.Struct, frozen=True):
    """A job to send."""

    task: Annotated[Text, about("The task.")]
    args: Annotated[list[Any], about("Its arguments, as a list.")] = []
    kwargs: Annotated[dict[str, Any], about("Those by name, as an object.")] = {}
    queue: Annotated[str, about("Where to send it; default: the task's queue.")] = ""
    countdown: Annotated[Seconds | None, about("How long until it is due.")] = None
    key: Annotated[str, about("It is sent only if no live job of the task has this key.")] = ""


async def send_job(app: "App", asked: NewJob) -> Changed:
    """Send a job of a task."""
    from celery5.sending.sender import without_backlog

    options = {name: value for name in ("queue", "countdown", "key") if (value := getattr(asked, name))}
    sender = app.signature(asked.task).task.options(**options)
    with without_backlog():  # it says that the job is sent
        handle: AsyncResult[Any] = await sender.adelay(*asked.args, **asked.kwargs)
    if handle.duplicate:
        return Changed(summary=f"nothing was sent: job {handle.id} already has the key", count=0)
    how = {"job": handle.id, **options}
    await app.audit.arecord_sending("task:send", asked.task, how)
    return Changed(summary=f"job {handle.id} is sent", count=1)


class SomeJobs(msgspec.Struct, frozen=True):
    """Jobs by their ids."""

    ids: Annotated[Names, Meta(min_length=1), about("The jobs.")]
    queue: Annotated[str, about("The queue they were sent to; default: all are looked at.")] = ""
    dry_run: Annotated[bool, about("Only look which of them have not ended.")] = False


async def revoke_jobs(app: "App", asked: SomeJobs) -> Changed:
    """Have jobs not run, or stop if they run."""
    from celery5.results.async_result import arevoke

    found = [await app.afind(job_id, queue=asked.queue or None) for job_id in dict.fromkeys(asked.ids)]
    live = [details for details in found if details is not None and not details.has_ended]
    if asked.dry_run:
        return Changed(
            summary=f"{len(live)} of {len(found)} jobs have not ended", count=len(live), dry_run=True
        )
    outcomes = await arevoke([app.result(details.id, queue=details.queue) for details in live])
    left = len(found) - sum(outcomes)
    return Changed(
        summary=f"{sum(outcomes)} jobs revoked",
        count=sum(outcomes),
        failure=f"{left} had ended before, or are not known" if left else "",
    )


class TaskPrefix(msgspec.Struct, frozen=True):
    """Which tasks."""

    prefix: Annotated[str, about("What their names begin with.")] = ""


class TaskSummary(msgspec.Struct, frozen=True):
    """A task that the application declares."""

    task: str
    queue: str
    # `trio`, `asyncio`, `thread` or `boxed`.
    kind: str
    description: str


async def list_tasks(app: "App", asked: TaskPrefix) -> list[TaskSummary]:
    """Show the tasks that the application declares."""
    return [
        TaskSummary(name, task.queue, task.kind, (task.__doc__ or "").strip().partition("\n")[0])
        for name, task in sorted(app.tasks.items())
        if name.startswith(asked.prefix)
    ]


JOB_OPERATIONS = (
    Operation("task:show", show_job),
    Operation("task:search", search_jobs, result_module="celery5.observability.job_search"),
    Operation("task:list", list_tasks),
    Operation("task:send", send_job, Effect.SEND_JOBS),
    Operation("task:revoke", revoke_jobs, Effect.STOP_NAMED),
)
"""The operations on jobs."""
