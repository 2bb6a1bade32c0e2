"""See jobs, send and revoke them."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from celery5.errors import BrokerUnavailable
from celery5.operations.operation import Changed, Effect, NotFound, Operation
from celery5.operations.parameters import Limit, Names, Pattern, Span, Text, about
from celery5.protocol.counts import format_count
from celery5.protocol.job.history import JobOrder
from celery5.protocol.job.states import JobState
from celery5.protocol.job.story import JobDetails
from celery5.protocol.limits import describe_declared_limits, parse_kind_rates
from celery5.protocol.shards import get_queue_of_shard
from celery5.protocol.workflows.member_ids import parse_member_id

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.observability.job_search import JobPage
    from celery5.results.async_result import AsyncResult


class OneJob(msgspec.Struct, frozen=True):
    """A job."""

    id: Annotated[Text, about("The job.")]
    queue: Annotated[str | None, about("The queue it was sent to; default: looked for on all.")] = None


async def show_job(app: "App", asked: OneJob) -> JobDetails:
    """Show all that is known of a job, and each of its attempts."""
    from celery5.broker.calls.commands import list_paused_queues
    from celery5.observability.shown_values import mask_job

    details = await app.jobs.astory(asked.id, queue=asked.queue)
    if details is None and (member := parse_member_id(asked.id)):
        raise NotFound(f"job {asked.id} belongs to run {member.run}, which keeps what became of it")
    if details is None and asked.id in app.tasks:
        raise NotFound(
            f"{asked.id!r} is a task, not the id of a job: celery5 task search --task {asked.id} finds its jobs"
        )
    if details is None:
        where = "on any queue" if asked.queue is None else f"on queue {asked.queue!r}"
        raise NotFound(
            f"nothing is known of job {asked.id!r} {where}: it was never sent, or its result has expired"
        )
    if details.state is JobState.SENT:
        paused = await app.aperform(list_paused_queues(app.keys))
        is_paused = get_queue_of_shard(details.queue) in paused
        details = msgspec.structs.replace(details, is_queue_paused=is_paused)
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
    since: Annotated[
        Span | None, about("Ended, or sent, in the last 90 (seconds), 15m, 2h.", metavar="SPAN")
    ] = None
    until: Annotated[Span | None, about("Ended, or sent, so long ago or longer.", metavar="SPAN")] = None
    longer_than: Annotated[
        Span | None, about("It ran so long or longer, or runs for so long: 5s, 10m.", metavar="SPAN")
    ] = None
    sort: Annotated[
        JobOrder,
        about("The newest first, or those first that ran longest, which leaves out what has not run."),
    ] = "time"
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
        longer_than=asked.longer_than,
        sort=asked.sort,
        limit=asked.limit,
        cursor=asked.cursor,
    )


class NewJob(msgspec.Struct, frozen=True):
    """A job to send."""

    task: Annotated[Text, about("The task.")]
    args: Annotated[list[Any], about("Its arguments, as a list: '[2, 3]'.")] = []
    kwargs: Annotated[dict[str, Any], about("Those by name, as an object: '{\"n\": 2}'.")] = {}
    queue: Annotated[str | None, about("Where to send it; default: the task's queue.")] = None
    countdown: Annotated[
        Span | None, about("How long until it is due: 90 (seconds), 15m, 2h, 1d12h.", metavar="SPAN")
    ] = None
    key: Annotated[str | None, about("It is sent only if no live job of the task has this key.")] = None


async def send_job(app: "App", asked: NewJob) -> Changed:
    """Send a job of a task."""
    from celery5.sending.sender import without_backlog

    given = {name: getattr(asked, name) for name in ("queue", "countdown", "key")}
    options = {name: value for name, value in given.items() if value is not None}
    sender = app.signature(asked.task).task.options(**options)
    with without_backlog():  # it says that the job is sent
        handle: AsyncResult[Any] = await sender.adelay(*asked.args, **asked.kwargs)
    if handle.duplicate:
        summary = f"nothing was sent: job {handle.id} already has the key"
        return Changed(summary=summary, count=0, value={"id": handle.id})
    how = {"job": handle.id, **options}
    await app.audit.arecord_sending("task:send", asked.task, how)
    return Changed(summary=f"job {handle.id} is sent", count=1, value={"id": handle.id})


class SomeJobs(msgspec.Struct, frozen=True):
    """Jobs by their ids."""

    ids: Annotated[Names, Meta(min_length=1), about("The jobs.", metavar="ID...")]
    queue: Annotated[str | None, about("The queue they were sent to; default: looked for on all.")] = None
    dry_run: Annotated[bool, about("Only look which of them have not ended.")] = False


class RevokedJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a job that was to be revoked."""

    id: str
    # '' when nothing is known of it.
    queue: str
    revoked: bool
    # Its state afterwards.
    state: str
    # When it stops, if it runs and that is not at once.
    stops_when: str = ""


