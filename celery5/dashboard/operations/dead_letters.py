"""See dead jobs, send them again, and delete them."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, cast

import anyio
import msgspec
from msgspec import Meta

from celery5.app import App
from celery5.dashboard.bulk_actions import get_bulk_actions
from celery5.dashboard.operation import Changed, Limit, Operation, Seconds
from celery5.dead_letters.queues import DeadLetterTally
from celery5.protocol.job.dead_letters import DeadJob, DeadJobFilter
from celery5.protocol.job.failure_groups import DeadJobGroups
from celery5.protocol.job.messages import Failure
from celery5.protocol.text_values import RATE

MAX_GROUPED = 100_000
"""Dead jobs that are grouped in one request."""
MAX_DIRECT = 200
"""Jobs that are changed while the request waits; more of them are a bulk action."""
COUNTING_TIME = 10.0
"""Seconds for which jobs are counted before they are changed."""
Words = Annotated[list[str], Meta(max_length=1000)]


class DeadFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead jobs: of several values of one condition, any may match."""

    # What made them fail: the id of a group.
    group: Words = []
    queue: Words = []
    # With wildcards: `shop.*`.
    task: Words = []
    # The class of the last error, with wildcards.
    error: Words = []
    reason: Words = []
    # A part of the error's text.
    message: Annotated[str, Meta(max_length=500)] = ""
    ids: Words = []
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
    return [_to_row(job) async for job in app.dlq.aread(**conditions)]


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
    newest_first: bool = True
    # Start behind this one: `QUEUE:ENTRY`.
    after: Annotated[str, Meta(max_length=500)] = ""


async def group_dead(app: App, asked: DeadGrouping) -> DeadJobGroups:
    """Group dead jobs by what made them fail: how many, which error, since when and when last."""
    conditions = asked.to_filter()
    conditions["limit"], conditions["newest_first"] = asked.limit, asked.newest_first
    if asked.after:
        conditions["after"] = asked.after
    return await app.dlq.agroups(**conditions)


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
    return await _change(
        app,
        asked,
        _Verb("dlq:replay", "sent again", is_slow=rate is not None),
        partial(app.dlq.areplay, rate=rate, **conditions),
        partial(app.dlq.replay, rate=rate, **conditions),
    )


class Purge(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to delete."""

    limit: Annotated[int, Meta(ge=1)] | None = None
    dry_run: bool = False


async def purge_dead(app: App, asked: Purge) -> Changed:
    """Delete dead jobs for good."""
    conditions = asked.to_filter()
    conditions["limit"] = asked.limit
    return await _change(
        app,
        asked,
        _Verb("dlq:purge", "deleted"),
        partial(app.dlq.apurge, **conditions),
        partial(app.dlq.purge, **conditions),
    )


class _Verb(NamedTuple):
    """What is done to dead jobs."""

    action: str
    # In words: `sent again`.
    done: str
    # Whether it takes long even for a few jobs.
    is_slow: bool = False


async def _change(
    app: App,
    asked: Replay | Purge,
    verb: _Verb,
    run: Callable[..., Awaitable[DeadLetterTally]],
    run_in_thread: Callable[..., DeadLetterTally],
) -> Changed:
    """Count the jobs, or change a few at once, or begin to change many."""
    if asked.dry_run:
        return await _try_out(run, verb)
    total = await _count_selected(app, asked)
    if total is not None and total <= MAX_DIRECT and not verb.is_slow:
        return _summarize(await run(), verb)
    target = await _describe(app, asked)
    begun = get_bulk_actions(app).start(verb.action, target, total, run_in_thread)
    return Changed(
        summary=f"bulk action {begun.id} has begun: {verb.action} of {target}", count=total, bulk=begun.id
    )


async def _try_out(run: Callable[..., Awaitable[DeadLetterTally]], verb: _Verb) -> Changed:
    """Return how many jobs would be changed; of very many, at least how many."""
    counted = 0

    def note(tally: DeadLetterTally) -> None:
        nonlocal counted
        counted = tally.matched

    with anyio.move_on_after(COUNTING_TIME) as scope:
        await run(dry_run=True, progress=note)
    more = "more than " if scope.cancelled_caught else ""
    return Changed(summary=f"{more}{_count(counted)} {verb.done}", count=counted, dry_run=True)


async def _count_selected(app: App, asked: Replay | Purge) -> int | None:
    """Return how many jobs fit; None when they are too many to be counted."""
    conditions = asked.to_filter()
    conditions["limit"] = asked.limit
    with anyio.move_on_after(COUNTING_TIME):
        return sum((await app.dlq.acount("reason", **conditions)).values())
    return None


async def _describe(app: App, asked: Replay | Purge) -> str:
    """Return in words which jobs are meant, and how fast they are changed."""
    conditions = _get_conditions(asked)
    if len(asked.group) == 1:
        with anyio.move_on_after(COUNTING_TIME):
            async for job in app.dlq.aread(group=asked.group[0], limit=1):
                conditions["group"] += f" ({job.task}: {job.type})"
    return ", ".join(f"{name} {value}" for name, value in conditions.items()) or "all dead jobs"


def _get_conditions(asked: Replay | Purge) -> dict[str, str]:
    """Return the conditions that are given, as texts."""
    given = {name: _to_text(value) for name, value in msgspec.structs.asdict(asked).items() if value}
    if asked.ids:
        given["ids"] = f"{len(asked.ids)} jobs"
    return {name.replace("_", " "): text for name, text in given.items()}


def _to_text(value: object) -> str:
    return " ".join(map(str, cast("list[object]", value))) if isinstance(value, list) else str(value)


def _summarize(tally: DeadLetterTally, verb: _Verb) -> Changed:
    left = ", ".join(f"{count} {why}" for why, count in tally.left.items())
    return Changed(
        summary=f"{_count(tally.done)} {verb.done}",
        count=tally.done,
        failure=f"left alone: {left}" if left else "",
    )


def _count(number: int) -> str:
    return f"{number} dead job{'' if number == 1 else 's'}"


DEAD_LETTER_OPERATIONS = (
    Operation("dlq:read", read_dead),
    Operation("dlq:count", count_dead),
    Operation("dlq:groups", group_dead),
    Operation("dlq:replay", replay_dead, "operator", "change"),
    Operation("dlq:purge", purge_dead, "admin", "danger"),
)
"""The operations on dead letters."""
