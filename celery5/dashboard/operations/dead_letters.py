"""See dead jobs, send them again, and delete them."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

import anyio
import msgspec
from msgspec import Meta

from celery5.app import App
from celery5.dashboard.dead_letter_index import DeadLetterIndex
from celery5.dashboard.operation import Changed, Effect, Limit, Names, Operation, Pattern, Patterns, Seconds
from celery5.dashboard.operations.bulk import begin
from celery5.dead_letters.queues import DeadLetterTally
from celery5.errors import Misconfigured
from celery5.observability.shown_values import mask_dead_job, mask_groups
from celery5.protocol.bulk import BulkRequest, BulkVerb
from celery5.protocol.job.dead_letters import DeadJob, DeadJobFilter, parse_filter
from celery5.protocol.job.failure_groups import DeadJobGroups
from celery5.protocol.job.messages import Failure
from celery5.protocol.text_values import RATE

MAX_GROUPED = 100_000
"""Dead jobs that are grouped in one request."""
MAX_DIRECT = 200
"""Jobs that are changed while the request waits; more of them are a bulk action."""
COUNTING_TIME = 10.0
"""Seconds for which jobs are counted before they are changed."""


class DeadFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead jobs: of several values of one condition, any may match."""

    # What made them fail: the id of a group.
    group: Patterns = []
    queue: Patterns = []
    # With wildcards: `shop.*`.
    task: Patterns = []
    # The class of the last error, with wildcards.
    error: Patterns = []
    reason: Patterns = []
    # A part of the error's text.
    message: Pattern = ""
    ids: Names = []
    older_than: Seconds | None = None
    newer_than: Seconds | None = None

    def to_filter(self) -> DeadJobFilter:
        """Return the filter that the API takes."""
        return DeadJobFilter(
            group=self.group or None,
            queue=self.queue or None,
            task=self.task or None,
            error=self.error or None,
            reason=self.reason or None,
            message=self.message or None,
            ids=self.ids or None,
            older_than=self.older_than,
            newer_than=self.newer_than,
        )


