"""See dead jobs, send them again, and delete them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from celery5.app import App
from celery5.dashboard.operation import Changed, Limit, Operation, Seconds
from celery5.dead_letters.queues import DeadLetterTally
from celery5.protocol.job.dead_letters import DeadJob, DeadJobFilter
from celery5.protocol.job.messages import Failure

MAX_AT_ONCE = 100_000
"""Dead jobs that one request handles."""
Words = Annotated[list[str], Meta(max_length=1000)]


class DeadFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead jobs: of several values of one condition, any may match."""

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


class Replay(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to send again."""

    # So many jobs per second, such as 50/s; '' for no limit.
    rate: Annotated[str, Meta(max_length=20)] = ""
    # At most so many, the oldest of each queue first.
    limit: Annotated[int, Meta(ge=1, le=MAX_AT_ONCE)] | None = None
    dry_run: bool = False


async def replay_dead(app: App, asked: Replay) -> Changed:
    """Send dead jobs to their queues again, with all their attempts anew."""
    conditions = asked.to_filter()
    conditions["limit"] = asked.limit
    tally = await app.dlq.areplay(rate=asked.rate or None, dry_run=asked.dry_run, **conditions)
    return _summarize(tally, "sent again", is_dry=asked.dry_run)


class Purge(DeadFilter, frozen=True, kw_only=True):
    """Which dead jobs to delete."""

    limit: Annotated[int, Meta(ge=1, le=MAX_AT_ONCE)] | None = None
    dry_run: bool = False


async def purge_dead(app: App, asked: Purge) -> Changed:
    """Delete dead jobs for good."""
    conditions = asked.to_filter()
    conditions["limit"] = asked.limit
    tally = await app.dlq.apurge(dry_run=asked.dry_run, **conditions)
    return _summarize(tally, "deleted", is_dry=asked.dry_run)


def _summarize(tally: DeadLetterTally, done: str, *, is_dry: bool) -> Changed:
    left = ", ".join(f"{count} {why}" for why, count in tally.left.items())
    count = tally.matched if is_dry else tally.done
    return Changed(
        summary=f"{count} dead jobs {done}",
        count=count,
        dry_run=is_dry,
        failure=f"left alone: {left}" if left else "",
    )


DEAD_LETTER_OPERATIONS = (
    Operation("dlq:read", read_dead),
    Operation("dlq:count", count_dead),
    Operation("dlq:replay", replay_dead, "operator", "danger"),
    Operation("dlq:purge", purge_dead, "admin", "danger"),
)
"""The operations on dead letters."""
