"""See dead jobs, send them again, and delete them."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, cast

import msgspec
from msgspec import Meta

from celery5.errors import Misconfigured
from celery5.operations.bulk import begin, preview
from celery5.operations.columns import ResultColumn
from celery5.operations.operation import Changed, Effect, Operation
from celery5.operations.parameters import Limit, Names, Pattern, Patterns, Rate, Seconds, Span, about
from celery5.protocol.bulk import BulkRequest, BulkVerb, check_bulk_action
from celery5.protocol.counts import choose_form, format_count
from celery5.protocol.job.dead_letters import CONDITION_WORDS, DeadJobDetails, DeadJobFilter
from celery5.protocol.job.failure_groups import DeadJobGroups

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.dead_letters.queues import DeadLetterTally

MAX_GROUPED = 100_000
"""Dead jobs that are grouped in one request."""
MAX_DIRECT = 200
"""Jobs that are changed while the request waits; more of them are a bulk action."""
COUNTING_TIME = 10.0
"""Seconds for which jobs are counted before they are changed."""


Position = Annotated[str, Meta(max_length=500)]
"""Where a dead job is: `QUEUE:ENTRY`."""


class DeadFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead jobs: of several values of one condition, any may match."""

    queue: Annotated[Patterns, about("Queues to look at; default: all.", metavar="A,B")] = []
    task: Annotated[Patterns, about("Of this task; `shop.*` will do.", metavar="NAME")] = []
    error: Annotated[Patterns, about("Last raised; `*Error` will do.", metavar="CLASS")] = []
    reason: Annotated[Patterns, about("Dead for this reason.", metavar="REASON")] = []
    sink: Annotated[Patterns, about("Documents for this Data Sink.", metavar="NAME")] = []
    message: Annotated[Pattern, about("Whose error has this text.", metavar="TEXT")] = ""
    group: Annotated[
        Patterns, about("What made them fail: the id of a group.", flag="--error-group", metavar="ID")
    ] = []
    older_than: Annotated[Span | None, about("Dead for longer: 90, 15m, 2h, 1d12h.", metavar="AGE")] = None
    newer_than: Annotated[Span | None, about("Dead for less.", metavar="AGE")] = None
    ids: Annotated[
        Names, about("These jobs; or, of one queue, these entries.", flag="--id", metavar="ID")
    ] = []

    def to_filter(self) -> DeadJobFilter:
        """Return the filter that the API takes. Raises Misconfigured for a name that no queue can have.

        A queue may be a list with commas. No time at all is a condition, too: nothing is dead for less.
        """
        conditions = {name: getattr(self, name) for name in CONDITION_WORDS}
        if self.queue:
            from celery5.protocol.job.job import parse_queue_names

            conditions["queue"] = parse_queue_names(",".join(self.queue), "`queue`", may_be_shards=True)
        return cast(
            "DeadJobFilter",
            {name: None if value in ("", []) else value for name, value in conditions.items()},
        )