class DeadReading(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to show, the newest first."""

    count: Limit = 50
    # Start behind this one: `QUEUE:ENTRY`.
    after: Annotated[str, Meta(max_length=500)] = ""


class DeadRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead job."""

    queue: str
    # Its id in the dead-letter queue.
    entry: str
    id: str
    task: str
    args: Any
    kwargs: Any
    attempt: int
    replays: int
    reason: str
    # The last error.
    type: str
    message: str
    traceback: str
    worker: str
    # Seconds since 1970.
    died: float
    sent: float
    failures: tuple[Failure, ...]


def _to_row(job: DeadJob) -> DeadRow:
    return DeadRow(**{field.name: getattr(job, field.name) for field in msgspec.structs.fields(DeadRow)})


async def read_dead(app: App, asked: DeadReading) -> list[DeadRow]:
    """Show dead jobs and why they are dead, the newest first."""
    conditions = asked.to_filter()
    conditions["newest_first"] = True
    conditions["limit"] = asked.count
    if asked.after:
        conditions["after"] = asked.after
    return [_to_row(mask_dead_job(app, job)) async for job in app.dlq.aread(**conditions)]


class DeadCounting(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to count, and by what."""

    by: Literal["reason", "task", "error", "queue", "cause"] = "reason"


async def count_dead(app: App, asked: DeadCounting) -> dict[str, int]:
    """Count dead jobs by what they have in common, the largest number first."""
    return await app.dlq.acount(asked.by, **asked.to_filter())


class DeadGrouping(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to group."""

    # Dead jobs to look at, at most.
    limit: Annotated[int, Meta(ge=1, le=MAX_GROUPED)] = MAX_GROUPED
    # Seconds to read for, at most; None to read all. What was not looked at begins at `next` of the reply.
    within: Seconds | None = None
    newest_first: bool = True
    # Start behind this one: `QUEUE:ENTRY`.
    after: Annotated[str, Meta(max_length=500)] = ""


async def group_dead(app: App, asked: DeadGrouping, index: DeadLetterIndex) -> DeadJobGroups:
    """Group dead jobs by what made them fail: how many, which error, since when and when last."""
    conditions = asked.to_filter()
    # The index has neither messages nor positions, and a small limit needs none.
    if asked.limit == MAX_GROUPED and asked.newest_first and not (asked.after or asked.message or asked.ids):
        groups = await index.group(parse_filter(conditions), within=asked.within)
        if groups is not None:
            return mask_groups(app, groups)
    conditions["limit"], conditions["newest_first"] = asked.limit, asked.newest_first
    if asked.after:
        conditions["after"] = asked.after
    return mask_groups(app, await app.dlq.agroups(**conditions))


class Replay(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to send again."""

    # So many jobs per second, such as 50/s; '' for no limit.
    rate: Annotated[str, Meta(max_length=20)] = ""
    # At most so many, the oldest of each queue first.
    limit: Annotated[int, Meta(ge=1)] | None = None
    dry_run: bool = False


async def replay_dead(app: App, asked: Replay) -> Changed:
    """Send dead jobs to their queues again, with all their attempts anew."""
    conditions = asked.to_filter()
    conditions["limit"] = asked.limit
    rate = asked.rate or None
    if rate is not None:
        RATE.parse(rate)
    if asked.dry_run:
        return await _try_out(partial(app.dlq.areplay, **conditions), "sent again")
    if rate is None and await _are_few(app, asked):
        return _summarize(await app.dlq.areplay(**conditions), "sent again")
    return await begin(app, _make_request("dlq:replay", asked, rate), "dead jobs sent again", is_dry=False)


class Purge(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to delete."""

    limit: Annotated[int, Meta(ge=1)] | None = None
    dry_run: bool = False


async def purge_dead(app: App, asked: Purge) -> Changed:
    """Delete dead jobs for good."""
    conditions = asked.to_filter()
    conditions["limit"] = asked.limit
    if asked.dry_run:
        return await _try_out(partial(app.dlq.apurge, **conditions), "deleted")
    if await _are_few(app, asked):
        return _summarize(await app.dlq.apurge(**conditions), "deleted")
    return await begin(app, _make_request("dlq:purge", asked, None), "dead jobs deleted", is_dry=False)


def _make_request(verb: BulkVerb, asked: Replay | Purge, rate: str | None) -> BulkRequest:
    """Return a change as a bulk action. Raises Misconfigured: those have no limit."""
    if asked.limit is not None:
        raise Misconfigured(f"limit: give at most {MAX_DIRECT}, and no rate; or neither")
    words = {name: value for name, value in asked.to_filter().items() if value is not None}
    return BulkRequest(verb=verb, filter=words, rate=rate)


async def _try_out(run: Callable[..., Awaitable[DeadLetterTally]], done: str) -> Changed:
    """Return how many jobs would be changed; of very many, at least how many."""
    counted = 0

    def note(tally: DeadLetterTally) -> None:
        nonlocal counted
        counted = tally.matched

    with anyio.move_on_after(COUNTING_TIME) as scope:
        await run(dry_run=True, progress=note)
    more = "more than " if scope.cancelled_caught else ""
    return Changed(summary=f"{more}{_count(counted)} {done}", count=counted, dry_run=True)


async def _are_few(app: App, asked: Replay | Purge) -> bool:
    """Return whether so few jobs are selected that they are changed at once."""
    if asked.limit is not None:
        return asked.limit <= MAX_DIRECT
    conditions = asked.to_filter()
    conditions["limit"] = MAX_DIRECT + 1
    with anyio.move_on_after(COUNTING_TIME):
        return sum((await app.dlq.acount("reason", **conditions)).values()) <= MAX_DIRECT
    return False


def _summarize(tally: DeadLetterTally, done: str) -> Changed:
    left = ", ".join(f"{count} {why}" for why, count in tally.left.items())
    return Changed(
        summary=f"{_count(tally.done)} {done}",
        count=tally.done,
        failure=f"left alone: {left}" if left else "",
    )


def _count(number: int) -> str:
    return f"{number} dead job{'' if number == 1 else 's'}"


DEAD_LETTER_OPERATIONS = (
    Operation("dlq:read", read_dead),
    Operation("dlq:count", count_dead),
    Operation("dlq:groups", group_dead, make_state=DeadLetterIndex),
    Operation("dlq:replay", replay_dead, Effect.CHANGE),
    Operation("dlq:purge", purge_dead, Effect.DESTROY),
)
"""The operations on dead letters."""