async def revoke_jobs(app: "App", asked: SomeJobs) -> Changed:
    """Have jobs not run, or stop if they run."""
    from celery5.results.async_result import arevoke
    from celery5.results.job_details import explain_stop

    found, error = await _find_jobs(app, asked)
    if asked.dry_run:
        live = [details for details in found.values() if details is not None and not details.has_ended]
        return Changed(
            summary=f"{len(live)} of {format_count(len(found), 'job')} revoked",
            count=len(live),
            dry_run=True,
        )
    handles: list[AsyncResult[Any]] = [
        app.result(job_id, queue=details.queue) for job_id, details in found.items() if details
    ]
    outcomes = {job_id: RevokedJob(job_id, "", False, "UNKNOWN") for job_id in found}
    for handle, was_revoked in zip(handles, await arevoke(handles), strict=True):
        state = (await handle.astatus()).value
        details = found[handle.id]
        runs = was_revoked and state == JobState.EXECUTING
        stops_when = explain_stop(app.tasks.get(details.task)) if runs and details is not None else ""
        outcomes[handle.id] = RevokedJob(handle.id, handle.queue, was_revoked, state, stops_when)
    left = [f"{job.id} ({job.state})" for job in outcomes.values() if not job.revoked]
    failure = f"not revoked: {', '.join(left)}: it had ended before, or nothing is known of it"
    count = len(outcomes) - len(left)
    return Changed(
        summary=f"{format_count(count, 'job')} revoked",
        count=count,
        value=list(outcomes.values()),
        failure=f"{failure}; {error}".removesuffix("; ") if left else "",
    )


async def _find_jobs(app: "App", asked: SomeJobs) -> "tuple[dict[str, JobDetails | None], str]":
    """Return the details of each job, None where there are none, and the error of an unreachable broker, '' for none.

    Raises that error when there are no details of any job.
    """
    found, unreachable = dict[str, "JobDetails | None"](), list[BrokerUnavailable]()
    for job_id in asked.ids:
        try:
            found[job_id] = await app.afind(job_id, queue=asked.queue)
        except BrokerUnavailable as error:
            unreachable = unreachable or [error]
            found[job_id] = None
    if unreachable and not any(found.values()):
        raise unreachable[0]
    return found, str(unreachable[0]) if unreachable else ""


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
    # What it declares, or its kind has by the settings, in words: `rate 100/m`; '' for none.
    limits: str = ""


async def list_tasks(app: "App", asked: TaskPrefix) -> list[TaskSummary]:
    """Show the tasks that the application declares."""
    app.load()  # a dashboard inside another program may have imported nothing of `include` yet
    kind_rates = parse_kind_rates(app.settings.rate_limits)
    return [
        TaskSummary(
            name,
            task.queue,
            task.kind,
            (task.__doc__ or "").strip().partition("\n")[0],
            describe_declared_limits(task.declared_limits, task.kind, kind_rates.get(task.kind)),
        )
        for name, task in sorted(app.tasks.items())
        if name.startswith(asked.prefix)
    ]


SHOW = Operation("task:show", show_job)
JOB_OPERATIONS = (
    SHOW,
    Operation("task:search", search_jobs, result_module="celery5.observability.job_search"),
    Operation("task:list", list_tasks),
    Operation("task:send", send_job, Effect.SEND_JOBS),
    Operation("task:revoke", revoke_jobs, Effect.STOP_NAMED),
)
"""The operations on jobs."""
