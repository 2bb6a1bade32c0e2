"""See queues, pause and resume them, and revoke what waits on them."""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from celery5.operations.operation import Changed, Effect, Operation
from celery5.operations.parameters import Nothing, Seconds, Text, about
from celery5.operations.replies import TIMEOUT, WORKER_NAMES, ReplyTimeout, summarize_replies
from celery5.protocol.commands.definitions import PAUSE_QUEUE, RESUME_QUEUE
from celery5.protocol.counts import format_count
from celery5.protocol.observability.rollup import HOUR
from celery5.protocol.observability.storage import Storage

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.broker.calls.queues import QueueState
    from celery5.observability.metrics import HistoryPoint


class OneQueue(msgspec.Struct, frozen=True):
    """A queue."""

    queue: Annotated[Text, about("The queue.")]


class HistorySpan(msgspec.Struct, frozen=True):
    """Which part of the history of a queue."""

    queue: Annotated[str, about("The queue; default: all together.")] = ""
    since: Annotated[Seconds, about("How far back.", metavar="SPAN")] = float(HOUR)
    until: Annotated[Seconds, about("Up to how far back.", metavar="SPAN")] = 0.0
    step: Annotated[
        Literal[60, 3600] | None,
        about("Seconds of a point: a minute or an hour; default: as the span allows."),
    ] = None


class QueueListing(msgspec.Struct, frozen=True):
    """How queues are listed."""

    shards: Annotated[
        bool, about("Each shard of a sharded queue, and the node of a Redis Cluster that has it.")
    ] = False


async def list_queues(app: "App", asked: QueueListing) -> "list[QueueState]":
    """Show each queue: waiting, running, held, scheduled and dead jobs, and who works on it."""
    return list((await app.ainfo(shards=asked.shards)).queues.values())


async def show_queue(app: "App", asked: OneQueue) -> "QueueState":
    """Show one queue."""
    return (await app.ainfo(asked.queue)).queues[asked.queue]


async def read_history(app: "App", asked: HistorySpan) -> "list[HistoryPoint]":
    """Show how many jobs waited and ended on a queue, minute by minute or hour by hour."""
    return await app.metrics.ahistory(asked.queue, since=asked.since, until=asked.until, step=asked.step)


async def show_storage(app: "App", _: Nothing) -> Storage:
    """Show what Redis holds: its memory and settings, and what each queue and stream takes."""
    return await app.metrics.astorage()


class ReadOrNot(msgspec.Struct, frozen=True):
    """A queue to read no longer, or again."""

    queue: Annotated[Text, about("The queue.")]
    to: WORKER_NAMES = []
    timeout: ReplyTimeout = TIMEOUT


async def pause_queue(app: "App", asked: ReadOrNot) -> Changed:
    """Stop reading a queue, in all workers or in those that are named; jobs that were read are run."""
    return await _send(app, PAUSE_QUEUE.name, asked, "is paused")


async def resume_queue(app: "App", asked: ReadOrNot) -> Changed:
    """Read a paused queue again, in all workers or in those that are named."""
    return await _send(app, RESUME_QUEUE.name, asked, "is read again")


async def _send(app: "App", command: str, asked: ReadOrNot, done: str) -> Changed:
    """Without a worker the state is stored for those that start later."""
    here = {"here": True} if asked.to else {}
    replies = await app.control.asend(
        command, {"queue": asked.queue, **here}, to=asked.to or None, timeout=asked.timeout
    )
    return summarize_replies(f"{asked.queue} {done}", replies, keep_answers=False)


class PurgeQueue(msgspec.Struct, frozen=True):
    """A queue to purge."""

    queue: Annotated[Text, about("The queue.")]
    dry_run: Annotated[bool, about("Say what would be done, and do nothing.")] = False


async def purge_queue(app: "App", asked: PurgeQueue) -> Changed:
    """Revoke all jobs that wait on a queue, also scheduled and held ones; running and dead jobs stay."""
    if asked.dry_run:
        state = await show_queue(app, OneQueue(asked.queue))
        return _summarize(asked.queue, state.count_unbegun(), is_dry=True)
    return _summarize(asked.queue, await app.aempty(asked.queue))


def _summarize(queue: str, count: int, *, is_dry: bool = False) -> Changed:
    jobs = format_count(count, "job")
    return Changed(summary=f"{queue}: {jobs} revoked", count=count, dry_run=is_dry)


HISTORY = Operation("metrics:history", read_history, result_module="celery5.observability.metrics")
QUEUE_OPERATIONS = (
    Operation("queue:list", list_queues, result_module="celery5.broker.calls.queues"),
    Operation("queue:show", show_queue, result_module="celery5.broker.calls.queues"),
    Operation("queue:storage", show_storage),
    HISTORY,
    Operation("queue:pause", pause_queue, Effect.ADJUST),
    Operation("queue:resume", resume_queue, Effect.ADJUST),
    Operation("queue:purge", purge_queue, Effect.REVOKE_SELECTED),
)
"""The operations on queues."""