class DeadReading(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to show, and in which order."""

    limit: Annotated[Limit, about("Jobs at most.")] = 50
    newest_first: Annotated[
        bool, about("The newest first, of all queues; else by queue, the oldest first.")
    ] = True
    after: Annotated[
        Position | None, about("Begin after this job: the next page.", metavar="QUEUE:ENTRY")
    ] = None


async def read_dead(app: "App", asked: DeadReading) -> list[DeadJobDetails]:
    """Show dead jobs and why they are dead."""
    from celery5.observability.shown_values import mask_dead_job

    conditions = asked.to_filter()
    conditions["newest_first"], conditions["limit"] = asked.newest_first, asked.limit
    conditions["after"] = asked.after
    return [mask_dead_job(app, job).without_message() async for job in app.dlq.aread(**conditions)]


class DeadCounting(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to count, and by what."""

    by: Annotated[
        Literal["reason", "task", "error", "queue", "cause"],
        about("What jobs are put together by; a cause is task, reason and error."),
    ] = "reason"


async def count_dead(app: "App", asked: DeadCounting) -> dict[str, int]:
    """Count dead jobs by what they have in common, the largest number first."""
    return await app.dlq.acount(asked.by, **asked.to_filter())


class DeadGrouping(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to group."""

    limit: Annotated[int, Meta(ge=1, le=MAX_GROUPED), about("Dead jobs to look at, at most.")] = MAX_GROUPED
    within: Annotated[
        Seconds | None,
        about(
            "How long to read at most; what was not looked at begins at `next` of the reply.", metavar="SPAN"
        ),
    ] = None
    newest_first: Annotated[bool, about("Look at the newest jobs first.")] = True
    after: Annotated[
        Position | None, about("Begin after this job: the next page.", metavar="QUEUE:ENTRY")
    ] = None


async def group_dead(app: "App", asked: DeadGrouping) -> DeadJobGroups:
    """Group dead jobs by what made them fail: how many, which error, since when and when last."""
    from celery5.observability.shown_values import mask_groups

    conditions = asked.to_filter()
    conditions["limit"], conditions["newest_first"] = asked.limit, asked.newest_first
    conditions["after"] = asked.after
    return mask_groups(app, await app.dlq.agroups(**conditions))


class Replay(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to send again."""

    rate: Rate = None
    limit: Annotated[
        Annotated[int, Meta(ge=1)] | None, about("Jobs at most, the oldest of each queue first.")
    ] = None
    dry_run: Annotated[bool, about("Say what would be done, and do nothing.")] = False


async def replay_dead(app: "App", asked: Replay) -> Changed:
    """Send dead jobs to their queues again, with all their attempts again."""
    return await _change(app, asked, _Change("dlq:replay", app.dlq.areplay, "sent again", asked.rate))


class Purge(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to delete."""

    limit: Annotated[
        Annotated[int, Meta(ge=1)] | None, about("Jobs at most, the oldest of each queue first.")
    ] = None
    dry_run: Annotated[bool, about("Say what would be done, and do nothing.")] = False


async def purge_dead(app: "App", asked: Purge) -> Changed:
    """Delete dead jobs for good."""
    return await _change(app, asked, _Change("dlq:purge", app.dlq.apurge, "deleted"))


class _Change(NamedTuple):
    """What is done to dead jobs."""

    verb: BulkVerb
    # Does it while the request waits.
    run: "Callable[..., Awaitable[DeadLetterTally]]"
    # What it does in words: `sent again`.
    done: str
    rate: str | None = None


async def _change(app: "App", asked: Replay | Purge, change: _Change) -> Changed:
    """Count the selected jobs once; then change few of them at once, and many by a bulk action."""
    from celery5.bulk.actions import BulkCount, count_selected

    conditions = asked.to_filter()
    words = {name: value for name, value in conditions.items() if value is not None}
    request = check_bulk_action(BulkRequest(verb=change.verb, filter=words, rate=change.rate))
    if asked.limit is not None and not asked.dry_run and (request.rate or asked.limit > MAX_DIRECT):
        raise Misconfigured(f"limit: give at most {MAX_DIRECT}, and no rate; or neither")
    counted = await count_selected(app, app.connections, request, within=COUNTING_TIME)
    if asked.limit is not None and counted.total >= asked.limit:
        counted = BulkCount(asked.limit, is_exact=True)
    if asked.dry_run:
        return preview(counted, _name_jobs(counted.total), change.done)
    if asked.limit is None and (request.rate or not counted.is_exact or counted.total > MAX_DIRECT):
        return await begin(app, request, counted, f"{_name_jobs(counted.total)} {change.done}")
    conditions["limit"] = asked.limit
    return _summarize(await change.run(**conditions), change.done)


def _summarize(tally: "DeadLetterTally", done: str) -> Changed:
    left = ", ".join(f"{count} {why}" for why, count in tally.left.items())
    return Changed(
        summary=f"{format_count(tally.done, 'dead job')} {done}",
        count=tally.done,
        failure=f"left alone: {left}" if left else "",
    )


def _name_jobs(count: int) -> str:
    return choose_form(count, "dead job")


READ = Operation(
    "dlq:read",
    read_dead,
    columns=(
        ResultColumn("queue", "queue"),
        ResultColumn("entry", "entry"),
        ResultColumn("died", "died", "time"),
        ResultColumn("id", "id"),
        ResultColumn("task", "task"),
        ResultColumn("attempt", "attempt"),
        ResultColumn("reason", lambda job: f"{job.reason} ({job.sink})" if job.sink else job.reason),
        ResultColumn("error", "error"),
    ),
)
DEAD_LETTER_OPERATIONS = (
    READ,
    Operation("dlq:count", count_dead),
    Operation("dlq:groups", group_dead),
    Operation("dlq:replay", replay_dead, Effect.SEND_JOBS | Effect.AT_ONCE),
    Operation("dlq:purge", purge_dead, Effect.DELETE),
)
"""The operations on dead letters."""
