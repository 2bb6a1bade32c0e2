"""Begin actions on many jobs or runs, see how far they are, stop them, and resume what was interrupted."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec

from celery5.operations.operation import Changed, Effect, NotFound, Operation
from celery5.operations.parameters import Limit, Pattern, Rate, Text, about
from celery5.protocol.bulk import UNKNOWN_ACTION, BulkRequest, BulkStatus, BulkVerb
from celery5.protocol.counts import choose_form

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.bulk.actions import BulkCount


class BulkListing(msgspec.Struct, frozen=True):
    """Which bulk actions."""

    limit: Annotated[Limit, about("Actions at most.")] = 50


async def list_bulk_actions(app: "App", asked: BulkListing) -> list[BulkStatus]:
    """Show the actions on many jobs of the last day, the last one first."""
    return await app.bulk.alist(limit=asked.limit)


class OneBulkAction(msgspec.Struct, frozen=True):
    """A bulk action."""

    id: Annotated[Text, about("The bulk action.")]


async def show_bulk_action(app: "App", asked: OneBulkAction) -> BulkStatus:
    """Show how far an action on many jobs is."""
    status = await app.bulk.aget(asked.id)
    if status is None:
        raise NotFound(UNKNOWN_ACTION.format(asked.id))
    return status


async def stop_bulk_action(app: "App", asked: OneBulkAction) -> Changed:
    """Stop an action on many jobs; what it has not come to stays as it is."""
    status = await show_bulk_action(app, asked)
    done = await app.bulk.astop(asked.id)
    verb = status.action.verb
    if not done:
        return Changed(summary=f"{verb} is not stopped", count=0, failure=f"{asked.id} had ended before")
    return Changed(summary=f"{asked.id} is asked to stop", count=1)


CONTINUED: Mapping[BulkVerb, str] = {
    "dlq:replay": "dlq:replay",
    "dlq:purge": "dlq:purge",
    "task:revoke": "bulk:revoke",
    "workflow:retry": "bulk:retry",
}
"""The operation that begins each kind of bulk action."""


async def find_begun(app: "App", asked: OneBulkAction) -> str:
    """Return the operation that has begun a bulk action."""
    return CONTINUED[(await show_bulk_action(app, asked)).action.verb]


async def resume_bulk_action(app: "App", asked: OneBulkAction) -> Changed:
    """Go on with an action on many jobs whose process has ended; nothing is done twice."""
    from celery5.services.bulk.bulk_thread import get_bulk_thread

    await get_bulk_thread(app).resume(asked.id)
    return Changed(summary=f"bulk action {asked.id} goes on", count=1, bulk=asked.id)


class RevokeMany(msgspec.Struct, frozen=True):
    """Which waiting jobs to revoke."""

    queue: Annotated[Text, about("The queue whose waiting jobs are revoked.")]
    task: Annotated[Pattern, about("Of this task alone, with wildcards: `shop.*`.", metavar="TASK")] = ""
    rate: Rate = None
    dry_run: Annotated[bool, about("Say what would be done, and do nothing.")] = False


async def revoke_many(app: "App", asked: RevokeMany) -> Changed:
    """Revoke the jobs of a task that wait on a queue."""
    selection = {"queue": asked.queue} | ({"task": asked.task} if asked.task else {})
    request = BulkRequest(verb="task:revoke", filter=selection, rate=asked.rate)
    return await count_and_begin(app, request, "job", "revoked", is_dry=asked.dry_run)


class RetryMany(msgspec.Struct, frozen=True):
    """Which failed runs to retry."""

    queue: Annotated[Pattern, about("The queue where the runs live; default: all.", metavar="QUEUE")] = ""
    workflow: Annotated[Pattern, about("Of this workflow alone, with wildcards.", metavar="WORKFLOW")] = ""
    rate: Rate = None
    dry_run: Annotated[bool, about("Say what would be done, and do nothing.")] = False


async def retry_many(app: "App", asked: RetryMany) -> Changed:
    """Start what has failed in many runs of workflows again."""
    selection = {name: value for name in ("queue", "workflow") if (value := getattr(asked, name))}
    request = BulkRequest(verb="workflow:retry", filter=selection, rate=asked.rate)
    return await count_and_begin(app, request, "run", "started again", is_dry=asked.dry_run)


async def count_and_begin(
    app: "App", request: BulkRequest, thing: str, done: str, *, is_dry: bool
) -> Changed:
    """Begin a bulk action, or say how much it would change. `thing` is what one of what it changes is called."""
    counted = await app.bulk.acount(request)
    things = choose_form(counted.total, thing)
    if is_dry:
        return preview(counted, things, done)
    return await begin(app, request, counted, f"{things} {done}")


def preview(counted: "BulkCount", things: str, done: str) -> Changed:
    """Return what a dry run answers: how many things would be done."""
    return Changed(summary=f"{_format(counted)} {things} {done}", count=counted.total, dry_run=True)


async def begin(app: "App", request: BulkRequest, counted: "BulkCount", what: str) -> Changed:
    """Begin a bulk action whose things were counted. `what` says in words what it does."""
    from celery5.services.bulk.bulk_thread import get_bulk_thread

    action_id = await get_bulk_thread(app).submit(request, counted)
    summary = f"bulk action {action_id} has begun: {_format(counted)} {what}"
    return Changed(summary=summary, count=counted.total, bulk=action_id)


def _format(counted: "BulkCount") -> str:
    return f"{'' if counted.is_exact else 'at least '}{counted.total}"


BULK_OPERATIONS = (
    Operation("bulk:list", list_bulk_actions),
    Operation("bulk:show", show_bulk_action),
    Operation("bulk:stop", stop_bulk_action, Effect.ADJUST, is_recorded_later=True),
    Operation("bulk:resume", resume_bulk_action, Effect.ADJUST, find_continued=find_begun),
    Operation("bulk:revoke", revoke_many, Effect.REVOKE_SELECTED),
    Operation("bulk:retry", retry_many, Effect.SEND_JOBS | Effect.AT_ONCE),
)
"""The operations on bulk actions."""
